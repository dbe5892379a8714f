"""What a round may try, what that costs, and how long a free draft should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyssd.propose import FreeDraft
from pyssd.propose.skip import DraftRule

MIN_REACH = 0.02  # a token that is seldom reached is worth no thought


class Costs(Protocol):
    """The part of a CostModel that decisions use; see pyssd.cost."""

    @property
    def measured(self) -> bool:
        """Whether seconds are of this machine, not a guess."""

    @property
    def switch_seconds(self) -> float:
        """What a pass takes longer whose width differs from the one before."""

    def table(self, n_past: int) -> Sequence[float]:
        """Seconds of a verify pass by width, [MAX_WIDTH + 1]."""

    @property
    def scale(self) -> float:
        """Seconds in a unit of what follows, in which decisions are made."""

    @property
    def switch_units(self) -> float:
        """What a pass takes longer whose width differs from the one before, in units."""

    def units(self, n_past: int) -> Sequence[float]:
        """Time of a verify pass by width, [MAX_WIDTH + 1], in units."""

    def draft_seconds(
        self, skip: npt.NDArray[np.uint8] | None, n_past: int, head_rows: int = 0
    ) -> float:
        """Seconds of a draft step."""

    def observe_verify(self, width: int, n_past: int, seconds: float, *, switched: bool) -> None:
        """Learn from a verify pass."""

    def observe_draft(self, predicted: float, seconds: float) -> None:
        """Learn from a draft."""


@dataclass(slots=True)
class Choice:
    """What a round tries.

    Attributes:
        arm: "plain", "ngram", "recycle", "skip" or "ngram+skip".
        free: The free draft it starts with, or None.
        length: Tokens of the free draft that are verified.
        width: Tokens of the target pass if no skip draft follows; padding included.
        seconds: Predicted time of the round; for a skip draft of its verify pass only, until its length is known.
        rule: How far the skip draft goes, or None.
        step: Predicted seconds of a step of the skip draft.
        is_probe: Whether it is run to find out.
        floor: Gain of the best arm beside a skip draft, in units.
        price: What a token was worth, in units.
    """

    arm: str
    free: FreeDraft | None = None
    length: int = 0
    width: int = 1
    seconds: float = 0.0
    rule: DraftRule | None = None
    step: float = 0.0
    is_probe: bool = False
    floor: float = 0.0
    price: float = 0.0


def best_length(
    drafts: Sequence[FreeDraft],
    max_len: int,
    table: Sequence[float],
    switch: float,
    last: int,
    used: Sequence[float],
    price: float | None,
) -> tuple[float, float, int, int, FreeDraft] | None:
    """The free draft and its length with the largest gain at a price, or with the most tokens a unit (price None).

    Returns:
        Expected tokens, units, width of the pass, length, draft; None if there is none.
    """
    best, best_score = None, -math.inf
    for draft in drafts:
        reach, tokens = 1.0, 1.0
        for length, chance in enumerate(draft.chances, 1):
            reach *= chance
            if length > max_len or (reach < MIN_REACH and length > 1):
                break
            tokens += reach
            width = length + 1
            units = table[width]
            if width != last:
                units += switch * (2.0 - used[width])
                if width < last <= max_len + 1 and table[last] < units:
                    # padding is cheaper than another graph
                    width, units = last, table[last] + switch * (1.0 - used[last])
            else:
                units += switch * (1.0 - used[width])
            score = tokens / units if price is None else tokens * price - units
            if score > best_score:
                best, best_score = (tokens, units, width, length, draft), score
    return best
