"""Seconds of any round: of a verify pass by its width, of a draft step by what it leaves out.

A CostModel predicts from what was measured on this machine for this file (KnapSpec's names, arXiv 2602.20217: an FFN block
costs c1, an attention block c2 * n + c3 behind n cells), and follows what rounds really take: one fast factor for the
whole machine, which leaves ratios alone, times a slow correction for each width.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd.cost_table import MAX_WIDTH, WIDTHS, BlockClass, CostTable, class_key, guess_classes
from pyssd.skipset import Block

__all__ = ["MAX_WIDTH", "BlockClass", "CostModel", "CostTable"]

_FAST = 0.4  # weight of a new pass in the factor of the machine
_SLOW = 0.08  # in the correction of its width
_FIRST = 4.0  # what is known about a width at first counts as so many passes
_CUT = 0.3  # what one pass can tell about its width, as a logarithm
_CUT_GUESS = 1.5  # the same where there was only a guess
_HALF_LIFE = (
    256.0  # passes in which half of a width's correction is forgotten if it does not come up
)
_SHARED = 0.5  # of what the widths beside it are off by, for a width that did not come up yet
_CELLS = 64  # cells that share a table
_MAX_AGE = 64  # passes after which a table is made anew, since corrections fade
_LASTS = 32  # passes after which it is made anew in any case
_STALE = 0.02  # a table is made anew when its entries moved by more, as a logarithm


@dataclass(slots=True)
class _Width:
    """What was observed of one width, as logarithms.

    Attributes:
        own: Its correction when it came up last.
        n_seen: How often it came up.
        last: The pass in which it did so last.
        errors: Of its last passes, less what all widths had in common.
    """

    own: float = 0.0
    n_seen: int = 0
    last: int = 0
    errors: tuple[float, float] = (0.0, 0.0)


class CostModel:
    """Predicts seconds and learns from rounds.

    Args:
        table: What was measured; None = nothing: a guess in units of a plain pass, until the first pass is observed.
        blocks: The model's blocks, in order; empty where none can be skipped.

    Raises:
        ValueError: The table is of other blocks.
    """

    def __init__(self, table: CostTable | None = None, blocks: Sequence[Block] = ()) -> None:
        table = CostTable() if table is None else table
        self._table = table
        self._classes = table.classes or guess_classes(blocks, table.plain)
        by_key = {c.key: c for c in self._classes}
        try:
            of_block = [by_key[class_key(block)] for block in blocks]
        except KeyError as error:
            msg = f"it knows no blocks like {error}"
            raise ValueError(msg) from error
        self._block_seconds = np.array([c.seconds for c in of_block], np.float64)
        self._block_per_cell = np.array([c.per_cell for c in of_block], np.float64)
        self._base, self._per_cell = table.base(), table.per_cell()
        # as lists too: one number a round is wanted
        self._base_of: list[float] = self._base.tolist()
        self._per_cell_of: list[float] = self._per_cell.tolist()
        self._rest = table.rest_seconds()
        # what is learnt online; logarithms of factors
        self._is_scaled = bool(table.verify)
        self._machine = 0.0
        self._drafts = 0.0
        self._recent: deque[float] = deque((0.0, 0.0), maxlen=3)  # errors of the last passes
        self._common = 0.0  # their decayed mean: what is not a width's own
        self._widths: dict[int, _Width] = {}
        self._n_passes = 0
        self._moved = math.inf  # how far entries moved since the table below was made
        self._cells = -1
        self._made_at = 0
        self._cached: list[float] = []

    @property
    def measured(self) -> bool:
        """Whether seconds are of this machine; else they are in units of a plain pass."""
        return self._is_scaled

    @property
    def knows_cells(self) -> bool:
        """Whether two context lengths were measured."""
        return bool(self._table.verify_per_cell)

    def is_complete_for(self, n_ctx: int, *, least: int) -> bool:
        """Whether a context of this size would tell no more: only one of at least `least` cells has two lengths."""
        return self.knows_cells or n_ctx < least or self._table.n_ctx >= least

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the table was measured, and while the machine was quiet."""
        return bool(self._table.verify) and not self._table.noisy

    @property
    def scale(self) -> float:
        """Seconds in a unit of what follows: how much slower the machine is now than when it was measured."""
        return math.exp(self._machine)

    @property
    def switch_seconds(self) -> float:
        """What a pass takes longer whose width differs from that of the pass before."""
        return self._table.switch_seconds * self.scale

    @property
    def switch_units(self) -> float:
        """The same in units."""
        return self._table.switch_seconds

    def table(self, n_past: int) -> list[float]:
        """Seconds of a verify pass by its width, [MAX_WIDTH + 1], the first entry unused."""
        scale = self.scale
        return [units * scale for units in self.units(n_past)]

    def units(self, n_past: int) -> Sequence[float]:
        """The table in units, which a slow machine does not change: for decisions, made once a round; not to be kept."""
        cells = n_past - n_past % _CELLS
        is_old = self._n_passes - self._made_at > _MAX_AGE
        if cells != self._cells or self._moved > _STALE or is_old:
            self._cells, self._moved, self._made_at = cells, 0.0, self._n_passes
            self._cached = self._make(cells)
        return self._cached

    def draft_seconds(self, skip: npt.ArrayLike | None, n_past: int, head_rows: int = 0) -> float:
        """Seconds of one draft step.

        Args:
            skip: uint8 [n_blocks], 1 = skipped; None = nothing.
            n_past: Cells in front.
            head_rows: Rows of the LM head that are computed, 0 = all.
        """
        if not len(self._block_seconds):  # nothing can be left out: a step is a plain pass
            plain = float(self._base[1] + n_past * self._per_cell[1])
            return plain * math.exp(self._machine + self._drafts)
        seconds = self._block_seconds + n_past * self._block_per_cell
        everything = float(seconds.sum())
        skipped = 0.0 if skip is None else float(seconds @ np.asarray(skip, np.float64))
        total = self._table.draft_seconds(everything - skipped, everything, head_rows)
        return total * math.exp(self._machine + self._drafts)

    def observe_verify(self, width: int, n_past: int, seconds: float, *, switched: bool) -> None:
        """Learn from a verify pass.

        Args:
            width: Its rows.
            n_past: Cells in front of it.
            seconds: Wall time.
            switched: The pass before had another width.
        """
        if seconds <= 0.0 or not 1 <= width <= MAX_WIDTH:
            return
        self._n_passes += 1
        error = math.log(seconds / self._seconds(width, n_past, switched=switched))
        if not self._is_scaled:
            self._is_scaled = True
            self._machine, error = error, 0.0
        own = self._correction(width)
        seen = self._widths.setdefault(width, _Width())
        seen.last = self._n_passes
        seen.n_seen += 1
        if seen.n_seen == 1 and width > max(self._table.verify, default=0):
            # only guessed so far: its error says nothing about the machine
            seen.own = own + max(-_CUT_GUESS, min(_CUT_GUESS, error))
            self._moved = math.inf
            return
        # the median of three: one slow pass is an accident, two are a slow machine
        self._recent.append(error)
        middle = sorted(self._recent)[1]
        shift = _FAST * middle
        self._machine += shift
        self._recent = deque([past - shift for past in self._recent], maxlen=3)
        self._common += _FAST * (middle - self._common)
        error -= self._common
        typical = sorted((*seen.errors, error))[1]
        seen.errors = (seen.errors[1], error)
        step = max(_SLOW, 1.0 / (seen.n_seen + _FIRST)) * max(-_CUT, min(_CUT, typical))
        seen.own = own + step
        self._moved += abs(step) + _STALE / _LASTS  # what is not seen is forgotten slowly

    def observe_draft(self, predicted: float, seconds: float) -> None:
        """Learn from a draft call: its prediction (the sum of draft_seconds of its steps) and its wall time."""
        if seconds > 0.0 and predicted > 0.0:
            self._drafts += _SLOW * max(-_CUT, min(_CUT, math.log(seconds / predicted)))

    def rows(self) -> dict[str, Any]:
        """The table as measured, for `pyssd info`: seconds, and KnapSpec's row (c1, c2, c3) over all blocks."""
        table = self._table
        of_kind = {kind: [c for c in self._classes if c.kind == kind] for kind in ("attn", "ffn")}
        return {
            "measured": bool(table.verify),
            "unit": "seconds" if self._is_scaled else "plain passes",
            "c1": _mean(of_kind["ffn"], "seconds"),
            "c2": _mean(of_kind["attn"], "per_cell"),
            "c3": _mean(of_kind["attn"], "seconds"),
            "classes": [asdict(c) for c in self._classes],
            "head": {str(rows): s for rows, s in sorted(table.head.items())},
            "overhead": self._rest,
            "switch": table.switch_seconds,
            "verify": {str(width): s for width, s in sorted(table.verify.items())},
            "verify_per_cell": {
                str(width): s for width, s in sorted(table.verify_per_cell.items())
            },
        }

    def as_dict(self) -> dict[str, Any]:
        """What was measured, for JSON; what was observed since is of the moment and left out."""
        return self._table.as_dict()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], blocks: Sequence[Block]) -> CostModel:
        """Read what as_dict gave.

        Raises:
            ValueError: It is no such table, or one of other blocks.
        """
        return cls(CostTable.from_dict(values), blocks)

    def _seconds(self, width: int, n_past: int, *, switched: bool) -> float:
        seconds = self._base_of[width] + n_past * self._per_cell_of[width]
        seconds *= math.exp(self._machine + self._correction(width))
        return seconds + (self.switch_units * self.scale if switched else 0.0)

    def _effective(self, seen: _Width) -> float:
        return seen.own * math.pow(0.5, (self._n_passes - seen.last) / _HALF_LIFE)

    def _knots(self) -> tuple[list[int], list[float]]:
        if not self._widths:
            return [], []
        seen = sorted(self._widths)
        values = [self._effective(self._widths[width]) for width in seen]
        # a width that was measured but did not come up yet shares in what its neighbours are off by: where memory or the
        # processor is slower than it was then, that shows in all wide passes
        new = [width for width in self._table.verify if width not in self._widths]
        values += [_SHARED * value for value in np.interp(new, seen, values).tolist()]
        knots = sorted(zip(seen + new, values, strict=True))
        return [width for width, _ in knots], [value for _, value in knots]

    def _correction(self, width: int) -> float:
        if width in self._widths:
            return self._effective(self._widths[width])
        widths, values = self._knots()
        return float(np.interp(width, widths, values)) if widths else 0.0

    def _make(self, cells: int) -> list[float]:
        widths, values = self._knots()
        factors = np.interp(WIDTHS, widths, values) if widths else np.zeros(len(WIDTHS))
        seconds = (self._base + cells * self._per_cell) * np.exp(factors)
        seconds[0] = 0.0
        made: list[float] = seconds.tolist()
        return made


def _mean(classes: Sequence[BlockClass], name: str) -> float:
    count = sum(c.count for c in classes)
    return sum(c.count * float(getattr(c, name)) for c in classes) / count if count else 0.0
