"""A draft that applies the LM head to its first rows only: they have the logits of the whole head, and texts stay the same.

Output matrices of three quantised types, of their own or shared with the embeddings, in every layout that weights can have:
packed by pyssd ("auto"), repacked by llama.cpp ("upstream"), as in the file ("exact"), and on a ggml-rpc server ("rpc" holds
the whole model, "rpc head" the head alone, beside packed layers).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from core_rounds import Chain, Run, decode_drafted, decode_plain
from lowlevel import Opened, api, random_tokens, rpc_devices

from pyssd import errors, kernels
from pyssd.config import HEAD_ROWS_STEP

SHARES = (1 / 2, 1 / 4, 1 / 8)
TYPES = ("Q4_0", "Q8_0", "Q6_K")
LAYOUTS = ("auto", "upstream", "exact", "rpc", "rpc head")
SIZES: dict[str, Any] = {"n_embd": 256, "n_head": 4, "n_layer": 3, "n_vocab": 2048}
N_TOKENS = 28


def rows_of(share: float, n_vocab: int) -> int:
    """A share of the vocabulary in rows that a head can be trimmed to."""
    return max(1, round(share * n_vocab / HEAD_ROWS_STEP)) * HEAD_ROWS_STEP


@pytest.fixture(scope="module")
def quantised(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """quantised("Q6_K", tied=True): a random model of Q8_0 matrices whose head has that type, made by llama.cpp."""
    folder = tmp_path_factory.mktemp("head")
    made: dict[tuple[str, bool, int], Path] = {}

    def get(head_type: str, *, tied: bool = False, n_vocab: int = SIZES["n_vocab"]) -> Path:
        key = (head_type, tied, n_vocab)
        if key not in made:
            source = tiny_model("llama", **{**SIZES, "n_vocab": n_vocab, "tied": tied})
            made[key] = folder / f"{len(made)}.gguf"
            params = api.llama_model_quantize_default_params()
            params.ftype = api.LLAMA_FTYPE_MOSTLY_Q8_0
            params.nthread = 1
            wanted = int(gguf.GGMLQuantizationType[head_type])
            params.output_tensor_type = params.token_embedding_type = wanted
            code = api.llama_model_quantize(str(source).encode(), str(made[key]).encode(), params)
            assert code == 0
        return made[key]

    return get


@contextmanager
def opened(path: Path, layout: str, tied: bool, server: str) -> Iterator[Opened]:
    """The model in one of LAYOUTS."""
    options: dict[str, Any] = {"exact": layout in ("exact", "rpc")}
    if layout.startswith("rpc"):
        n_gpu_layers = SIZES["n_layer"] + 1 if layout == "rpc" else 1
        options |= {"devices": rpc_devices(server), "n_gpu_layers": n_gpu_layers}
    packed = layout in ("auto", "rpc head")
    with ExitStack() as stack:
        with kernels.offered(packed, tied=tied):
            made = stack.enter_context(Opened(path, invariant=packed, **options))
        yield made


def head_of(made: Opened) -> tuple[str, str]:
    """Type and buffer of the matrix that the head multiplies with."""
    found = [
        (kind.upper(), buffer)
        for name, kind, buffer, _ in made.session.weights()
        if name in ("output.weight", "token_embd.weight")
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_type", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_rows_have_the_logits_of_the_whole_head(
    quantised: Callable[..., Path], rpc_server: str, layout: str, head_type: str, tied: bool
) -> None:
    with opened(quantised(head_type, tied=tied), layout, tied, rpc_server) as made:
        session = made.session
        kind, buffer = head_of(made)
        assert kind == head_type
        if layout == "auto":
            assert buffer == kernels.BUFFER
        if layout.startswith("rpc"):
            assert buffer.startswith("RPC")
        tokens = random_tokens(70, made.n_vocab, 1)  # more than one pass of the scout
        skip = made.bits(attention=[1], mlp=[2])
        for bits in (None, skip):
            whole = session.skip_logits(tokens, bits)
            for share in SHARES:
                rows = rows_of(share, made.n_vocab)
                trimmed = session.skip_logits(tokens, bits, rows)
                assert np.array_equal(trimmed[:, :rows], whole[:, :rows]), (share, bits)
                assert np.isneginf(trimmed[:, rows:]).all()
            assert np.array_equal(session.skip_logits(tokens, bits), whole)


def check_rounds(run: Run, plain: Run, rows: int, *, same_model: bool) -> None:
    """Drafts hold ids below rows only; where the draft is the whole model, nothing but an id beyond ends one early."""
    assert run.drafted > 0
    for draft, emitted in run.drafts:
        assert all(0 <= token < rows for token in draft)
        for drafted, token in zip(draft, emitted, strict=False):
            if drafted != token:
                assert token >= rows or not same_model
                break
    assert run.tokens == plain.tokens


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_type", TYPES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "upstream"])
def test_text_is_that_of_plain_decoding(
    quantised: Callable[..., Path], rpc_server: str, layout: str, head_type: str, tied: bool
) -> None:
    """Where products do not depend on the width of the batch; upstream's repacked ones may, see the next test."""
    with opened(quantised(head_type, tied=tied), layout, tied, rpc_server) as made:
        session = made.session
        prompt = random_tokens(24, made.n_vocab, 3)
        none = np.zeros(len(session.blocks()), np.uint8)
        for kind in ("greedy", "gumbel"):

            def chain(kind: str = kind) -> Chain:
                start = Chain(made)
                return start.greedy() if kind == "greedy" else start.filters(1.0).gumbel(7)

            with chain() as target:
                plain = decode_plain(made, target, prompt, N_TOKENS)
            beyond = []
            for share in SHARES:
                rows = rows_of(share, made.n_vocab)
                beyond.append(sum(token >= rows for token in plain.tokens))
                for skip in (none, made.bits(attention=[1], mlp=[2])):
                    session.set_skip(skip, rows)
                    with chain() as target:
                        drafted = decode_drafted(made, target, prompt, N_TOKENS)
                    check_rounds(drafted, plain, rows, same_model=kind == "greedy" and skip is none)
            assert beyond[-1] > beyond[0] > 0  # the trimmed rows matter


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_type", TYPES)
def test_drafts_stay_below_the_rows_with_repacked_weights(
    quantised: Callable[..., Path], rpc_server: str, head_type: str, tied: bool
) -> None:
    with opened(quantised(head_type, tied=tied), "upstream", tied, rpc_server) as made:
        prompt = random_tokens(24, made.n_vocab, 3)
        for share in SHARES:
            rows = rows_of(share, made.n_vocab)
            made.session.set_skip(made.bits(mlp=[1]), rows)
            with Chain(made).greedy() as target:
                run = decode_drafted(made, target, prompt, N_TOKENS)
            assert run.drafted > 0
            assert max(max(draft) for draft, _ in run.drafts) < rows
            assert max(run.tokens) >= rows


