"""Measure what passes and blocks cost on this machine, within an allowance of seconds.

The loops run in the core (Session.time_verify, time_draft); here is decided what is measured, in what order and how often.
Each measurement is repeated in cycles over all plans or widths, so that a machine that slows down for a while slows
all of them, and the median counts.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyssd.cost import CostModel
from pyssd.cost_fit import Times, fit_table, group_classes
from pyssd.cost_table import class_key
from pyssd.errors import Cancelled, PyssdError
from pyssd.skipset import Block

_WIDTHS = (8, 4, 2, 16, 1)  # after a plain pass; most wanted first
_MORE_WIDTHS = (9, 32)  # kernels take rows by the eight or sixteen: V has steps there
_HEAD_SHARES = (8, 2, 4)  # parts of the vocabulary: an eighth tells the most
_HEAD_STEP = 256  # rows of a trimmed head are a multiple of it
_MAX_GROUPS = 8  # of classes of blocks
_CELLS, MIN_CELLS = 2048, 256  # second context length, and the shortest one that tells anything
_MAX_CYCLES = 3
_CYCLE_SECONDS = 0.25  # cycles are repeated while they are shorter than this together
_SWITCHES = 3  # changes from one token to two that are timed
_RESERVE = 0.03  # of the allowance: contexts made and freed
_WORST_ROW = 0.7  # plain passes that a row more may cost before anything is known
_LOG = logging.getLogger("pyssd")

Tokens = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint8]
Seconds = npt.NDArray[np.float64]


class Timed(Protocol):
    """The part of a Session that measures."""

    @property
    def refusal(self) -> str | None:
        """Why speculation is impossible."""

    def max_draft(self, n_ctx: int) -> int:
        """Longest draft."""

    def time_verify(
        self, widths: Tokens, n_cells: int = 0, max_seconds: float = math.inf
    ) -> Seconds:
        """Seconds of target passes."""

    def time_draft(
        self, skip: Bits | None, head_rows: int, n_steps: int, max_seconds: float = math.inf
    ) -> Seconds:
        """Seconds of draft steps."""


def measure_costs(
    session: Timed,
    blocks: Sequence[Block],
    n_vocab: int,
    *,
    n_ctx: int,
    seconds: float = 1.5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Measure a cost model; what there is no time for, or what cannot be measured here, is guessed and marked so.

    Nothing of the user's is changed, except that the logits of the last pass are gone.

    Args:
        session: The session; its context should be idle.
        blocks: Its blocks.
        n_vocab: Rows of the LM head.
        n_ctx: Cells of the context.
        seconds: Allowance of wall time. It is kept as far as a pass can be foreseen: the first one is made in any case.
        clock: The clock of the allowance.

    Raises:
        Cancelled: cancel() was called.
    """
    if session.refusal is not None or session.max_draft(n_ctx) < 1:
        return CostModel(None, blocks)
    run = _Run(session, blocks, n_vocab, n_ctx, clock() + seconds * (1.0 - _RESERVE), clock)
    for step in (run.verify, run.classes, run.cells, run.head, run.more_widths):
        try:
            step()
        except Cancelled:
            raise
        except PyssdError as error:
            _LOG.info("a part of the costs stays a guess: %s", error)
        if not run.knows_plain:
            return CostModel(None, blocks)
    return CostModel(fit_table(run.times, blocks, n_vocab, n_ctx), blocks)


