"""What a skip set could be worth at the measured costs, before one is looked for, and how much of the LM head to keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyssd.choice import Costs
from pyssd.propose.skip import SkipArm, best_chain

# draft cost as a share of a plain step -> agreement with the target, for the best sets that a search finds: measured on a
# 1.5B model, plus what leaving out unconfident drafts adds. Larger models lie a little above, smaller ones below.
_FRONTIER = ((0.89, 0.98), (0.81, 0.94), (0.76, 0.91), (0.70, 0.86))
_MAX_LEN = 8
_HEAD_STEP = 256  # rows: a multiple of every interleave of packed weights, so that a trimmed head is a plain view
_HEAD_GAIN = 1.01  # a change of the head's rows builds a graph, so it has to pay


def possible_speedup(table: Sequence[float]) -> float:
    """The most that skip drafts alone may gain over plain decoding.

    Args:
        table: Time of a verify pass by width, in any unit.
    """
    plain = table[1]
    rates = []
    for cost, agreement in _FRONTIER:
        tokens, seconds = best_chain(agreement, table, cost * plain, plain, _MAX_LEN)
        rates.append(tokens * plain / seconds)
    return max(rates)


def head_sizes(n_vocab: int) -> tuple[int, ...]:
    """Rows of the LM head to choose from: a half, a quarter and an eighth, ids being sorted by frequency roughly."""
    sizes = (n_vocab // part // _HEAD_STEP * _HEAD_STEP for part in (2, 4, 8))
    return tuple(size for size in sizes if size > 0)


class HeadTrim:
    """Chooses R, the rows of the LM head in drafting, by agreement lost against seconds saved.

    Agreement is lost where the target's token has an id of R or more, which the draft can then never guess; the share of
    those among emitted tokens is counted, no draft is needed for that.

    Args:
        n_vocab: Rows of the whole head.
    """

    def __init__(self, n_vocab: int) -> None:
        self._sizes = head_sizes(n_vocab)
        self._beyond = np.zeros(len(self._sizes))  # decayed counts of ids at or beyond each size
        self._n = 0.0

    def learn(self, tokens: npt.NDArray[np.int32]) -> None:
        """Count int32 [n] emitted tokens; a few thousand count."""
        decay = 0.999 ** len(tokens)
        self._beyond = self._beyond * decay + [(tokens >= size).sum() for size in self._sizes]
        self._n = self._n * decay + len(tokens)

    def lost(self) -> dict[int, float]:
        """Share of tokens that a head of so many rows cannot guess; half a token is what n tokens cannot tell."""
        return {
            size: float((beyond + 0.5) / (self._n + 1.0))
            for size, beyond in zip(self._sizes, self._beyond, strict=True)
        }

    def choose(self, costs: Costs, skip: SkipArm, n_past: int) -> int:
        """Rows for the next drafts of a skip set; 0 = all."""
        table, scale = costs.units(n_past), costs.scale
        agreement = skip.calibration.mean()

        def rate(rows: int, lost: float) -> float:
            step = costs.draft_seconds(skip.bits, n_past, rows) / scale
            return (1.0 + agreement * (1.0 - lost)) / (step + table[2])

        rates = {0: rate(0, 0.0), **{rows: rate(rows, lost) for rows, lost in self.lost().items()}}
        best = max(rates, key=lambda rows: rates[rows])
        now = rates.get(skip.head_rows, rates[0])  # a size that was given before is none of ours
        return (
            best
            if rates[best] > _HEAD_GAIN * now or skip.head_rows not in rates
            else skip.head_rows
        )
