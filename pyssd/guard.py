"""How far logits depend on the width of a pass, and the near-tie guard's margin that follows.

What decides between two tokens is the difference of their logits. Its error is measured between the two best tokens of
plain decoding: rows decoded singly against rows of passes of some width behind cells that such passes have written, as
verification leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pyssd._core import Session

DEFAULT_MARGIN = 0.4
"""Logits: three standard deviations of the largest error of a gap seen with upstream's CPU kernels (SmolLM2-135M, 0.13)."""
SPREADS = 3.0
"""Standard deviations that the margin covers; normal errors beyond it flip one pick in about 100 000 tokens."""

WIDTHS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class WidthNoise:
    """Differences between rows of a wide pass and the same rows decoded singly.

    Attributes:
        largest: Largest |difference| of a logit.
        gap_spread: Standard deviation of the error of the gap between the two best tokens, logits.
        rows: Rows that were compared.
    """

    largest: float
    gap_spread: float
    rows: int

    @property
    def margin(self) -> float:
        """Margin of the guard, logits; 0 where rows do not depend on the width."""
        return SPREADS * self.gap_spread


def width_noise(
    session: Session, tokens: npt.NDArray[np.int32], context: int, widths: Sequence[int] = WIDTHS
) -> dict[int, WidthNoise]:
    """Compare rows behind a context.

    Args:
        session: One that can verify; its cells are dropped, and it ends at position 0.
        tokens: int32 [context + n]; the n rows of the last ones are compared.
        context: Cells in front of the first row.
        widths: Of the passes compared with single ones.

    Returns:
        Noise by width.
    """
    session.rewind(0)
    single = _rows(session, tokens, context, 1)
    best = np.argpartition(single, -2, axis=1)[:, -2:]
    gap = _gaps(single, best)
    noise = {}
    for width in widths:
        wide = _rows(session, tokens, context, width)
        errors = _gaps(wide, best) - gap
        noise[width] = WidthNoise(
            largest=float(np.abs(wide - single).max()),
            gap_spread=float(np.sqrt(np.mean(errors**2))),
            rows=len(single),
        )
    session.rewind(0)
    return noise


def _gaps(rows: npt.NDArray[np.float32], best: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    picked = np.take_along_axis(rows, best, axis=1).astype(np.float64)
    return np.asarray(picked[:, 1] - picked[:, 0])


def _rows(
    session: Session, tokens: npt.NDArray[np.int32], context: int, width: int
) -> npt.NDArray[np.float32]:
    """Verify the tokens after the context, width at a time; float32 [n, n_vocab]."""
    if session.n_past >= context and session.rewindable(context):
        session.rewind(context)
    else:  # the first rows, or a sliding window that has forgotten what the context needs
        session.rewind(0)
        session.prefill(tokens[:context])
    rows = []
    for start in range(context, len(tokens), width):
        part = tokens[start : start + width]
        session.verify_begin(int(part[0]), part[1:])
        rows += [session.logits(row).copy() for row in range(len(part))]
        session.verify_end(len(part))
    return np.stack(rows)
