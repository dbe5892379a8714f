"""Seconds of a verify pass by its width, measured as it goes."""

from __future__ import annotations

MAX_WIDTH = 64  # rows of logits of a target pass

_STEP = (
    0.1  # of a plain pass, for each further row: the guess for a width that nothing is known about
)
_WEIGHT = 0.25  # of a new measurement
_OUTLIER = 2.0  # a pass is not believed to take more than this many times what was expected of it
_LASTS = 256  # passes after which a width that did not come up again is forgotten


class WidthSeconds:
    """Measured seconds of a pass over 1, 2, ... tokens; what lies between known widths is interpolated.

    A width that was slow once because of something else would never be used again, and so never be corrected. Therefore
    outliers are cut, and what has not been measured for long is guessed again.
    """

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[float, int]
        ] = {}  # width -> seconds, pass in which it was measured last
        self._n_passes = 0
        self._table: list[float] | None = None

    def add(self, width: int, seconds: float) -> None:
        """Learn from a pass."""
        self._n_passes += 1
        if width in self._known:
            before = self._known[width][0]
            seconds = before + _WEIGHT * (min(seconds, _OUTLIER * before) - before)
        elif self._known:
            seconds = min(seconds, _OUTLIER * self.table()[width])
        self._known[width] = (seconds, self._n_passes)
        self._table = None

    @property
    def measured(self) -> bool:
        """Whether any pass was measured, so that the table is in seconds."""
        return bool(self._known)

    def table(self) -> list[float]:
        """Seconds by width, [MAX_WIDTH + 1], the first entry unused; in units of a plain pass if nothing is known."""
        if self._table is None:
            self._table = self._interpolate()
        return self._table

    def _interpolate(self) -> list[float]:
        # what is interpolated is the ratio to the guess: a single known width fixes the scale of all others
        latest = self._n_passes - _LASTS
        ratios = {
            width: seconds / _guess(width)
            for width, (seconds, when) in self._known.items()
            if when > latest
        }
        widths = sorted(ratios)
        table = [0.0]
        place = 0  # the first known width that is not below
        for width in range(1, MAX_WIDTH + 1):
            while place < len(widths) and widths[place] < width:
                place += 1
            if not widths:
                ratio = 1.0
            elif place == 0:
                ratio = ratios[widths[0]]
            elif place == len(widths):
                ratio = ratios[widths[-1]]
            else:
                low, high = widths[place - 1], widths[place]
                share = (width - low) / (high - low)
                ratio = ratios[low] + share * (ratios[high] - ratios[low])
            table.append(ratio * _guess(width))
        return table


def _guess(width: int) -> float:
    return 1.0 + _STEP * (width - 1)
