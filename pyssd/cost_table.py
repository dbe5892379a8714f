"""What passes and blocks cost, as it was measured: the table behind a CostModel, and what is assumed where it has gaps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd.skipset import Block

MAX_WIDTH = 64  # rows of logits of a target pass
WIDTHS = np.arange(MAX_WIDTH + 1, dtype=np.float64)

# what is assumed where nothing was measured, in units of a plain pass
_GUESS_STEP = 0.1  # each further row
_WIDE, _ROW_BEYOND = 8, 0.85  # beyond the last known width, if it is wide: part of its cost per row
_GUESS_BLOCKS = 0.85  # all blocks together; the head and the rest of a step share what is left
_LEAST = 0.55  # of its share of a full step: what a draft step that reads little takes at least
_GUESS_HEAD = 0.12
_GUESS_PER_CELL = 1e-4  # attention to each cell
_GUESS_ROW_PER_CELL = (
    0.15  # of that, for each further row: the rows of a pass read the cells together
)


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Blocks that cost the same.

    Attributes:
        kind: "attn", "ffn" or "mixer".
        nbytes: Bytes of weights of each.
        device: Where they lie.
        count: How many there are.
        seconds: Of one in a draft step, with no cells in front: c1 (FFN), c3 (attention).
        per_cell: Seconds more for each cell in front: c2; 0 for FFN.
        measured: The seconds were measured, not inferred from bytes.
    """

    kind: str
    nbytes: int
    device: str
    count: int
    seconds: float
    per_cell: float = 0.0
    measured: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockClass:
        """Read what dataclasses.asdict gave."""
        return cls(
            str(values["kind"]),
            int(values["nbytes"]),
            str(values["device"]),
            int(values["count"]),
            float(values["seconds"]),
            float(values["per_cell"]),
            bool(values["measured"]),
        )

    @property
    def key(self) -> tuple[str, int, str]:
        """What its blocks have in common."""
        return (self.kind, self.nbytes, self.device)


def class_key(block: Block) -> tuple[str, int, str]:
    """The key of a block's class."""
    return (block.kind, block.nbytes, block.device)


def guess_classes(
    blocks: Sequence[Block], plain: float = 1.0, seconds: float | None = None
) -> tuple[BlockClass, ...]:
    """Price blocks by their bytes.

    Args:
        blocks: The model's blocks.
        plain: Seconds of a plain pass.
        seconds: Of all blocks together, None = a usual part of a plain pass.
    """
    total = max(sum(block.nbytes for block in blocks), 1)
    of_all = _GUESS_BLOCKS * plain if seconds is None else seconds
    n_attention = max(sum(block.kind == "attn" for block in blocks), 1)
    counts: dict[tuple[str, int, str], int] = {}
    for block in blocks:
        counts[class_key(block)] = counts.get(class_key(block), 0) + 1
    return tuple(
        BlockClass(
            kind,
            nbytes,
            device,
            count,
            seconds=of_all * nbytes / total,
            per_cell=_GUESS_PER_CELL * plain / n_attention if kind == "attn" else 0.0,
        )
        for (kind, nbytes, device), count in counts.items()
    )