@pytest.mark.parametrize("layout", ["auto", "upstream"])
@pytest.mark.parametrize("head_type", TYPES)
def test_vocabulary_that_fills_no_whole_tile(
    quantised: Callable[..., Path], rpc_server: str, head_type: str, layout: str
) -> None:
    """Packed tiles hold 16 rows, repacked groups 4 or 8; 2059 is a prime number bigger than SIZES' 2048."""
    path = quantised(head_type, n_vocab=2059)
    with opened(path, layout, False, rpc_server) as made:
        tokens = random_tokens(20, made.n_vocab, 1)
        whole = made.session.skip_logits(tokens, None)
        for rows in (*(rows_of(share, made.n_vocab) for share in SHARES), 2048):
            trimmed = made.session.skip_logits(tokens, None, rows)
            assert np.array_equal(trimmed[:, :rows], whole[:, :rows])
            assert np.isneginf(trimmed[:, rows:]).all()


@pytest.mark.parametrize("layout", ["auto", "upstream"])
def test_plan_can_change_its_rows_between_rounds(
    quantised: Callable[..., Path], rpc_server: str, layout: str
) -> None:
    """As a controller does: no row keeps what an earlier plan put there."""
    with opened(quantised("Q6_K"), layout, False, rpc_server) as made:
        session = made.session
        tokens = random_tokens(12, made.n_vocab, 2)
        whole = session.skip_logits(tokens, None)
        for rows in (256, 1024, 512, 0, 256):
            got = session.skip_logits(tokens, None, rows)
            kept = rows or made.n_vocab
            assert np.array_equal(got[:, :kept], whole[:, :kept])
            assert np.isneginf(got[:, kept:]).all()
        prompt = random_tokens(24, made.n_vocab, 3)
        session.rewind(0)
        session.prefill(prompt)
        last = session.sample(0)
        for rows in (256, 1024, 0):
            session.set_skip(np.zeros(len(session.blocks()), np.uint8), rows)
            draft, _ = session.draft(0, last, 1)
            kept = rows or made.n_vocab
            context = np.append(prompt, np.int32(last))
            assert draft.tolist() == [int(session.skip_logits(context, None)[-1, :kept].argmax())]


