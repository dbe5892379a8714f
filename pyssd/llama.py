"""class Llama: a drop-in for llama_cpp.Llama that decodes self-speculatively."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pyssd import kernels as cpu_kernels
from pyssd._core import Session
from pyssd.completion import RequestLlama
from pyssd.config import SpecConfig
from pyssd.cost_cache import costs_of
from pyssd.errors import PyssdError, UnsupportedModelError
from pyssd.exactness import Exactness, judge_exactness
from pyssd.loading import (
    Progress,
    flash_attention_is_on,
    llama_lib,
    llama_module,
    load_error,
    load_options,
    overridden,
    physical_cores,
)
from pyssd.model_file import check_model_file
from pyssd.options import check_options, per_call_signature, reject_unknown
from pyssd.planning import DraftMemory, Planner, read_skip_set
from pyssd.requests import CLOSED, Gate
from pyssd.skipset import Block, BlockKind, SkipSet
from pyssd.stats import SpecStats

_KINDS: tuple[BlockKind, ...] = ("attn", "ffn", "mixer")
_UPSTREAM = tuple(
    name for name in inspect.signature(llama_module.Llama.__init__).parameters if name != "kwargs"
)


class Llama(RequestLlama):
    """A model that drafts with a part of its own blocks and verifies with all of them.

    Takes every argument of llama_cpp.Llama (documented there) and those below; methods and results are llama_cpp's.

    Args:
        model_path: The GGUF file, the first part of a split model.
        flash_attn: None = on where the model and the device allow it.
        n_threads: None = the physical cores, for single tokens and batches alike.
        speculative: "auto" (draft while it measures faster), "off" / False, True (draft in every round), a SpecConfig
            or a dict of its fields.
        skip_set: Blocks to leave out in drafting: SkipSet, "a:3,5-8 f:1,3", a path or a dict; a given set always drafts,
            where nothing can be copied from the context.
        profile: Not in this version.
        exact: Same tokens as plain decoding (see `exactness`). None = where pyssd's kernels give it for nothing, True = also
            at the price of upstream's slow ones, False = not asked for.
        coupling: "gumbel" (draft and target share their noise), "llama_cpp" (its sampler and its text for a seed).
        kernels: "auto" (pyssd's on the CPU, where they know the weight type) or "upstream".
        selector: What looks for a skip set if none is given; None or "greedy" in this version.
        progress_callback: Called with 0..1 while the weights load; returning False aborts.

    Raises:
        TypeError: An argument is not known.
        UnsupportedModelError: The file is no usable model.
        OptionError: An argument has a value that this version cannot honour.
        SkipSetError: The skip set does not fit the model.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        split_mode: int = llama_lib.LLAMA_SPLIT_MODE_LAYER,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = llama_lib.LLAMA_DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = llama_lib.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
        pooling_type: int = llama_lib.LLAMA_POOLING_TYPE_UNSPECIFIED,
        attention_type: int = llama_lib.LLAMA_ATTENTION_TYPE_UNSPECIFIED,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool | None = None,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Any = None,
        draft_model: None = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        speculative: str | bool | SpecConfig | Mapping[str, object] = "auto",
        skip_set: SkipSet | str | Path | Mapping[str, object] | None = None,
        profile: None = None,
        exact: bool | None = None,
        coupling: str = "gumbel",
        kernels: str = "auto",
        selector: str | None = None,
        progress_callback: Callable[[float], bool] | None = None,
        **unknown: Any,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("unknown", "__class__")
        }
        del given["self"]
        reject_unknown(unknown, given, "Llama")
        self._gate = Gate()
        self._session: Session | None = None
        self._planner: Planner | None = None
        self._blocks: list[Block] = []
        self._no_speculation = ""
        self._elsewhere: list[str] = []  # buffers that hold weights outside of pyssd's kernels
        self._round_start: int | None = None
        self._note_rows(0, 0)
        self._vocab_only = vocab_only
        self.stats = SpecStats()
        self.totals = SpecStats()
        self._own_options = {
            name: given[name]
            for name in (
                "speculative",
                "skip_set",
                "exact",
                "coupling",
                "kernels",
                "flash_attn",
                "selector",
                "tokenizer",
            )
        }
        check_options(given)
        spec_config = SpecConfig.of(speculative)[1]
        self.coupling = "llama_cpp" if "llama_cpp" in (coupling, spec_config.coupling) else "gumbel"
        given["model_path"] = os.fspath(model_path)
        model_file = check_model_file(model_path)
        if lora_path is not None:
            check_model_file(lora_path)
        self._packed = cpu_kernels.are_chosen(
            kernels, exact=bool(exact), weight_types=model_file.weight_types
        )
        with cpu_kernels.offered(self._packed, tied=model_file.tied):
            self._load(
                {name: given[name] for name in _UPSTREAM if name in given},
                bool(exact),
                progress_callback,
            )
        if self._packed:
            cpu_kernels.release_file_pages(given["model_path"])
        try:
            self._start(bool(exact), speculative, skip_set, model_file.weight_types)
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        upstream: dict[str, Any],
        exact: bool,
        progress_callback: Callable[[float], bool] | None,
    ) -> None:
        n_ctx, n_batch = upstream["n_ctx"], upstream["n_batch"]
        upstream["n_threads"] = upstream["n_threads"] or physical_cores()
        upstream["n_threads_batch"] = upstream["n_threads_batch"] or upstream["n_threads"]
        progress = Progress(progress_callback)
        options = load_options(
            reference=exact and not self._packed,
            packed=self._packed and upstream["n_gpu_layers"] != 0,
            flash_attn=True if exact and upstream["flash_attn"] is None else upstream["flash_attn"],
            all_rows=upstream["logits_all"] or upstream["embedding"],
            n_batch=min(n_ctx, n_batch) if n_ctx else n_batch,
            progress_callback=None if progress_callback is None else progress,
        )
        upstream["flash_attn"] = exact if upstream["flash_attn"] is None else upstream["flash_attn"]
        try:
            with overridden(options):
                super().__init__(**upstream)
            if self.lora_path and not self._lora_adapter:  # a null pointer passes llama_cpp's check
                raise RuntimeError("no LoRA adapter")
        except BaseException as error:
            with contextlib.suppress(AttributeError):  # it may have failed before it made its stack
                self._stack.close()
            progress.raise_if_stopped(upstream["model_path"])
            if isinstance(error, (ValueError, RuntimeError)) and not isinstance(error, PyssdError):
                raise load_error(upstream, options.errors, error) from error
            raise

    def _start(
        self, exact: bool, speculative: object, skip_set: object, weight_types: frozenset[str]
    ) -> None:
        """Add what a loaded llama_cpp.Llama lacks: real array sizes, a session, blocks, the exactness report."""
        n_rows = self._n_ctx if self._logits_all else 0
        self.input_ids = np.zeros(
            self._n_ctx, dtype=np.intc
        )  # n_ctx is padded: larger than what was asked for
        self.scores = np.zeros((n_rows, self._n_vocab), dtype=np.single)
        self._no_speculation = self._why_no_session()
        if not self._no_speculation:
            try:
                session = self._open_session(exact)
            except UnsupportedModelError as error:
                self._no_speculation = str(error)
            else:
                self._session = session
                self._stack.callback(session.close)
                self._no_speculation = session.refusal or ""
                self._blocks = [
                    Block(index, layer, _KINDS[kind], nbytes, device)
                    for index, layer, kind, nbytes, device in session.blocks()
                ]
        chosen = None if skip_set is None else read_skip_set(skip_set, self._blocks or None)
        self.exactness: Exactness = judge_exactness(
            exact=exact,
            packed=self._packed,
            elsewhere=self._elsewhere,
            flash_attn=self._session is not None and flash_attention_is_on(self._ctx.ctx),
            devices={block.device for block in self._blocks},
            weight_types=weight_types,
            guard=SpecConfig.of(speculative)[1].guard_margin,
        )
        if self._session is not None:
            self._planner = Planner(
                self._session,
                self._blocks,
                costs_of(self, self._session, speculative, exact=exact),
                speculative,
                chosen,
                self._n_vocab,
                self._n_ctx,
                can_trim=self.lora_path is None,
                is_exact=self.exactness.level > 1,
            )

    def _open_session(self, exact: bool) -> Session:
        """Open the session, with the reference mode where exactness was asked for and packed weights do not give it."""
        if not self._packed:
            return Session(self._ctx.ctx, exact=exact, single_rows=not exact)
        session = Session(self._ctx.ctx, invariant=True)
        self._elsewhere = sorted(
            {buffer for _, _, buffer, _ in session.weights()} - {cpu_kernels.BUFFER}
        )
        if exact and self._elsewhere:
            session.close()
            return Session(self._ctx.ctx, exact=True, invariant=True)
        if self._elsewhere:
            session.close()
            return Session(self._ctx.ctx, invariant=True, single_rows=True)
        return session

    def _why_no_session(self) -> str:
        if self._vocab_only:
            return "the model was loaded with vocab_only=True"
        if self.context_params.embeddings:
            return "the model was loaded with embedding=True, which evaluates without drafting"
        if self._ctx.memory is None:
            return "the model keeps no KV memory"
        return ""

    # what the object can tell -------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._gate.closed:
            return "Llama(closed)"
        mode = (
            f"off ({self._no_speculation})"
            if self._no_speculation
            else self._own_options["speculative"]
        )
        return f"Llama({self.model_path!r}, n_ctx={self._n_ctx}, speculative={mode}, exactness={self.exactness.level})"

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed texts, as llama_cpp.Llama does (an object made with embedding=True)."""
        call, _ = self._gate.join()
        with self._gate.enter(call):
            return super().embed(*args, **kwargs)

    def draft_memory(self) -> DraftMemory:
        """Return what drafts are recycled from now, for `forget_drafts` to go back to."""
        call, _ = self._gate.join()
        with self._gate.enter(call):
            return DraftMemory(None) if self._planner is None else self._planner.draft_memory()

    def forget_drafts(self, back_to: DraftMemory | None = None) -> None:
        """Forget what drafts are copied and recycled from; texts do not change, only the next drafts do.

        For measurements: a prompt that is run again would otherwise be answered from memory.

        Args:
            back_to: Forget only what came after this memory was taken; None = everything.
        """
        call, _ = self._gate.join()
        with self._gate.enter(call):
            if self._planner is not None:
                self._planner.forget_drafts(back_to)

    # life cycle ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the session, the context and the model; a running generation ends first. Idempotent."""
        if not self._gate.shut(self._interrupt):
            return
        model = self.__dict__.get("_model")
        with contextlib.suppress(AttributeError):  # not there if loading failed early
            self._stack.close()
        if model is not None:
            model.model = model.vocab = CLOSED  # tokenizers that someone still holds use them
        for name in ("_model", "_ctx", "_batch", "tokenizer_"):
            setattr(self, name, CLOSED)
        self._session = self._planner = self._sampler = None
        self.scores = np.zeros((0, 0), dtype=np.single)

    def __del__(self) -> None:
        # may run on a half-made object, and while the interpreter shuts down
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What an equal object can be made from: the arguments; KV and callbacks are not kept."""
        self.n_ctx()  # a closed object says so
        state: dict[str, Any] = super().__getstate__()
        return {**state, **self._own_options, "vocab_only": self._vocab_only}


for _name in ("create_completion", "__call__", "create_chat_completion"):
    getattr(Llama, _name).__signature__ = per_call_signature(getattr(llama_module.Llama, _name))