@dataclass(frozen=True, slots=True)
class CostTable:
    """What was measured; empty fields were not, and are guessed when they are asked for.

    Attributes:
        verify: Width -> seconds of a pass with no cells in front, all rows having logits.
        verify_per_cell: Width -> seconds more for each cell in front.
        switch_seconds: What a pass takes longer whose width differs from that of the pass before.
        classes: The blocks.
        head: Rows of the LM head -> seconds of it in a draft step; the largest is the whole head.
        overhead: Seconds of a draft step that belong to neither blocks nor head; None = not measured. Negative where
            these, each measured by leaving it out, add up to more than a whole step.
        n_vocab: Rows of the whole head, 0 = unknown.
        n_ctx: Cells of the context that it was measured in.
        noisy: Passes of one width differed so much that something else was running.
    """

    verify: Mapping[int, float] = field(default_factory=dict)
    verify_per_cell: Mapping[int, float] = field(default_factory=dict)
    switch_seconds: float = 0.0
    classes: tuple[BlockClass, ...] = ()
    head: Mapping[int, float] = field(default_factory=dict)
    overhead: float | None = None
    n_vocab: int = 0
    n_ctx: int = 0
    noisy: bool = False

    @property
    def plain(self) -> float:
        """Seconds of a plain pass with no cells in front; 1 where nothing was measured."""
        return float(self.base()[1])

    def base(self) -> npt.NDArray[np.float64]:
        """Seconds by width with no cells in front, float64 [MAX_WIDTH + 1], the first entry unused.

        Straight lines between known widths; beyond the last one each further row costs most of its share of the last.
        """
        guess = 1.0 + _GUESS_STEP * (WIDTHS - 1.0)
        if not self.verify:
            return guess
        widths = sorted(self.verify)
        first, last = widths[0], widths[-1]
        base = np.interp(WIDTHS, widths, [self.verify[width] for width in widths])
        base[:first] = self.verify[first] * guess[:first] / guess[first]
        beyond = guess[last:] / guess[last]
        if last >= _WIDE:  # the weights are read again for more rows
            beyond = 1.0 + _ROW_BEYOND * (WIDTHS[last:] - last) / last
        base[last:] = self.verify[last] * beyond
        return base

    def per_cell(self) -> npt.NDArray[np.float64]:
        """Seconds more for each cell by width, float64 [MAX_WIDTH + 1]: a straight line through what is known."""
        known = self.verify_per_cell
        if len(known) > 1:
            low, high = min(known), max(known)
            slope = (known[high] - known[low]) / (high - low)
            return np.maximum(known[low] + slope * (WIDTHS - low), 0.0)
        width, seconds = next(iter(known.items()), (1, _GUESS_PER_CELL * self.plain))
        rows = 1.0 + _GUESS_ROW_PER_CELL * (WIDTHS - 1.0)
        return seconds / (1.0 + _GUESS_ROW_PER_CELL * (width - 1.0)) * rows

    def head_seconds(self, rows: int) -> float:
        """Seconds of the LM head over its first rows; 0 = all of them."""
        whole = max(self.head) if self.head else self.n_vocab
        if not self.head:
            share = min(rows, whole) / whole if rows > 0 and whole > 0 else 1.0
            return _GUESS_HEAD * self.plain * share
        if rows <= 0 or rows >= whole:
            return self.head[whole]
        places = sorted(self.head)
        if rows < places[0]:
            return self.head[places[0]] * rows / places[0]
        return float(np.interp(rows, places, [self.head[place] for place in places]))

    def draft_seconds(self, blocks: float, all_blocks: float, head_rows: int) -> float:
        """Seconds of a draft step.

        Args:
            blocks: Seconds of the blocks that are not left out.
            all_blocks: Seconds of all blocks.
            head_rows: Rows of the LM head, 0 = all.
        """
        read, rest = blocks + self.head_seconds(head_rows), self.rest_seconds()
        everything = all_blocks + self.head_seconds(0)
        share = read / everything if everything > 0.0 else 1.0
        return max(read + rest, _LEAST * share * (everything + rest))

    def rest_seconds(self) -> float:
        """Seconds of a draft step that belong to neither blocks nor head."""
        if self.overhead is not None:
            return self.overhead
        return (1.0 - _GUESS_BLOCKS - _GUESS_HEAD) * self.plain

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON."""
        return {
            **asdict(self),
            **{
                name: {str(key): value for key, value in sorted(getattr(self, name).items())}
                for name in ("verify", "verify_per_cell", "head")
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:
        """Read what as_dict gave; nothing about it is taken for granted.

        Raises:
            ValueError: It is no such table.
        """
        try:
            classes = tuple(BlockClass.from_dict(entry) for entry in values["classes"])
            verify, per_cell, head = (
                {int(key): float(value) for key, value in values[name].items()}
                for name in ("verify", "verify_per_cell", "head")
            )
            overhead = values["overhead"]
            table = cls(
                verify,
                per_cell,
                float(values["switch_seconds"]),
                classes,
                head,
                None if overhead is None else float(overhead),
                int(values["n_vocab"]),
                int(values["n_ctx"]),
            )
            table._check()
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            msg = f"it has another form ({error!r})"
            raise ValueError(msg) from error
        return table

    def _check(self) -> None:
        numbers = [*self.verify.values(), *self.verify_per_cell.values(), *self.head.values()]
        numbers += [self.switch_seconds]
        numbers += [number for c in self.classes for number in (c.seconds, c.per_cell)]
        is_good = all(math.isfinite(number) and number >= 0.0 for number in numbers)
        is_good &= all(1 <= w <= MAX_WIDTH and s > 0.0 for w, s in self.verify.items())
        is_good &= math.isfinite(self.overhead or 0.0)
        is_good &= all(c.count > 0 for c in self.classes) and bool(self.verify)
        if not is_good:
            msg = "it has entries that are no times"
            raise ValueError(msg)
