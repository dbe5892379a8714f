"""Skipping a block computes what the same file computes when that block's output weights are zero.

Two independent references: the zeroed file evaluated with stock llama_decode (no pyssd code in the graph), and through
the same Session with an empty set. Skipping must also shorten the graph: it may not be a multiplication by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from lowlevel import KINDS, Hook, Logits, Opened, random_tokens, rpc_devices, stock_logits

TOLERANCE = 1e-4  # of the largest |logit|
MATTERS = 1e-2  # a block of a random model changes the logits by far more than rounding
N_TOKENS = 48  # more than gemma3's window of 32


def distance(got: Logits, expected: Logits) -> float:
    """Largest difference, in units of the largest expected |logit|."""
    assert got.shape == expected.shape
    assert np.all(np.isfinite(expected))
    return float(np.max(np.abs(got - expected)) / np.max(np.abs(expected)))


def check(
    model: Path, folder: Path, attention: Iterable[int], mlp: Iterable[int], **options: Any
) -> None:
    """Compare skipping with zeroing on one model and skip set."""
    attention, mlp = sorted(attention), sorted(mlp)
    zeroed = folder / "zeroed.gguf"
    tiny.zero_blocks(model, zeroed, attention=attention, mlp=mlp)
    with Opened(model, **options) as opened:
        tokens = random_tokens(N_TOKENS, opened.n_vocab)
        skip = opened.bits(attention=attention, mlp=mlp)
        assert skip.sum() == len(attention) + len(mlp)
        skipped = opened.session.skip_logits(tokens, skip)
        full = opened.session.skip_logits(tokens, None)
    with Opened(zeroed, **options) as opened:
        same_session = opened.session.skip_logits(tokens, None)
    assert distance(skipped, same_session) <= TOLERANCE
    assert distance(skipped, stock_logits(zeroed, tokens, **options)) <= TOLERANCE
    if attention or mlp:
        assert distance(skipped, full) > MATTERS


def random_set(family: str, seed: int) -> tuple[list[int], list[int]]:
    """A random skip set of one to all but one blocks."""
    rng = np.random.default_rng([seed, tiny.FAMILIES[family].shape.n_layer])
    n_layer = tiny.FAMILIES[family].shape.n_layer
    chosen = rng.permutation(2 * n_layer)[: rng.integers(1, 2 * n_layer)]
    return [int(c) for c in chosen if c < n_layer], [
        int(c) - n_layer for c in chosen if c >= n_layer
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_skip_sets_equal_the_zeroed_file(
    family: str, family_model: Path, tmp_path: Path, seed: int
) -> None:
    check(family_model, tmp_path, *random_set(family, seed))


def test_every_single_block_equals_the_zeroed_file(
    family: str, family_model: Path, tmp_path: Path
) -> None:
    layers = range(tiny.FAMILIES[family].shape.n_layer)
    for layer in layers:
        check(family_model, tmp_path, [layer], [])
        check(family_model, tmp_path, [], [layer])


def test_no_block_skipped_equals_the_file(family_model: Path, tmp_path: Path) -> None:
    check(family_model, tmp_path, [], [])


def test_all_attention_all_ffn_and_everything_skipped(
    family: str, family_model: Path, tmp_path: Path
) -> None:
    layers = range(tiny.FAMILIES[family].shape.n_layer)
    check(family_model, tmp_path, layers, [])
    check(family_model, tmp_path, [], layers)
    check(family_model, tmp_path, layers, layers)


def test_all_layers_of_one_window_kind_skipped(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shape = tiny.FAMILIES["gemma3"].shape
    sliding = [layer for layer in range(shape.n_layer) if (layer + 1) % shape.window_period]
    whole = [layer for layer in range(shape.n_layer) if layer not in sliding]
    assert sliding
    assert whole
    check(tiny_model("gemma3"), tmp_path, sliding, [])
    check(tiny_model("gemma3"), tmp_path, whole, [])


def test_window_of_gemma3_matters(tiny_model: Callable[..., Path]) -> None:
    """Guards the two tests above: with a window wider than the text they would not test windows."""
    tokens = random_tokens(N_TOKENS, 512)
    narrow = stock_logits(tiny_model("gemma3"), tokens)
    wide = stock_logits(tiny_model("gemma3", n_window=64), tokens)
    assert distance(narrow[:32], wide[:32]) <= TOLERANCE
    assert distance(narrow[-1:], wide[-1:]) > MATTERS


@pytest.mark.parametrize("name", ["qwen2moe"])
def test_shared_expert_is_part_of_its_ffn_block(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    check(tiny_model(name), tmp_path, [1], [0, 2])
    check(tiny_model(name), tmp_path, range(4), range(4))


@pytest.mark.parametrize("weight_type", ["F16", "Q8_0", "Q4_0"])
def test_quantised_files(tiny_model: Callable[..., Path], tmp_path: Path, weight_type: str) -> None:
    check(tiny_model("llama", weight_type=weight_type), tmp_path, [0, 3], [1, 3])


def test_default_kernels_and_repacked_weights(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, zeroed = tiny_model("llama", weight_type="Q4_0"), tmp_path / "zeroed.gguf"
    tiny.zero_blocks(model, zeroed, attention=[1], mlp=[2])
    tokens = random_tokens(N_TOKENS, 512)
    with Opened(model, exact=False) as opened:
        skipped = opened.session.skip_logits(tokens, opened.bits(attention=[1], mlp=[2]))
    with Opened(zeroed, exact=False) as opened:
        assert distance(skipped, opened.session.skip_logits(tokens, None)) <= TOLERANCE


def test_tied_embeddings(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    check(tiny_model("llama", tied=True), tmp_path, [2], [0])


@pytest.mark.parametrize("name", [*(f for f in tiny.FAMILIES if f != "mamba")])
def test_blocks_of_each_family(tiny_model: Callable[..., Path], name: str) -> None:
    shape = tiny.FAMILIES[name].shape
    with Opened(tiny_model(name)) as opened:
        blocks = opened.session.blocks()
        assert opened.session.refusal is None
    assert len(blocks) == tiny.BLOCK_COUNTS[name]
    assert [index for index, *_ in blocks] == list(range(len(blocks)))
    expected = [(layer, kind) for layer in range(shape.n_layer) for kind in ("attn", "ffn")]
    assert [(layer, KINDS[kind]) for _, layer, kind, _, _ in blocks] == expected
    # the F32 matrices of an attention: q, k, v and the output projection; norms add a few hundred bytes
    attention = 4 * shape.n_embd * (2 * shape.n_embd + 2 * shape.n_kv)
    for _, _, kind, nbytes, device in blocks:
        assert device == "CPU"
        if KINDS[kind] == "attn":
            assert attention <= nbytes <= attention * 1.05


def test_recurrent_model_is_refused_with_a_reason(mamba_model: Path) -> None:
    with Opened(mamba_model) as opened:
        reason = opened.session.refusal
    assert reason
    assert len(reason) > 10


def test_skipping_shortens_the_graph(family: str, family_model: Path) -> None:
    layers = range(tiny.FAMILIES[family].shape.n_layer)
    tokens = random_tokens(16, 512)
    with Opened(family_model) as opened, Hook(opened) as hook:
        blocks = opened.session.blocks()
        counts = []
        for n in range(len(layers) + 1):
            skip = opened.bits(attention=layers[:n], mlp=layers[:n])
            hook.plan(skip)
            hook.logits(tokens)
            counts.append(hook.n_nodes())
        hook.plan(None)
        hook.logits(tokens)
        assert hook.n_nodes() == counts[0]
    per_layer = -np.diff(counts)
    assert np.all(per_layer >= 10)
    # what is left when everything is skipped: embedding, final norm, head
    assert counts[-1] <= 8
    assert len(blocks) == 2 * len(layers)


def test_session_reports_the_shorter_graph(tiny_llama: Path) -> None:
    tokens = random_tokens(16, 512)
    with Opened(tiny_llama) as opened:
        opened.session.skip_logits(tokens, None)
        full = opened.session.graph_nodes()["scout"]
        opened.session.skip_logits(tokens, opened.bits(attention=[1], mlp=[1]))
        assert 0 < opened.session.graph_nodes()["scout"] < full


def test_long_text_in_several_batches(tiny_llama: Path, tmp_path: Path) -> None:
    """A pass longer than one scout batch and than one window of 256 cells."""
    tokens = random_tokens(400, 512)
    zeroed = tmp_path / "zeroed.gguf"
    tiny.zero_blocks(tiny_llama, zeroed, attention=[0, 2], mlp=[1])
    with Opened(tiny_llama) as opened:
        skipped = opened.session.skip_logits(tokens, opened.bits(attention=[0, 2], mlp=[1]))
    assert distance(skipped, stock_logits(zeroed, tokens)) <= TOLERANCE


def test_users_cells_are_untouched(tiny_llama: Path) -> None:
    prompt, more = random_tokens(40, 512), random_tokens(8, 512, seed=1)
    with Opened(tiny_llama) as opened:
        opened.session.prefill(prompt)
        opened.session.prefill(more)
        expected = opened.session.logits().copy()
    with Opened(tiny_llama) as opened:
        opened.session.prefill(prompt)
        opened.session.skip_logits(
            random_tokens(30, 512, seed=2), opened.bits(attention=[0], mlp=[3])
        )
        assert opened.session.n_past == len(prompt)
        opened.session.prefill(more)
        assert np.array_equal(opened.session.logits(), expected)


@pytest.mark.parametrize("kernels", ["auto", "upstream"])
def test_llama_skip_logits_takes_every_form_of_a_skip_set(
    tiny_llama: Path, tmp_path: Path, kernels: str
) -> None:
    import pyssd

    options: dict[str, Any] = {
        "n_ctx": 512,
        "verbose": False,
        "exact": True,
        "n_threads": 1,
        "kernels": kernels,
    }

    zeroed = tmp_path / "zeroed.gguf"
    tiny.zero_blocks(tiny_llama, zeroed, attention=[1, 2], mlp=[3])
    tokens = random_tokens(N_TOKENS, 512)
    with pyssd.Llama(str(zeroed), **options) as llm:
        expected = llm.skip_logits(tokens.tolist(), None)
    if kernels == "upstream":
        assert np.array_equal(expected, stock_logits(zeroed, tokens))
    llm = pyssd.Llama(str(tiny_llama), **options)
    try:
        assert len(llm.blocks) == tiny.BLOCK_COUNTS["llama"]
        for skip_set in (
            "a:1-2 f:3",
            {"attention": [1, 2], "mlp": [3]},
            pyssd.SkipSet(attention=[1, 2], mlp=[3]),
        ):
            got = llm.skip_logits(tokens.tolist(), skip_set)
            assert got.dtype == np.float32
            assert distance(got, expected) <= TOLERANCE
        assert distance(llm.skip_logits(tokens.tolist(), None), expected) > MATTERS
    finally:
        llm.close()


def check_real(model: Path, folder: Path, n_layer: int) -> None:
    """One skip set on a real file: every fifth attention, every third FFN, the last layer's both."""
    attention = sorted({*range(1, n_layer, 5), n_layer - 1})
    mlp = sorted({*range(2, n_layer, 3), n_layer - 1})
    zeroed = folder / "zeroed.gguf"
    tiny.zero_blocks(model, zeroed, attention=attention, mlp=mlp)
    with Opened(model) as opened:
        assert len(opened.session.blocks()) == 2 * n_layer
        tokens = random_tokens(24, opened.n_vocab)
        skipped = opened.session.skip_logits(tokens, opened.bits(attention=attention, mlp=mlp))
    expected = stock_logits(zeroed, tokens)
    zeroed.unlink()
    assert distance(skipped, expected) <= TOLERANCE


