"""Models opened through llama.cpp's own C API, for tests that must not depend on pyssd.Llama.

Opened gives a context and the C++ core's Session on it; Hook calls pyssd-hook.h's functions without the core; stock_logits
evaluates a file with plain llama_decode, the reference of the skip oracle.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd import _core, _loader

_loader.load()
from llama_cpp import llama_cpp as api  # noqa: E402  # isort: skip  (the loader chooses its library)

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
KINDS = ("attn", "ffn", "mixer")

# function objects of our own: result types set here must not change those that llama_cpp or pyssd use
_lib = ctypes.CDLL(None, handle=api._lib._handle)
for _name in (
    "pyssd_borrower_init",
    "ggml_backend_reg_by_name",
    "ggml_backend_reg_get_proc_address",
):
    getattr(_lib, _name).restype = ctypes.c_void_p
_lib.pyssd_error.restype = ctypes.c_char_p
_lib.pyssd_graphs_built.restype = ctypes.c_uint64
_lib.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
_lib.ggml_backend_reg_dev_count.restype = ctypes.c_size_t


class _FirstError(logging.Handler):
    """Keeps llama.cpp's first error line, which names the cause; the later ones only say that it failed."""

    text = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and self.text == _FirstError.text:
            self.text = record.getMessage().strip()


class Opened:
    """A model and a target context, closed in the right order on exit.

    Args:
        path: the model file.
        n_ctx: cells of the context.
        n_ubatch: tokens of one graph; also n_batch.
        exact: reference mode on every context and no repacked weights.
        invariant: attention as pyssd's kernels compute it, for weights packed under kernels.offered.
        devices: ggml_backend_dev_t values that may take layers.
        n_gpu_layers: layers that go to the devices.
        outputs_max: rows of logits the target reserves.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        exact: bool = True,
        invariant: bool = False,
        devices: Sequence[int] = (),
        n_gpu_layers: int = 0,
        outputs_max: int = 64,
    ) -> None:
        self.invariant = invariant
        log, error = logging.getLogger("pyssd"), _FirstError()
        log.addHandler(error)
        try:
            self._open(path, n_ctx, n_ubatch, exact, devices, n_gpu_layers, outputs_max, error)
        finally:
            log.removeHandler(error)

    def _open(
        self,
        path: Path,
        n_ctx: int,
        n_ubatch: int,
        exact: bool,
        devices: Sequence[int],
        n_gpu_layers: int,
        outputs_max: int,
        error: _FirstError,
    ) -> None:
        model_params = api.llama_model_default_params()
        model_params.use_extra_bufts = not exact
        model_params.n_gpu_layers = n_gpu_layers
        # an empty list, as opposed to none, keeps every GPU and server out
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        model_params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        self.model = api.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path.name}: {error.text}")
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(n_ubatch, n_ctx)
        params.n_outputs_max = min(outputs_max, params.n_batch)
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        self.ctx = api.llama_init_from_model(self.model, params)
        if not self.ctx:
            api.llama_model_free(self.model)
            raise RuntimeError(f"llama.cpp makes no context for {path.name}: {error.text}")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.exact = exact
        self._session: _core.Session | None = None

    @property
    def session(self) -> _core.Session:
        """The core's Session on this context, made at first use."""
        if self._session is None:
            self._session = _core.Session(
                address(self.ctx), exact=self.exact, invariant=self.invariant
            )
        return self._session

    def bits(
        self, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()
    ) -> npt.NDArray[np.uint8]:
        """Skip flags of the blocks that a skip set names, in Session.blocks() order."""
        return skip_bits(self.session.blocks(), attention=attention, mlp=mlp)

    def close(self) -> None:
        """Free session, context and model."""
        if self._session is not None:
            self._session.close()
        if self.ctx:
            api.llama_free(self.ctx)
            api.llama_model_free(self.model)
        self.ctx = None

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class Hook:
    """pyssd-hook.h on a borrower of an Opened context: the graph surgery without the core around it."""

    class Block(ctypes.Structure):
        """struct pyssd_block."""

        _fields_ = (
            ("index", ctypes.c_int32),
            ("layer", ctypes.c_int32),
            ("kind", ctypes.c_int32),
            ("nbytes", ctypes.c_int64),
            ("device", ctypes.c_char * 64),
        )

    class Plan(ctypes.Structure):
        """struct pyssd_plan."""

        _fields_ = (
            ("skip", ctypes.POINTER(ctypes.c_uint8)),
            ("n_blocks", ctypes.c_int32),
            ("head_rows", ctypes.c_int32),
            ("argmax", ctypes.c_int32),
            ("taps", ctypes.POINTER(ctypes.c_int32)),
            ("n_taps", ctypes.c_int32),
        )

    def __init__(self, opened: Opened, *, n_batch: int = 64) -> None:
        self.lib = _lib
        self.opened = opened
        self.owner = ctypes.c_void_p(address(opened.ctx))
        _lib.pyssd_reference_set(self.owner, ctypes.c_bool(opened.exact))
        made = _lib.pyssd_borrower_init(self.owner, 1, n_batch, n_batch)
        if not made:
            raise RuntimeError(self.error(self.owner))
        self.ctx = ctypes.c_void_p(made)

    def error(self, ctx: ctypes.c_void_p | None = None) -> str:
        """Text of the last failure on the borrower (or the given context)."""
        return str(self.lib.pyssd_error(ctx or self.ctx).decode())

    def blocks(self) -> list[tuple[int, int, int, int, str]]:
        """The blocks as Session.blocks() lists them; RuntimeError with the reason when they are not understood."""
        found = (self.Block * 4096)()
        count = self.lib.pyssd_blocks_find(self.ctx, found, len(found))
        if count < 0:
            raise RuntimeError(self.error())
        return [(b.index, b.layer, b.kind, b.nbytes, b.device.decode()) for b in found[:count]]

    def plan(self, skip: npt.NDArray[np.uint8] | None) -> None:
        """Set the skip flags of the next decodes; None restores the stock graph."""
        if skip is None:
            done = self.lib.pyssd_plan_set(self.ctx, None)
        else:
            flags = skip.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            done = self.lib.pyssd_plan_set(
                self.ctx, ctypes.byref(self.Plan(flags, len(skip), 0, 0, None, 0))
            )
        if done != 0:
            raise RuntimeError(self.error())

    def logits(self, tokens: Tokens, *, start: int = 0) -> Logits:
        """Decode tokens at positions start.. on the borrower (start 0 clears the memory first): float32 [n, n_vocab]."""
        return decode(self.opened, self.ctx, tokens, start=start)

    def rewind(self, position: int) -> None:
        """Drop the cells from position on."""
        if not api.llama_memory_seq_rm(api.llama_get_memory(self.opened.ctx), 0, position, -1):
            raise RuntimeError(f"the memory cannot drop the cells from {position} on")

    def rewind_refusal(self) -> str:
        """Why the memory cannot drop its last cells; "" if it can."""
        return "" if self.lib.pyssd_memory_can_rewind(self.ctx) else self.error()

    def n_nodes(self) -> int:
        """Nodes of the graph that ran last on the borrower."""
        return int(self.lib.pyssd_graph_nodes(self.ctx))

    def n_built(self) -> int:
        """Graphs built on the borrower so far."""
        return int(self.lib.pyssd_graphs_built(self.ctx))

    def close(self) -> None:
        """Free the borrower; must precede Opened.close."""
        if self.ctx:
            api.llama_free(ctypes.cast(self.ctx, api.llama_context_p_ctypes))
        self.ctx = ctypes.c_void_p(None)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class GreedyChain:
    """A llama.cpp sampler chain that takes the likeliest token; `with GreedyChain() as chain` gives its address."""

    def __enter__(self) -> int:
        self.chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(self.chain, api.llama_sampler_init_greedy())
        return address(self.chain)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        api.llama_sampler_free(self.chain)


