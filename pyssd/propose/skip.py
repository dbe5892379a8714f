"""The model itself drafts, without the blocks of a skip set; the steps are in cpp/core/draft.cpp.

How far a draft goes is decided token by token inside the C++ loop, from a table handed in per round: see DraftRule. The
papers use a fixed threshold on the confidence (Draft & Verify 2309.08168, SWIFT 2410.06916) and a fixed length; here both
follow from measured costs and from how often tokens of that confidence were accepted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# bins of the draft's confidence; most drafts are confident, so they are narrow near 1
EDGES = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.98, 0.99, 0.997)
_CENTRES = (0.1, 0.28, 0.42, 0.55, 0.65, 0.75, 0.84, 0.9, 0.94, 0.97, 0.985, 0.993, 0.998)
_SLOW, _FAST = 0.992, 0.9  # more than a hundred trials count, or ten
_CHANGED = 2.8  # standard errors between them
_PRIOR_TRIALS = 3.0
_PRIOR_CHANCE = 0.75  # of a drafted token to be right
_PRIOR_TRUST = 0.9  # of a confidence, before anything is known: drafts think too well of themselves
_EDGES_F32 = np.array(EDGES, dtype=np.float32)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftRule:
    """When a skip draft goes on. Reach = chance that all tokens so far are accepted.

    Attributes:
        edges: float32 [n_bins - 1], ascending bounds of the bins of confidence.
        chances: float32 [n_bins], of a token of that confidence to be accepted.
        draft_reach: float32 [max_len], reach below which token i is not drafted any more.
        keep_reach: float32 [max_len], reach, token i included, below which it is not worth verifying.
    """

    edges: Floats
    chances: Floats
    draft_reach: Floats
    keep_reach: Floats


class _Rate:
    """Decayed share of hits, that starts from a prior worth a few trials."""

    __slots__ = ("_decay", "_prior", "hits", "trials")

    def __init__(self, prior: float, decay: float) -> None:
        self._prior, self._decay = prior, decay
        self.hits = self.trials = 0.0

    def add(self, is_hit: bool) -> None:
        self.hits = self.hits * self._decay + is_hit
        self.trials = self.trials * self._decay + 1.0

    def shrink(self, trials: float) -> None:
        """Believe what is known no more than so many trials."""
        if self.trials > trials:
            self.hits *= trials / self.trials
            self.trials = trials

    @property
    def mean(self) -> float:
        return (self.hits + _PRIOR_TRIALS * self._prior) / (self.trials + _PRIOR_TRIALS)

    @property
    def error(self) -> float:
        mean = self.mean
        return math.sqrt(mean * (1.0 - mean) / (self.trials + _PRIOR_TRIALS))


class Calibration:
    """How often drafted tokens are accepted, in all and by confidence.

    Over many rounds; where the latest few differ from those beyond doubt (the text has changed), what was before counts no
    longer.
    """

    def __init__(self) -> None:
        self._bins = [_Rate(_PRIOR_TRUST * centre, _SLOW) for centre in _CENTRES]
        self._all = _Rate(_PRIOR_CHANCE, _SLOW)
        self._late = _Rate(_PRIOR_CHANCE, _FAST)

    def learn(self, confidences: Sequence[float], n_accepted: int) -> None:
        """Learn from a round: the first n_accepted tokens were right, the next one was wrong, the rest is unknown."""
        for place, confidence in enumerate(confidences[: n_accepted + 1]):
            is_hit = place < n_accepted
            self._bins[bisect_right(EDGES, confidence)].add(is_hit)
            self._all.add(is_hit)
            self._late.add(is_hit)
        every, late = self._all, self._late
        if abs(late.mean - every.mean) > _CHANGED * math.hypot(late.error, every.error):
            every.hits, every.trials = late.hits, late.trials
            for rate in self._bins:
                rate.shrink(_PRIOR_TRIALS)

    def chances(self) -> list[float]:
        """Chance by bin of confidence."""
        return [rate.mean for rate in self._bins]

    def mean(self) -> float:
        """Chance of a token whose confidence is not known yet."""
        return self._all.mean


def make_rule(
    calibration: Calibration,
    table: Sequence[float],
    step: float,
    price: float,
    max_len: int,
    n_before: int = 0,
) -> DraftRule:
    """Turn costs into the table of the draft loop.

    Args:
        calibration: Chances by confidence.
        table: Seconds of a verify pass by width.
        step: Seconds of a draft step.
        price: Seconds that an emitted token is worth.
        max_len: Longest draft.
        n_before: Tokens that stand before the draft in the same verify pass.
    """
    widening = [
        max(0.0, table[n_before + length + 2] - table[n_before + length + 1])
        for length in range(max_len)
    ]
    keep = np.array([cost / price for cost in widening], dtype=np.float32)
    mean = max(calibration.mean(), 0.01)
    go_on = np.array([(step + cost) / (mean * price) for cost in widening], dtype=np.float32)
    go_on[0] = 0.0  # the arm was chosen for its first token
    return DraftRule(_EDGES_F32, np.array(calibration.chances(), dtype=np.float32), go_on, keep)


class SkipArm:
    """One skip set as a means of drafting: its plan, and what is known of its rounds.

    Args:
        bits: uint8 [n_blocks], 1 = skipped.
        text: The set as text.
        head_rows: Rows of the LM head in drafting, 0 = all.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], text: str, head_rows: int = 0) -> None:
        self.bits = bits
        self.text = text
        self.head_rows = head_rows
        self.calibration = Calibration()
        self._empty = _Rate(0.0, _SLOW)  # rounds whose first token was not worth verifying
        self._dropped = _Rate(0.0, _SLOW)  # rounds whose last token was not

    def expected(
        self, table: Sequence[float], step: float, price: float, max_len: int
    ) -> tuple[float, float]:
        """Expected tokens and seconds of a round."""
        tokens, seconds = best_chain(self.calibration.mean(), table, step, price, max_len)
        empty = self._empty.mean
        tokens = 1.0 + (1.0 - empty) * (tokens - 1.0)
        seconds = empty * table[1] + (1.0 - empty) * seconds + self._dropped.mean * step
        return tokens, seconds

    def learn(self, confidences: Sequence[float], n_accepted: int, n_steps: int) -> None:
        """Learn from a round that it drafted; n_accepted below 0 = its tokens were not reached."""
        self._empty.add(not confidences)
        self._dropped.add(n_steps > len(confidences))
        if n_accepted >= 0:
            self.calibration.learn(confidences, n_accepted)


def best_chain(
    chance: float,
    table: Sequence[float],
    step: float,
    price: float,
    max_len: int,
    n_before: int = 0,
) -> tuple[float, float]:
    """Tokens and seconds of the chain of equal chances with the largest gain, one drafted token at least.

    The tokens include the one that the target adds; the seconds include the verify pass.
    """
    best = (0.0, 0.0)
    best_gain = -math.inf
    reach, tokens = 1.0, 1.0
    for length in range(1, max_len + 1):
        reach *= chance
        tokens += reach
        seconds = length * step + table[n_before + length + 1]
        gain = tokens * price - seconds
        if gain <= best_gain:
            break
        best, best_gain = (tokens, seconds), gain
    return best
