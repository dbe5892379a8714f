"""A machine whose passes take exactly known seconds, with a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyssd.errors import DecodeError
from pyssd.skipset import Block

BLOCKS = [
    block
    for layer in range(4)
    for block in (
        Block(2 * layer, layer, "attn", 3_000_000, "CPU"),
        # half of the layers are quantised more finely, as Q4_K_M does
        Block(2 * layer + 1, layer, "ffn", 20_000_000 if layer % 2 else 26_000_000, "CPU"),
    )
]
N_VOCAB = 32_000


@dataclass
class FakeSession:
    """Times passes as a Session does, on a clock that nothing else moves.

    Attributes:
        plain: Seconds of a plain pass with no cells in front.
        refusal: As Session's.
    """

    plain: float = 0.02
    refusal: str | None = None
    width_factor: Callable[[int], float] = lambda width: 1.0 + 0.04 * (width - 1)
    cell_factor: float = 1e-4
    switch: float = 0.1
    build: float = 0.1
    max_width: int = 64
    n_ctx: int = 4096
    trims: bool = True
    slow_passes: frozenset[int] = frozenset()
    now: float = 0.0
    n_passes: int = 0
    widths: list[int] = field(default_factory=list)
    plans: list[tuple[bytes, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def max_draft(self, n_ctx: int) -> int:
        return min(self.max_width, n_ctx) - 1

    def verify_seconds(self, width: int, n_cells: int) -> float:
        rows = 1.0 + 0.15 * (width - 1)
        return self.plain * (self.width_factor(width) + self.cell_factor * n_cells * rows)

    def block_seconds(self, block: Block) -> float:
        """An FFN costs by its bytes; an attention by its bytes and as much as 2 MB more."""
        nbytes = block.nbytes + (2_000_000 if block.kind == "attn" else 0)
        return 0.8 * self.plain * nbytes / sum(b.nbytes + 1_000_000 for b in BLOCKS)

    def draft_step(self, skip: Sequence[int], head_rows: int, n_cells: int = 0) -> float:
        kept = [block for block, bit in zip(BLOCKS, skip, strict=True) if not bit]
        per_cell = self.cell_factor * self.plain / 4
        head = 0.15 * self.plain * (head_rows or N_VOCAB) / N_VOCAB
        seconds = sum(self.block_seconds(block) for block in kept) + head + 0.05 * self.plain
        return seconds + n_cells * per_cell * sum(block.kind == "attn" for block in kept)

    def time_verify(
        self, widths: np.ndarray, n_cells: int = 0, max_seconds: float = math.inf
    ) -> np.ndarray:
        assert n_cells + max(widths) <= self.n_ctx
        assert max(widths) <= self.max_width
        started, times = self.now, []
        for width in widths.tolist():
            if self.now - started >= max_seconds:
                break
            last = self.widths[-1] if self.widths else 0
            seconds = self.verify_seconds(width, n_cells)
            seconds += self.switch * self.plain if width != last else 0.0
            self.widths.append(width)
            times.append(self._spend(seconds))
        return np.array(times)

    def time_draft(
        self, skip: np.ndarray | None, head_rows: int, n_steps: int, max_seconds: float = math.inf
    ) -> np.ndarray:
        if head_rows and not self.trims:
            raise DecodeError("this head cannot be trimmed", -1)
        bits = np.zeros(len(BLOCKS), np.uint8) if skip is None else skip
        self.plans.append((bits.tobytes(), head_rows))
        started, times = self.now, []
        for step in range(n_steps):
            if self.now - started >= max_seconds:
                break
            seconds = self.draft_step(bits.tolist(), head_rows)
            times.append(self._spend(seconds + (self.build * self.plain if step == 0 else 0.0)))
        return np.array(times)

    def _spend(self, seconds: float) -> float:
        self.n_passes += 1
        seconds *= 10.0 if self.n_passes in self.slow_passes else 1.0
        self.now += seconds
        return seconds