def keep_no_graphs(opened: Opened) -> None:
    """Let every change of width build a graph, as upstream does; call it when the blocks are known."""
    _lib.pyssd_slots_set(ctypes.c_void_p(address(opened.ctx)), ctypes.c_bool(False))


def address(pointer: object) -> int:
    """The address that a ctypes pointer holds."""
    if isinstance(pointer, int):
        return pointer
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


def skip_bits(
    blocks: Sequence[tuple[int, int, int, int, str]],
    *,
    attention: Iterable[int] = (),
    mlp: Iterable[int] = (),
) -> npt.NDArray[np.uint8]:
    """Flags [n_blocks], 1 for every attention (FFN) block of the named layers."""
    wanted = {(0, layer) for layer in attention} | {(1, layer) for layer in mlp}
    return np.array([(kind, layer) in wanted for _, layer, kind, _, _ in blocks], np.uint8)


def decode(opened: Opened, ctx: object, tokens: Tokens, *, start: int = 0) -> Logits:
    """Run llama_decode once with every row an output, after clearing the memory when start is 0."""
    ctx = ctypes.c_void_p(address(ctx))
    if start == 0:
        api.llama_memory_clear(api.llama_get_memory(opened.ctx), True)
    batch = api.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        code = api.llama_decode(ctypes.cast(ctx, api.llama_context_p_ctypes), batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
    finally:
        api.llama_batch_free(batch)
    rows = [
        np.ctypeslib.as_array(api.llama_get_logits_ith(ctx, i), (opened.n_vocab,)).copy()
        for i in range(len(tokens))
    ]
    return np.stack(rows)


def stock_logits(path: Path, tokens: Tokens, **options: Any) -> Logits:
    """Logits of every position of a fresh pass with the stock graph on the target context: no hook, no core."""
    with Opened(path, n_ubatch=max(64, len(tokens)), outputs_max=len(tokens), **options) as opened:
        _lib.pyssd_reference_set(ctypes.c_void_p(address(opened.ctx)), ctypes.c_bool(True))
        return decode(opened, opened.ctx, tokens)


def random_tokens(n: int, n_vocab: int, seed: int = 0) -> Tokens:
    """Token ids that avoid the control tokens at the start of the random models' vocabularies."""
    return np.random.default_rng(seed).integers(min(3, n_vocab - 1), n_vocab, n).astype(np.int32)


def rpc_devices(endpoint: str) -> list[int]:
    """Devices of a running ggml-rpc server, for Opened(devices=...); they are not registered with the process."""
    rpc = _lib.ggml_backend_reg_by_name(b"RPC")
    if not rpc:
        raise RuntimeError("libggml has no RPC backend")
    add = _lib.ggml_backend_reg_get_proc_address(
        ctypes.c_void_p(rpc), b"ggml_backend_rpc_add_server"
    )
    server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(endpoint.encode())
    if not server:
        raise RuntimeError(f"no ggml-rpc server answers at {endpoint}")
    count = _lib.ggml_backend_reg_dev_count(ctypes.c_void_p(server))
    return [
        _lib.ggml_backend_reg_dev_get(ctypes.c_void_p(server), ctypes.c_size_t(i))
        for i in range(count)
    ]
