"""Control flow without a model: when to draft, how a sweep chooses. Sessions here are hand-made."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyssd.config import SpecConfig
from pyssd.controller import Controller
from pyssd.engine import DraftPlan, Engine
from pyssd.select import find_skip_set
from pyssd.select.sweep import every_third_ffn
from pyssd.skipset import Block, SkipSet

# controller -----------------------------------------------------------------------------------------------------------


def drive(
    controller: Controller, n_tokens: int, *, plain: float, round_seconds: float, emitted: int
) -> tuple[float, int]:
    """Seconds for n_tokens, and how many rounds drafted, with the given times."""
    seconds, done, drafted = 0.0, 0, 0
    while done < n_tokens:
        drafting = controller.wants_draft()
        took, got = (round_seconds, emitted) if drafting else (plain, 1)
        controller.observe(drafting=drafting, emitted=got, seconds=took)
        seconds, done, drafted = seconds + took, done + got, drafted + drafting
    return seconds, drafted


def test_drafting_goes_on_where_it_pays() -> None:
    controller = Controller(always=False)
    seconds, _ = drive(controller, 1000, plain=1.0, round_seconds=2.0, emitted=3)
    assert seconds < 1000 * 0.72
    assert controller.speedup == pytest.approx(1.5)
    assert "1.50x" in controller.describe()


def test_drafting_stops_where_it_does_not_and_is_tried_again_ever_less() -> None:
    controller = Controller(always=False)
    seconds, drafted = drive(controller, 4000, plain=1.0, round_seconds=2.0, emitted=1)
    assert seconds < 4000 * 1.02
    assert 6 < drafted < 40
    assert controller.resting
    assert "plain decoding for now" in controller.describe()


def test_drafting_comes_back_when_it_starts_to_pay() -> None:
    controller = Controller(always=False)
    drive(controller, 100, plain=1.0, round_seconds=2.0, emitted=1)
    seconds, _ = drive(controller, 2000, plain=1.0, round_seconds=2.0, emitted=4)
    assert seconds < 2000 * 0.6


def test_always_drafts_in_every_round() -> None:
    controller = Controller(always=True)
    _, drafted = drive(controller, 100, plain=1.0, round_seconds=9.0, emitted=1)
    assert drafted == 100
    assert controller.speedup is None


# engine ---------------------------------------------------------------------------------------------------------------


class FakeSession:
    """Drafts 7s; the target says 7 except at every fifth position, where it says 8."""

    def __init__(self, n_past: int = 0) -> None:
        self.n_past = n_past
        self.widths: list[int] = []

    def counters(self) -> dict[str, float]:
        return {"draft_seconds": 0.0, "verify_seconds": 0.0}

    def graphs_built(self) -> dict[str, int]:
        return {"target": 0, "draft": 0, "scout": 0}

    def set_skip(self, skip: Any, head_rows: int) -> None:
        pass

    def max_draft(self, n_ctx: int) -> int:
        return min(63, n_ctx - self.n_past - 1)

    def draft(self, chain: int, last: int, max_len: int, confidence: float) -> Any:
        return np.full(max_len, 7, np.int32), np.ones(max_len, np.float32)

    def verify(self, chain: int, last: int, draft: npt.NDArray[np.int32]) -> Any:
        self.widths.append(len(draft) + 1)
        emitted = []
        for row in range(len(draft) + 1):
            emitted.append(8 if (self.n_past + row) % 5 == 0 else 7)
            if row == len(draft) or emitted[-1] != draft[row]:
                break
        self.n_past += len(emitted)
        return np.array(emitted, np.int32)


def plan_of(**fields: Any) -> DraftPlan:
    config = SpecConfig(**{"max_draft_len": 4, **fields})
    return DraftPlan(np.ones(2, np.uint8), "f:1", config, Controller(always=True), "test")


def run_engine(session: FakeSession, plan: DraftPlan, n_ctx: int, wanted: int | None) -> list[int]:
    engine = Engine(session, n_ctx, plan, wanted)  # type: ignore[arg-type]
    tokens: list[int] = []
    for emitted in engine.rounds(0, 1):
        engine.stats.emitted += len(emitted)
        tokens += emitted
        if wanted is not None and len(tokens) >= wanted:
            break
    return tokens


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 7, 20, 64])
def test_rounds_end_with_the_context_at_the_same_token_as_plain(n_ctx: int) -> None:
    plain = DraftPlan.plain(Controller(always=False), "off")
    expected = run_engine(FakeSession(), plain, n_ctx, None)
    assert len(expected) == n_ctx
    assert run_engine(FakeSession(), plan_of(), n_ctx, None) == expected


@pytest.mark.parametrize("wanted", [1, 2, 3, 5, 11])
def test_drafts_are_never_longer_than_what_is_wanted(wanted: int) -> None:
    session = FakeSession(n_past=1)
    tokens = run_engine(session, plan_of(max_draft_len=8), 1000, wanted)
    assert len(tokens) == wanted
    assert max(session.widths) <= wanted


def test_acceptance_is_counted_by_position() -> None:
    session = FakeSession(n_past=1)
    engine = Engine(session, 1000, plan_of(), None)  # type: ignore[arg-type]
    rounds = engine.rounds(0, 1)
    assert [next(rounds), next(rounds), next(rounds)] == [
        [7, 7, 7, 7, 8],
        [7, 7, 7, 7, 8],
        [7] * 4 + [8],
    ]
    stats = engine.finish()
    assert (stats.rounds, stats.drafted, stats.accepted) == (3, 12, 12)
    assert stats.accepted_per_pos == [3, 3, 3, 3]
    engine.accept(np.array([7, 7, 2], np.int32), [7, 7, 2], 0.0)  # the draft ended the text
    assert stats.accepted == 15
    engine.accept(np.array([7, 7, 2], np.int32), [7, 8], 0.0)
    assert stats.accepted == 16


# sweep ----------------------------------------------------------------------------------------------------------------


def blocks_of(n_layer: int) -> list[Block]:
    kinds = ("attn", "ffn")
    return [Block(i, i // 2, kinds[i % 2], 1 + 3 * (i % 2), "CPU") for i in range(2 * n_layer)]  # type: ignore[arg-type]


class FakeScout:
    """Every skipped block of `fatal` changes every token; others change a share that grows with their number."""

    def __init__(self, fatal: set[int], seconds: float = 0.0) -> None:
        self.fatal = fatal
        self.seconds = seconds
        self.passes = 0

    def skip_argmax(self, tokens: npt.NDArray[np.int32], skip: Any) -> npt.NDArray[np.int32]:
        self.passes += 1
        time.sleep(self.seconds * len(tokens) / 32)
        result = np.zeros(len(tokens), np.int32)
        if skip is None:
            return result
        skipped = set(np.flatnonzero(skip).tolist())
        if skipped & self.fatal:
            result[:] = 1
        result[: len(skipped) // 2] = 1
        return result


def test_sweep_leaves_out_cheap_blocks_and_keeps_fatal_ones() -> None:
    blocks = blocks_of(12)
    fatal = {0, 1, 2, 3, 20, 21, 22, 23}
    found = find_skip_set(FakeScout(fatal), blocks, np.arange(32, dtype=np.int32))
    skipped = set(np.flatnonzero(found.bits(blocks)).tolist())
    assert skipped
    assert not skipped & fatal
    nbytes = sum(blocks[place].nbytes for place in skipped)
    assert 0.2 < nbytes / sum(block.nbytes for block in blocks) < 0.45
    assert all(blocks[place].kind == "ffn" for place in skipped)  # more bytes for the same damage


def test_sweep_stays_within_its_time() -> None:
    blocks = blocks_of(12)
    scout = FakeScout(set(), seconds=0.05)
    started = time.monotonic()
    find_skip_set(scout, blocks, np.arange(32, dtype=np.int32), seconds=1.0)
    assert time.monotonic() - started < 1.2
    assert scout.passes > 10


def test_slow_model_gets_every_third_ffn() -> None:
    blocks = blocks_of(12)
    scout = FakeScout(set(), seconds=0.2)
    found = find_skip_set(scout, blocks, np.arange(32, dtype=np.int32), seconds=0.6)
    assert found == every_third_ffn(blocks) == SkipSet((), (2, 5, 8), 12)
    assert scout.passes == 2


def test_set_is_never_empty_when_every_block_hurts() -> None:
    blocks = blocks_of(4)
    found = find_skip_set(FakeScout(set(range(8))), blocks, np.arange(32, dtype=np.int32))
    assert len(found) == 1