class _Run:
    """One measurement, as it gathers."""

    def __init__(
        self,
        session: Timed,
        blocks: Sequence[Block],
        n_vocab: int,
        n_ctx: int,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self._session, self._blocks = session, blocks
        self._n_vocab, self._n_ctx = n_vocab, n_ctx
        self._deadline, self._clock = deadline, clock
        self.times = Times()

    @property
    def knows_plain(self) -> bool:
        """Whether a plain pass was measured; everything else is estimated from it."""
        return 1 in self.times.verify

    def left(self) -> float:
        """Seconds of the allowance that are left."""
        return self._deadline - self._clock()

    # ---- V(m), and what a change of width costs

    def verify(self) -> None:
        # the first pass touches memory for the first time and builds a graph: it only tells what can be afforded
        seconds = self._session.time_verify(np.ones(1, np.int32)).tolist()
        self.times.verify[1] = seconds[0]
        if self.left() <= seconds[0]:
            return
        self.times.plain += self._session.time_verify(np.ones(1, np.int32)).tolist()
        self.times.verify[1] = self.times.plain[0]
        self._cycles(_WIDTHS)
        self._switches()

    def _switches(self) -> None:
        """Time changes of width between passes whose graphs exist; what cycles noted was the building of them."""
        if 2 not in self.times.verify:
            return
        passes = np.array((1, 1, 2, 2) * _SWITCHES, np.int32)
        if self.left() < 4.0 * _SWITCHES * self.times.verify[2]:
            return
        times = self._session.time_verify(passes, 0, self.left()).tolist()
        self.times.plain += times[1::4]
        pairs = zip(times[::2], times[1::2], strict=False)
        switches = [changed - again for changed, again in pairs]
        if len(switches) > 2:
            self.times.switches = switches[1:]  # the first may build one more

    def more_widths(self) -> None:
        self._cycles(_MORE_WIDTHS)
        if self.left() > 2.0 * self.times.verify[1]:
            self.times.plain += self._session.time_verify(np.ones(2, np.int32), 0, self.left())[
                1:
            ].tolist()

    def _cycles(self, wanted: Sequence[int]) -> None:
        limit = self._session.max_draft(self._n_ctx) + 1
        samples: dict[int, list[float]] = {}
        started = self._clock()
        for cycle in range(_MAX_CYCLES):
            for width in wanted:
                expected = self._expect(width)
                n_passes = 2 if self.left() > 2.0 * expected else 1
                if width > limit or self.left() < n_passes * expected:
                    continue
                if cycle > 0 and n_passes == 1:
                    continue
                passes = np.full(n_passes, width, np.int32)
                times = self._session.time_verify(passes, 0, self.left()).tolist()
                samples.setdefault(width, []).append(times[-1])
                if len(times) == 2:
                    self.times.switches.append(times[0] - times[1])
                self.times.verify[width] = statistics.median(samples[width])
                if width == 1:
                    self.times.plain.append(times[-1])
            if self._is_long(started, cycle):
                break

    def _is_long(self, started: float, cycle: int) -> bool:
        """Whether one more cycle would take too long."""
        spent = self._clock() - started
        return spent + spent / (cycle + 1) > min(_CYCLE_SECONDS, self.left())

    def _expect(self, width: int) -> float:
        """Seconds that a pass may take, rather too many than too few."""
        known = self.times.verify
        if width in known:
            return known[width]
        wider = [known[other] for other in known if other > width]
        if wider:
            return min(wider)
        widest = max(known)
        return known[widest] * (1.0 + _WORST_ROW * (width - widest) / widest)

    # ---- draft steps

    def classes(self) -> None:
        groups = group_classes(self._blocks)[:_MAX_GROUPS]
        plans = [
            np.array([class_key(block) in group for block in self._blocks], np.uint8)
            for group in groups
        ]
        parts = self._steps([None, *((plan, 0) for plan in plans)])
        for group, part in zip(groups, parts, strict=True):
            if part is not None:
                self.times.without[group] = part

    def head(self) -> None:
        sizes = [self._n_vocab // share // _HEAD_STEP * _HEAD_STEP for share in _HEAD_SHARES]
        sizes = [rows for rows in dict.fromkeys(sizes) if 0 < rows < self._n_vocab]
        times = self._steps([None, *((None, rows) for rows in sizes)])
        for rows, part in zip(sizes, times, strict=True):
            if part is not None:
                self.times.trimmed[rows] = part

    def _steps(self, plans: Sequence[tuple[Bits | None, int] | None]) -> list[float | None]:
        """Draft steps under each plan but the first, which is the full one, as parts of it; None = no time for it."""
        samples: list[list[float]] = [[] for _ in plans]
        started = self._clock()
        for cycle in range(_MAX_CYCLES):
            full: float | None = None
            for place, plan in enumerate(plans):
                expected = self.times.full[-1] if self.times.full else self.times.verify[1]
                if self.left() < 2.5 * expected:
                    continue
                skip, rows = plan or (None, 0)
                # the first step builds the plan's graph
                times = self._session.time_draft(skip, rows, 3, self.left()).tolist()[1:]
                if plan is None and times:
                    full = statistics.median(times)
                    self.times.full += times
                elif times and full is not None:
                    # within a cycle the machine is the same
                    samples[place].append(statistics.median(times) / full)
            if self._is_long(started, cycle):
                break
        return [statistics.median(times) if times else None for times in samples[1:]]

    # ---- a second context length

    def cells(self) -> None:
        room = self._n_ctx - max(_WIDTHS)
        n_cells = min(_CELLS, room // 64 * 64)
        widths = [width for width in (1, 8) if width in self.times.verify]
        cost = 9.0 * sum(self.times.verify[width] for width in widths)  # longer ones take longer
        if self.left() < cost:
            widths, cost = widths[:1], 9.0 * self.times.verify[1]
        if n_cells < MIN_CELLS or self.left() < cost:
            return
        # near and far in one go: the machine may have changed since the widths were measured
        passes = np.repeat(np.array(widths, np.int32), 3)
        near = self._session.time_verify(passes, 0, self.left()).tolist()
        far = self._session.time_verify(passes, n_cells, self.left()).tolist()
        for place, width in enumerate(widths):
            both = slice(3 * place + 1, 3 * place + 3)
            if far[both]:
                ratio = statistics.median(far[both]) / statistics.median(near[both])
                more = max(ratio - 1.0, 0.0) * self.times.verify[width]
                self.times.per_cell[width] = more / n_cells
