"""Upstream's kernels: a verify pass computes its rows as plain decoding does, bit by bit, and prompts stay llama.cpp's.

Two threads, because attention splits the cells of a single row over them; contexts on both sides of the 256 and 512 cells
where that begins and the padding of cells steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completions import complete

from pyssd import Llama
from pyssd._core import Session
from pyssd.guard import width_noise

WIDTHS = (2, 3, 4, 5, 8, 13, 16, 33)
CONTEXTS = (40, 250, 300, 500)
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def opened(path: Path, **options: Any) -> Llama:
    settings = {"n_ctx": 768, "n_threads": 2, "verbose": False, "speculative": "off", **options}
    return Llama(str(path), kernels="upstream", **settings)


def largest(
    session: Session, n_vocab: int, context: int, widths: tuple[int, ...] = WIDTHS
) -> float:
    """Largest difference of a logit between verify passes of the widths and of one row."""
    tokens = np.random.default_rng(context).integers(20, min(n_vocab, 400), context + 33)
    noise = width_noise(session, tokens.astype(np.int32), context, widths)
    return max(found.largest for found in noise.values())


def check(path: Path, contexts: tuple[int, ...] = CONTEXTS) -> None:
    with opened(path) as llm:
        assert llm.exactness.level == 2, llm.exactness
        session = llm._session
        assert session is not None
        for context in contexts:
            assert largest(session, llm.n_vocab(), context) == 0.0, context


@pytest.mark.parametrize("weight_type", TYPES)
def test_rows_of_every_weight_type(tiny_model: Callable[..., Path], weight_type: str) -> None:
    check(tiny_model("llama", weight_type=weight_type))


def test_rows_of_every_family(family_model: Path) -> None:
    check(family_model)


def test_rows_of_a_real_model(smollm2: Path) -> None:
    check(smollm2, (40, 250))


@pytest.mark.model
@pytest.mark.parametrize("model", ["qwen_05b", "gemma3_270m"])
def test_rows_of_k_quants(model: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(model), (250,))


@pytest.mark.parametrize("context", [40, 300])
def test_without_the_marks_rows_differ(tiny_model: Callable[..., Path], context: int) -> None:
    """Else the tests above would show nothing."""
    with opened(tiny_model("llama", weight_type="F32")) as llm:
        assert llm._session is not None
        llm._session.close()
        session = Session(llm._ctx.ctx)
        try:
            assert largest(session, llm.n_vocab(), context) > 0.0
        finally:
            session.close()


def test_a_wrapped_sliding_window(tiny_model: Callable[..., Path]) -> None:
    with opened(tiny_model("gemma3"), n_ctx=2048, n_ubatch=64, n_batch=64) as llm:
        session = llm._session
        assert session is not None
        for context in (700, 1100, 1500):
            assert largest(session, llm.n_vocab(), context, (4, 16)) == 0.0, context


def test_drafted_text_is_plain_text(smollm2: Path) -> None:
    with opened(smollm2) as llm:
        prompt = llm.tokenize(
            b"Once upon a time, in a village by the sea, there lived a man. " * 16
        )[:240]
        for settings in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7}):
            llm.reset()
            plain = complete(llm, prompt, 60, **settings)
            llm.reset()
            speculative = {"max_draft_len": 7, "min_confidence": 0.0, "always": True}
            drafted = complete(
                llm, prompt, 60, skip_set="f:2,5,9", speculative=speculative, **settings
            )
            assert drafted == plain
            assert llm.stats.drafted > 0