def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """A real quantised model in the default tests: Q4_1."""
    check_real(smollm2, tmp_path, 30)


@pytest.mark.slow  # the gguf package takes 20 s to read a vocabulary of 150,000 tokens
@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "n_layer"), [("gemma3_270m", 18), ("qwen_05b", 24), ("qwen_15b", 28)]
)
def test_larger_real_models(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, n_layer: int
) -> None:
    """Mixed k-quants: Q4_K, Q5_0, Q6_K, Q8_0."""
    check_real(request.getfixturevalue(name), tmp_path, n_layer)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3"])
def test_offloaded_layers(
    tiny_model: Callable[..., Path], tmp_path: Path, rpc_server: str, name: str, share: float
) -> None:
    n_layer = tiny.FAMILIES[name].shape.n_layer
    n_offloaded = int(n_layer * share)
    n_gpu_layers = n_offloaded + 1  # llama.cpp counts the output matrix as the last layer
    options = {"devices": rpc_devices(rpc_server), "n_gpu_layers": n_gpu_layers}
    with Opened(tiny_model(name), **options) as opened:
        on_server = {layer for _, layer, _, _, device in opened.session.blocks() if device != "CPU"}
    assert on_server == set(range(n_layer - n_offloaded, n_layer))
    check(tiny_model(name), tmp_path, [0, 2], [1, 3], **options)
    check(tiny_model(name), tmp_path, range(n_layer), [], **options)
    check(tiny_model(name), tmp_path, range(n_layer), range(n_layer), **options)