@pytest.mark.parametrize("layout", ["auto", "upstream"])
def test_operations_behind_the_head_are_kept(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rpc_server: str, layout: str
) -> None:
    """A bound on the logits (gemma) and a bias of the head (phi, qwen): both are trimmed with it."""

    def biased(w: tiny.TinyWriter, blk: str) -> None:
        llama = tiny.FAMILIES["llama"].layer
        llama(w, blk)
        if blk == "blk.0":
            w.gguf.add_tensor("output.bias", 3 * w.draw("output.bias", w.shape.n_vocab))

    family = dataclasses.replace(tiny.FAMILIES["olmo2"], layer=biased)
    monkeypatch.setitem(tiny.FAMILIES, "qwen2", family)
    models = {
        name: tiny_model(name, weight_type="Q8_0", n_vocab=1024, **options)
        for name, options in (("qwen2", {}), ("gemma3", {"softcap": 4.0}), ("olmo2", {}))
    }
    spread = {}
    for name, path in models.items():
        with opened(path, layout, False, rpc_server) as made:
            tokens = random_tokens(20, made.n_vocab, 1)
            whole = made.session.skip_logits(tokens, None)
            trimmed = made.session.skip_logits(tokens, None, 512)
            assert np.array_equal(trimmed[:, :512], whole[:, :512])
            assert np.isneginf(trimmed[:, 512:]).all()
            spread[name] = float(np.abs(whole.mean(axis=0)).mean()), float(np.abs(whole).max())
    # or the operations would not be there
    assert spread["qwen2"][0] > 2 * spread["olmo2"][0]
    assert spread["gemma3"][1] <= 4.0


def test_rows_that_cannot_be_a_view_are_refused(
    quantised: Callable[..., Path], rpc_server: str
) -> None:
    with opened(quantised("Q6_K"), "auto", False, rpc_server) as made:
        none = np.zeros(len(made.session.blocks()), np.uint8)
        tokens = random_tokens(4, made.n_vocab)
        for rows in (8, 100, 2040):
            with pytest.raises(errors.SkipSetError, match="multiple of 256"):
                made.session.skip_logits(tokens, none, rows)
        whole = made.session.skip_logits(tokens, None)
        assert np.array_equal(made.session.skip_logits(tokens, None, made.n_vocab), whole)


def test_trimming_is_refused_beside_a_lora(tiny_llama: Path, tiny_lora: Path) -> None:
    """An adapter may change the head, whose low-rank product has all rows."""
    with Opened(tiny_llama) as made:
        session, tokens = made.session, random_tokens(8, made.n_vocab)
        whole = session.skip_logits(tokens, None)
        assert np.isneginf(session.skip_logits(tokens, None, 256)[:, 256:]).all()
        adapter = api.llama_adapter_lora_init(made.model, str(tiny_lora).encode())
        adapters, scales = (type(adapter) * 1)(adapter), (ctypes.c_float * 1)(1.0)
        assert api.llama_set_adapters_lora(made.ctx, adapters, 1, scales) == 0
        with pytest.raises(errors.SkipSetError, match="LoRA"):
            session.skip_logits(tokens, None, 256)
        changed = session.skip_logits(tokens, None)
        assert np.isfinite(changed).all()
        assert not np.allclose(changed, whole, atol=1e-2)
