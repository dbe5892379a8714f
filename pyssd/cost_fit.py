"""From measured times to a CostTable.

What blocks and head cost is what a draft step saves without them. On a CPU the savings add up to more than a whole step:
the less of a model is read, the more of it stays in the last cache. So the rest of a step may come out negative; the table
then predicts steps with few blocks left out well, and CostTable.draft_seconds has a floor for the others.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyssd.cost_table import BlockClass, CostTable, class_key, guess_classes
from pyssd.skipset import Block

ClassKey = tuple[str, int, str]

_NOISY = 1.4  # a third of the passes of one kind took so many times the fastest: something else was running
_ALIKE = 1.1  # blocks whose bytes differ by less are measured together


@dataclass
class Times:
    """What one measurement gathers.

    Attributes:
        verify: Width -> seconds of a pass with no cells in front.
        per_cell: Width -> seconds more for each cell in front.
        switches: Seconds that passes took longer than one of the same width right behind.
        plain: Seconds of plain passes, from the beginning to the end.
        full: Seconds of draft steps with nothing left out.
        without: Classes left out together -> what was left of a full step.
        trimmed: Rows of the head -> what was left of a full step.
    """

    verify: dict[int, float] = field(default_factory=dict)
    per_cell: dict[int, float] = field(default_factory=dict)
    switches: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    without: dict[tuple[ClassKey, ...], float] = field(default_factory=dict)
    trimmed: dict[int, float] = field(default_factory=dict)


def group_classes(blocks: Sequence[Block]) -> list[tuple[ClassKey, ...]]:
    """Classes to be measured together, those with the most bytes first: one kind, one device, nearly the same bytes."""
    counts: dict[ClassKey, int] = {}
    for block in blocks:
        if block.kind != "mixer":
            counts[class_key(block)] = counts.get(class_key(block), 0) + 1
    groups: list[list[ClassKey]] = []
    for key in sorted(counts, key=lambda key: (key[0], key[2], key[1])):
        last = groups[-1][0] if groups else ("", 0, "")
        if (last[0], last[2]) == (key[0], key[2]) and key[1] <= _ALIKE * last[1]:
            groups[-1].append(key)
        else:
            groups.append([key])
    groups.sort(key=lambda group: -sum(counts[key] * key[1] for key in group))
    return [tuple(group) for group in groups]


def fit_table(times: Times, blocks: Sequence[Block], n_vocab: int, n_ctx: int) -> CostTable:
    """Make a table of what was measured; parts that were not are priced by their bytes and marked so."""
    table = CostTable(
        ascending(times.verify),
        times.per_cell,
        max(statistics.median(times.switches), 0.0) if times.switches else 0.0,
        n_vocab=n_vocab,
        n_ctx=n_ctx,
        noisy=_are_noisy(times.plain) or _are_noisy(times.full),
    )
    per_cell = float(table.per_cell()[1])
    if not times.full:
        classes = _with_cells(guess_classes(blocks, table.plain), per_cell)
        return dataclasses.replace(table, classes=classes)
    full = statistics.median(times.full)
    classes = _priced(times, blocks, full)
    table = dataclasses.replace(
        table, classes=_with_cells(classes, per_cell), head=_head(times, n_vocab, full)
    )
    rest = full - sum(c.count * c.seconds for c in classes) - table.head_seconds(0)
    return dataclasses.replace(table, overhead=rest)


def _head(times: Times, n_vocab: int, full: float) -> dict[int, float]:
    if not times.trimmed:
        return {}
    least = min(times.trimmed)
    saved = {rows: max(1.0 - part, 0.0) * full for rows, part in times.trimmed.items()}
    whole = saved[least] * n_vocab / (n_vocab - least)
    head = {rows: max(whole - seconds, 0.0) for rows, seconds in saved.items()}
    return ascending({**head, n_vocab: whole})


def _priced(times: Times, blocks: Sequence[Block], full: float) -> tuple[BlockClass, ...]:
    """The classes; those that were not measured at the price per byte of the others."""
    guessed = guess_classes(blocks, full)
    nbytes = {c.key: c.count * c.nbytes for c in guessed}
    per_byte: dict[ClassKey, float] = {}
    for group, part in times.without.items():
        price = max(1.0 - part, 0.0) * full / max(sum(nbytes[key] for key in group), 1)
        per_byte.update(dict.fromkeys(group, price))
    known = sum(nbytes[key] for key in per_byte)
    typical = sum(price * nbytes[key] for key, price in per_byte.items()) / known if known else 0.0
    return tuple(
        dataclasses.replace(c, seconds=per_byte[c.key] * c.nbytes, measured=True)
        if c.key in per_byte
        else dataclasses.replace(c, seconds=min(typical * c.nbytes, full / c.count))
        if typical
        else c
        for c in guessed
    )


def _with_cells(classes: Sequence[BlockClass], per_cell: float) -> tuple[BlockClass, ...]:
    n_attention = max(sum(c.count for c in classes if c.kind == "attn"), 1)
    return tuple(
        dataclasses.replace(c, per_cell=per_cell / n_attention if c.kind == "attn" else 0.0)
        for c in classes
    )


def _are_noisy(times: Sequence[float]) -> bool:
    return bool(times) and sorted(times)[2 * len(times) // 3] > _NOISY * min(times)


def ascending(values: dict[int, float]) -> dict[int, float]:
    """Make times that cannot fall with their key not fall: neighbours that do share their mean (pool adjacent violators)."""
    pools: list[tuple[list[int], float]] = []
    for key in sorted(values):
        keys, mean = [key], values[key]
        while pools and pools[-1][1] > mean:
            before, value = pools.pop()
            mean = (value * len(before) + mean * len(keys)) / (len(before) + len(keys))
            keys = before + keys
        pools.append((keys, mean))
    return {key: mean for keys, mean in pools for key in keys}
