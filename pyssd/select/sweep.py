"""Find a usable skip set in a few seconds: one single-block sweep, ranked by damage per byte.

Each block is left out alone in a fresh pass over a few prompt tokens; its damage is the share of positions whose most
likely token changes. Blocks are then taken greedily, least damage per byte first, and the longest prefix of that order
that still agrees with the target is kept. Damage does not add up (two harmless blocks can hurt together), so the
prefixes are measured, not predicted. Models too large for a sweep within the allowance get a fixed rule instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyssd.skipset import Block, SkipSet, count_layers

MAX_TOKENS = 32
MIN_TOKENS = 8
_MIN_AGREEMENT = 0.75  # a draft that agrees less seldom pays for itself
_SHARES = (0.10, 0.18, 0.26, 0.34, 0.42)  # of the blocks' bytes, tried in this order

Tokens = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint8]


class Scout(Protocol):
    """The part of a Session that a sweep uses."""

    def skip_argmax(self, tokens: Tokens, skip: Bits | None) -> Tokens:
        """Return the most likely next token at each position of a fresh pass."""


def find_skip_set(
    scout: Scout, blocks: Sequence[Block], tokens: Tokens, *, seconds: float = 3.0
) -> SkipSet:
    """Choose a skip set for a model from one sweep, within a time allowance.

    Args:
        scout: Runs the passes.
        blocks: The model's blocks, in order.
        tokens: int32 [n], recent tokens; the last 32 are used.
        seconds: Wall time the search may take.

    Returns:
        The set; empty if no block can be left out.
    """
    deadline = time.monotonic() + seconds
    recent = np.ascontiguousarray(tokens[-MAX_TOKENS:], dtype=np.int32)
    candidates = [place for place, block in enumerate(blocks) if block.kind != "mixer"]
    n_layer = count_layers(blocks)
    if len(recent) < MIN_TOKENS or not candidates:
        return every_third_ffn(blocks)
    scout.skip_argmax(
        recent, None
    )  # makes the scout's context and first graph, which the estimate must not count
    started = time.monotonic()
    wanted = scout.skip_argmax(recent, None)
    pass_seconds = time.monotonic() - started
    n_passes = len(candidates) + len(_SHARES)
    room = 0.8 * (deadline - time.monotonic())
    if n_passes * pass_seconds > room:
        # a pass over few tokens costs about its share of the longer one, on CPUs at least
        shorter = int(len(recent) * room / (n_passes * pass_seconds))
        if shorter < MIN_TOKENS:
            return every_third_ffn(blocks)
        recent = recent[-shorter:]
        wanted = scout.skip_argmax(recent, None)
    damage = {}
    for place in candidates:
        if time.monotonic() > deadline:
            return every_third_ffn(blocks)
        damage[place] = 1.0 - _agreement(scout, recent, wanted, [place], len(blocks))
    order = sorted(candidates, key=lambda place: _rank(damage[place], len(recent), blocks[place]))
    return _to_set(_longest_prefix(scout, recent, wanted, order, blocks, deadline), blocks, n_layer)


def every_third_ffn(blocks: Sequence[Block]) -> SkipSet:
    """Skip every third FFN between layer 2 and the last but two: what a sweep would mostly find, without one."""
    n_layer = count_layers(blocks)
    with_ffn = {block.layer for block in blocks if block.kind == "ffn"}
    return SkipSet((), [layer for layer in range(2, n_layer - 2, 3) if layer in with_ffn], n_layer)


def _rank(damage: float, n_tokens: int, block: Block) -> float:
    # half a token of damage is what a sweep over n tokens cannot see; without it all harmless blocks would tie at 0
    return (damage + 0.5 / n_tokens) / max(block.nbytes, 1)


def _agreement(
    scout: Scout, tokens: Tokens, wanted: Tokens, skipped: Sequence[int], n_blocks: int
) -> float:
    bits = np.zeros(n_blocks, np.uint8)
    bits[list(skipped)] = 1
    return float(np.mean(scout.skip_argmax(tokens, bits) == wanted))


def _longest_prefix(
    scout: Scout,
    tokens: Tokens,
    wanted: Tokens,
    order: Sequence[int],
    blocks: Sequence[Block],
    deadline: float,
) -> list[int]:
    total = sum(block.nbytes for block in blocks)
    best: list[int] = []
    for share in _SHARES:
        prefix: list[int] = []
        nbytes = 0
        for place in order:
            if nbytes + blocks[place].nbytes > share * total:
                break
            prefix.append(place)
            nbytes += blocks[place].nbytes
        if len(prefix) == len(best):
            continue
        if (
            time.monotonic() > deadline
            or _agreement(scout, tokens, wanted, prefix, len(blocks)) < _MIN_AGREEMENT
        ):
            break
        best = prefix
    # nothing agreed well enough: the single best block is the smallest draft there is
    return best or [order[0]]


def _to_set(places: Sequence[int], blocks: Sequence[Block], n_layer: int) -> SkipSet:
    attention = [blocks[place].layer for place in places if blocks[place].kind == "attn"]
    mlp = [blocks[place].layer for place in places if blocks[place].kind == "ffn"]
    return SkipSet(attention, mlp, n_layer)
