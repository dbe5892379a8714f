"""The near-tie guard as an option: who asks for it gets plain decoding's picks where rows depend on the width."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from completions import complete, make

SETTINGS: dict[str, Any] = {"max_draft_len": 5, "min_confidence": 0.0, "always": True}
SAMPLED = {"temperature": 0.9, "seed": 11}
MEANS = [
    {"skip_set": "f:1,2", "speculative": {"guard_margin": 1e9, **SETTINGS}},
    {"speculative": {"guard_margin": 1e9, "proposers": ("ngram", "recycle"), "always": True}},
]


@pytest.mark.parametrize("options", MEANS, ids=["skip", "free"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_every_pick_within_the_margin_is_settled(
    tiny_model: Callable[..., Path], options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """No flash attention: no level above 1, and products of several columns in attention too."""
    model = tiny_model("llama", weight_type="F32")
    with make(model, exact=False, kernels="upstream", flash_attn=False) as llm:
        assert llm.exactness.level == 1
        plain = complete(llm, n=40, **sampling)
        llm.reset()
        guarded = complete(llm, n=40, **sampling, **options)
        assert guarded == plain
        assert llm.stats.drafted > 0
        # each draft is cut at its first row, for with this margin every pick is near
        assert llm.stats.settled >= llm.stats.rounds > 0
        assert llm.totals.settled == llm.stats.settled


def test_without_a_margin_nothing_is_settled(tiny_llama: Path) -> None:
    with make(tiny_llama, exact=False, kernels="upstream", flash_attn=False) as llm:
        complete(llm, skip_set="f:1,2", speculative=SETTINGS)
        assert llm.stats.drafted > 0
        assert llm.stats.settled == 0


def test_where_rows_do_not_depend_on_the_width_there_is_nothing_to_settle(
    tiny_llama: Path,
) -> None:
    """The guard would cost its passes and change nothing."""
    with make(tiny_llama, exact=True, speculative=MEANS[0]["speculative"]) as llm:
        assert llm.exactness.level == 2
        assert "guard" not in llm.exactness.reason
        complete(llm, skip_set="f:1,2")
        assert llm.stats.drafted > 0
        assert llm.stats.settled == 0


def test_exactness_tells_of_the_guard(tiny_llama: Path) -> None:
    speculative = {"guard_margin": 0.25}
    with make(tiny_llama, exact=False, flash_attn=False, speculative=speculative) as llm:
        assert llm.exactness.level == 1
        assert "0.25 logits" in llm.exactness.reason
