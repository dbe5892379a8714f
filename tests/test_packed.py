"""pyssd's CPU kernels inside llama.cpp: any width gives the same bits, and upstream is untouched where they are off."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import Opened, random_tokens

from pyssd import Llama, kernels

WIDTHS = (2, 3, 4, 5, 8, 16)
PROBED = 16
WEIGHT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0")


def make(path: Path, **options: Any) -> Llama:
    return Llama(
        str(path),
        **{"n_ctx": 512, "n_threads": 1, "verbose": False, "speculative": "off", **options},
    )


def rows_of(llm: Llama, tokens: np.ndarray, context: int, width: int) -> np.ndarray:
    """Logits of PROBED tokens after a context, decoded width at a time; float32 [PROBED, n_vocab]."""
    session = llm._session
    assert session is not None
    session.rewind(0)
    session.prefill(tokens[:context])
    rows = np.empty((PROBED, llm.n_vocab()), np.float32)
    for start in range(0, PROBED, width):
        stop = min(start + width, PROBED)
        session.prefill(tokens[context + start : context + stop], rows[start:stop])
    return rows


def check_widths(path: Path, contexts: tuple[int, ...], threads: tuple[int, ...]) -> None:
    """Logits are the same bits at every width and number of threads."""
    reference: dict[int, np.ndarray] = {}
    for n_threads in threads:
        with make(path, n_ctx=max(contexts) + 64, n_threads=n_threads) as llm:
            assert llm.exactness.level == 2, llm.exactness
            for context in contexts:
                tokens = random_tokens(context + PROBED, min(llm.n_vocab(), 30000), 1)
                single = rows_of(llm, tokens, context, 1)
                assert np.array_equal(reference.setdefault(context, single), single)
                for width in WIDTHS:
                    assert np.array_equal(rows_of(llm, tokens, context, width), single), width


def test_logits_do_not_depend_on_width_or_threads(smollm2: Path) -> None:
    check_widths(smollm2, (20, 600), (1, 2))


@pytest.mark.slow
def test_nor_at_a_long_context(smollm2: Path) -> None:
    check_widths(smollm2, (3000,), (2,))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["gemma3_270m", "qwen_05b", "qwen_15b"])
def test_nor_on_larger_models(request: pytest.FixtureRequest, name: str) -> None:
    check_widths(request.getfixturevalue(name), (20, 600, 3000), (1, 2))


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_every_type_that_gguf_writes(tiny_model: Callable[..., Path], weight_type: str) -> None:
    check_widths(tiny_model("llama", weight_type=weight_type), (20, 300), (1, 2))


def test_every_family(family_model: Path) -> None:
    check_widths(family_model, (20, 300), (1, 2))


FULL_PRECISION = {"flash_attn": False, "type_k": 0, "type_v": 0}  # F32 cells and sums


def test_products_are_those_of_upstream(family_model: Path) -> None:
    """Routed experts included: a wrong row or expert would be off by far more than rounding.

    ggml's GELU looks F16 values up: one bit of difference before it may be 5e-4 after it.
    """
    tokens = random_tokens(40, 256, 2).tolist()
    logits = []
    for choice in ("auto", "upstream"):
        with make(family_model, kernels=choice, **FULL_PRECISION) as llm:
            logits.append(llm.skip_logits(tokens, None))
    assert np.abs(logits[0] - logits[1]).max() <= 5e-4 * np.abs(logits[1]).max()


def test_attention_is_nearer_to_full_precision_than_upstreams(family_model: Path) -> None:
    """Upstream's flash attention rounds queries and sums to F16, pyssd's does not."""
    tokens = random_tokens(300, 256, 6).tolist()

    def logits(**options: Any) -> np.ndarray:
        with make(family_model, **options) as llm:
            return llm.skip_logits(tokens, None)

    reference = logits(kernels="upstream", **FULL_PRECISION)
    upstream = logits(kernels="upstream", exact=True)
    ours = logits()
    error = [float(np.sqrt(np.mean((arm - reference) ** 2))) for arm in (ours, upstream)]
    assert error[0] < error[1]
    assert 0.0 < error[0] <= 0.01 * float(np.sqrt(np.mean(reference**2)))


def perplexity(llm: Llama, text: str) -> float:
    tokens = llm.tokenize(text.encode())[:400]
    logits = llm.skip_logits(tokens, None).astype(np.float64)[:-1]
    top = logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    chosen = logits[np.arange(len(logits)), tokens[1:]]
    return float(np.exp((log_sum - chosen).mean()))


def test_perplexity_is_that_of_upstream(smollm2: Path) -> None:
    """On 400 tokens the noise of quantised activations is below 1%; benchmarks/results/perplexity.json has long texts."""
    text = (Path(__file__).parent.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    with make(smollm2, n_threads=2) as llm:
        ours = perplexity(llm, text)
    with make(smollm2, n_threads=2, kernels="upstream", **FULL_PRECISION) as llm:
        reference = perplexity(llm, text)
    assert abs(ours / reference - 1.0) < 0.01
    assert 2.0 < reference < 200.0


def test_packed_head_can_be_trimmed(tiny_model: Callable[..., Path]) -> None:
    for tied in (False, True):
        path = tiny_model("llama", weight_type="Q8_0", tied=tied)
        tokens = random_tokens(12, 256, 4).tolist()
        with make(path) as llm:
            whole = llm.skip_logits(tokens, None)
            trimmed = llm.skip_logits(tokens, None, head_rows=256)
        assert np.array_equal(trimmed[:, :256], whole[:, :256])
        assert np.isneginf(trimmed[:, 256:]).all()


def test_other_types_keep_upstreams_kernels(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", weight_type="Q5_1")
    with make(path) as llm:
        # where passes compute their rows singly (tests/test_single_rows.py)
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        assert (llm.exactness.level == 2) == is_x86
        session = llm._session
        assert session is not None
        assert {buffer for _, kind, buffer, _ in session.weights() if kind == "q5_1"} != {
            kernels.BUFFER
        }
    with make(path, exact=True) as llm:
        assert llm.exactness.level == 2


def test_upstream_is_untouched_where_they_are_off(tiny_model: Callable[..., Path]) -> None:
    """An object with pyssd's kernels in the same process changes nothing for one without."""
    path = tiny_model("llama", weight_type="Q4_0")
    tokens = random_tokens(40, 256, 5)
    with Opened(path, exact=False) as opened:
        before = opened.session.skip_logits(tokens, None)
    with make(path) as llm:
        ours = llm.skip_logits(tokens.tolist(), None)
        with make(path, kernels="upstream") as plain:
            assert np.array_equal(plain.skip_logits(tokens.tolist(), None), before)
            session = plain._session
            assert session is not None
            assert kernels.BUFFER not in {buffer for _, _, buffer, _ in session.weights()}
    with Opened(path, exact=False) as opened:
        assert np.array_equal(opened.session.skip_logits(tokens, None), before)
    assert not np.array_equal(ours, before)


@pytest.fixture
def memory() -> Callable[[], int]:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell a process's memory")

    def resident() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return sum(1024 * int(value) for value in re.findall(r"Rss(?:Anon|File):\s+(\d+)", status))

    return resident


def test_weights_are_held_once(smollm2: Path, memory: Callable[[], int]) -> None:
    """Tied embeddings too: SmolLM2's head is its embedding matrix, 30 of 98 MB."""
    with make(smollm2, n_ctx=256, n_batch=64):
        pass  # libraries and allocator are warm
    before = memory()
    with make(smollm2, n_ctx=256, n_batch=64):
        grown = memory() - before
    assert grown < 1.25 * smollm2.stat().st_size
