"""Control flow without a model: the rounds of an engine, how a sweep chooses. Sessions here are hand-made."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fake_rounds import FakeCosts

from pyssd._core import NgramIndex
from pyssd.choice import Choice
from pyssd.config import SpecConfig
from pyssd.controller import Controller
from pyssd.engine import DraftPlan, Engine, Round
from pyssd.propose.skip import SkipArm
from pyssd.select import find_skip_set
from pyssd.select.sweep import every_third_ffn
from pyssd.skipset import Block, SkipSet

# engine ---------------------------------------------------------------------------------------------------------------


class FakeSession:
    """Drafts 7s; the target says 7 except at every fifth position, where it says 8."""

    def __init__(self, n_past: int = 0) -> None:
        self.n_past = n_past
        self.widths: list[int] = []
        self.n_steps = 0

    def counters(self) -> dict[str, float]:
        return {"draft_seconds": 0.0, "verify_seconds": 0.0, "guard_rows": 0.0}

    def graphs_built(self) -> dict[str, int]:
        return {"target": 0, "draft": 0, "scout": 0}

    def set_skip(self, skip: Any, head_rows: int) -> None:
        pass

    def max_draft(self, n_ctx: int) -> int:
        return min(63, n_ctx - self.n_past - 1)

    @property
    def draft_steps(self) -> int:
        return self.n_steps

    def draft(
        self, chain: int, last: int, max_len: int, confidence: float, rule: Any, prefix: Any
    ) -> Any:
        self.n_steps += max_len
        return np.full(max_len, 7, np.int32), np.ones(max_len, np.float32)

    def verify(
        self, chain: int, last: int, draft: npt.NDArray[np.int32], guard: float = 0.0
    ) -> Any:
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
    arm = SkipArm(np.ones(2, np.uint8), "f:1")
    return DraftPlan(Controller(FakeCosts(1.2)), config, "test", skip=arm, always=True)


def free_round(arm: str, tokens: list[int]) -> Round:
    choice = Choice(arm, length=len(tokens), width=len(tokens) + 1, seconds=1.0)
    return Round(choice, np.array(tokens, np.int32), len(tokens), len(tokens), (), 0, 0.0, 1.0)


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
    plain = DraftPlan(Controller(FakeCosts(1.2)), SpecConfig(), "off")
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
    assert stats.accepted_by == {"skip": 12}
    assert stats.rounds_by == {"skip": 3}
    turn = free_round("ngram", [7, 7, 2])
    engine.accept(turn, np.array([7, 7, 2], np.int32), 1.0)  # the draft ended the text
    assert stats.accepted == 15
    engine.accept(turn, np.array([7, 8], np.int32), 1.0)
    assert stats.accepted == 16
    assert stats.accepted_by == {"skip": 12, "ngram": 4}


class CyclicSession(FakeSession):
    """The target goes on with 20, 21, .. 26 over and over; the model's own drafts are wrong. It has a clock."""

    clock = 0.0

    def draft(
        self, chain: int, last: int, max_len: int, confidence: float, rule: Any, prefix: Any
    ) -> Any:
        self.clock += 0.5 * max_len
        self.n_steps += max_len
        return np.full(max_len, 9, np.int32), np.ones(max_len, np.float32)

    def verify(
        self, chain: int, last: int, draft: npt.NDArray[np.int32], guard: float = 0.0
    ) -> Any:
        self.widths.append(len(draft) + 1)
        self.clock += 1.0 + 0.1 * len(draft)
        emitted = []
        for row in range(len(draft) + 1):
            emitted.append(20 + (self.n_past + row) % 7)
            if row == len(draft) or emitted[-1] != draft[row]:
                break
        self.n_past += len(emitted)
        return np.array(emitted, np.int32)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_copies_where_something_matches_and_skips_elsewhere(
    with_skip: bool, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DraftPlan(
        Controller(FakeCosts(1.3, c=0.5)),
        SpecConfig(max_ngram_len=15, max_draft_len=4),
        "test",
        skip=SkipArm(np.ones(2, np.uint8), "f:1") if with_skip else None,
        index=NgramIndex(1000),
        always=always,
    )
    session = CyclicSession(n_past=1)
    monkeypatch.setattr(time, "perf_counter", lambda: session.clock)
    engine = Engine(session, 1000, plan, None)  # type: ignore[arg-type]
    engine.start(np.array([5], np.int32), 20)
    tokens: list[int] = []
    for emitted in engine.rounds(0, 20):
        tokens += emitted
        engine.stats.emitted += len(emitted)
        if len(tokens) > 200:
            break
    assert tokens == [20 + (1 + i) % 7 for i in range(len(tokens))]
    stats = engine.finish()
    assert set(stats.accepted_by) <= {"ngram", "skip"}
    assert stats.accepted_by["ngram"] > 100
    assert stats.rounds_by["ngram"] > 10
    # nothing to copy before the cycle comes round: the model drafts there if that was asked for
    assert max(session.widths) <= 16
    if always:
        assert ("skip" in stats.rounds_by) == with_skip
    else:
        assert stats.rounds_by["plain"] >= 1
        assert stats.speedup is not None
        assert stats.speedup > 3.0
    assert session.clock < 80.0


def test_engine_copies_across_turns() -> None:
    index = NgramIndex(1000)
    plan = DraftPlan(Controller(FakeCosts(1.3)), SpecConfig(), "test", index=index)
    prompt = np.arange(100, 120, dtype=np.int32)
    for turn in range(2):
        engine = Engine(CyclicSession(n_past=20), 1000, plan, 30)  # type: ignore[arg-type]
        engine.start(prompt, 26)
        rounds = engine.rounds(0, 26)
        first = engine.draft(0, 26)
        assert (first.choice.arm, len(first.tokens)) == ("plain", 0), turn
        output = [26]
        while len(output) < 30:
            output += next(rounds)
        assert len(index) == len(prompt) + len(output)
    shared = index.sync(np.append(prompt, np.array(output[:10], np.int32)))
    assert shared == len(prompt) + 10


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
