"""When to draft, by which means, and how long: with costs, a text and a clock made up in fake_rounds.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from fake_rounds import FakeCosts, Text, best_fixed, run

from pyssd.choice import Choice
from pyssd.controller import Controller
from pyssd.propose import EMPTY, FreeDraft
from pyssd.propose.skip import SkipArm

N = 3000


def arm() -> SkipArm:
    return SkipArm(np.ones(4, np.uint8), "f:1,2")


def never(_: int) -> float:
    return 0.0


def collapsing(chance: float, low: float) -> object:
    """A chance that collapses in the middle third of the text, and recovers."""
    return lambda i: low if N // 3 <= i < 2 * N // 3 else chance


def free(chances: Sequence[float], source: str = "ngram") -> list[FreeDraft]:
    return [FreeDraft(source, EMPTY, list(chances))]


def observe(controller: Controller, arm: str, emitted: int, seconds: float, width: int) -> None:
    controller.observe(
        Choice(arm, seconds=seconds),
        n_past=0,
        width=width,
        emitted=emitted,
        draft_seconds=0.0,
        verify_seconds=seconds,
    )


# the grid: as good as the best fixed choice, which only hindsight knows -----------------------------------------------


@pytest.mark.parametrize("shape", ["constant", "collapse", "outlier"])
@pytest.mark.parametrize("v4", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("c", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("agreement", [0.7, 0.9, 0.97])
def test_skip_drafts_come_within_two_percent_of_the_best_fixed_choice(
    v4: float, c: float, agreement: float, shape: str
) -> None:
    chance = collapsing(agreement, 0.15) if shape == "collapse" else lambda _: agreement
    slow_round = 150 if shape == "outlier" else -1
    ratios = []
    for seed in range(2):
        text, costs = Text.drawn(N, chance, never, seed), FakeCosts(v4, c)
        outcome = run(Controller(costs), costs, text, N, skip=arm(), slow_round=slow_round)
        seconds, best, _ = best_fixed(costs, text, N, with_skip=True, slow_round=slow_round)
        ratios.append(outcome.seconds / seconds)
        if best != "plain" and shape != "collapse" and seconds < 0.95 * N:
            assert (
                outcome.rounds_by["plain"] < 0.02 * N
            )  # plain only where nothing gains more than 5%
    assert np.mean(ratios) < 1.02, ratios


@pytest.mark.parametrize("shape", ["constant", "collapse", "outlier"])
@pytest.mark.parametrize("v4", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.9])
def test_free_drafts_come_within_two_percent_of_the_best_fixed_choice(
    v4: float, chance: float, shape: str
) -> None:
    at = collapsing(chance, 0.02) if shape == "collapse" else lambda _: chance
    slow_round = 150 if shape == "outlier" else -1
    ratios = []
    for seed in range(2):
        text, costs = Text.drawn(N, never, at, seed), FakeCosts(v4)
        outcome = run(Controller(costs), costs, text, N, slow_round=slow_round)
        seconds, _, _ = best_fixed(costs, text, N, with_skip=False, slow_round=slow_round)
        ratios.append(outcome.seconds / seconds)
    assert np.mean(ratios) < 1.02, ratios


def test_where_nothing_pays_two_percent_are_lost_at_most() -> None:
    for v4, c, agreement in itertools.product((1.1, 3.0), (0.8, 1.2), (0.02, 0.3)):
        costs = FakeCosts(v4, c)
        text = Text.drawn(N, lambda _, a=agreement: a, lambda _: 0.02, 1)  # type: ignore[misc]
        outcome = run(Controller(costs), costs, text, N, skip=arm())
        assert outcome.seconds < 1.02 * N
        assert outcome.rounds_by["plain"] > 0.9 * N


def test_two_means_together_are_better_than_each_alone() -> None:
    costs = FakeCosts(1.3, 0.4)
    half = N // 2
    text = Text.drawn(N, lambda i: 0.9 if i < half else 0.2, lambda i: 0.05 if i < half else 0.9, 3)
    both = run(Controller(costs), costs, text, N, skip=arm())
    alone = best_fixed(costs, text, N, with_skip=True)[0]
    assert both.seconds < 0.9 * alone
    assert both.rounds_by["skip"] > 100
    assert both.rounds_by["ngram"] > 100


def test_what_was_learnt_carries_over_to_the_next_request() -> None:
    costs, skip = FakeCosts(3.0, 0.8), arm()
    text = Text.drawn(N, lambda _: 0.5, never, 0)
    controller = Controller(costs)
    first = run(controller, costs, text, 200, skip=skip)
    second = run(controller, costs, text, 200, skip=skip)
    assert second.rounds_by.get("skip", 0) < first.rounds_by["skip"]
    assert second.seconds < first.seconds


# the choice -----------------------------------------------------------------------------------------------------------


def test_length_of_a_free_draft_follows_its_chances_and_the_cost_of_width() -> None:
    flat, steep = Controller(FakeCosts(1.1)), Controller(FakeCosts(3.3))
    assert flat.choose(0, free([0.95] * 15), 15).length == 15
    assert 0 < flat.choose(0, free([0.5] * 15), 15).length < 8
    assert steep.choose(0, free([0.95] * 15), 15).length < 8
    assert steep.choose(0, free([0.7] * 15), 15).arm == "plain"
    assert flat.choose(0, free([0.03] * 15), 15).arm == "plain"
    assert flat.choose(0, free([0.9, 0.9, 0.02, 0.9, 0.9]), 15).length == 2
    assert flat.choose(0, [], 15).arm == "plain"
    assert flat.choose(0, free([0.95] * 15), 4).length == 4
    assert flat.choose(0, free([0.95] * 15), 0).arm == "plain"


def test_better_of_two_free_drafts_is_taken() -> None:
    controller = Controller(FakeCosts(1.2))
    drafts = free([0.4] * 5) + free([0.8, 0.05], "recycle")
    choice = controller.choose(0, drafts, 15)
    assert (choice.arm, choice.length) == ("recycle", 1)


def test_long_draft_is_worth_its_length_while_such_drafts_are_rare() -> None:
    rare, common = Controller(FakeCosts(1.5)), Controller(FakeCosts(1.5))
    for _ in range(60):
        observe(rare, "plain", 1, 1.0, 1)
        observe(common, "ngram", 8, 1.5, 4)
    chances = free([0.9] * 15)
    assert common.choose(0, chances, 15).length < rare.choose(0, chances, 15).length
    # where copying ends, what other drafts gain still counts against plain decoding, not against the copying before
    assert common.choose(0, free([0.5] * 3), 15).length > 0


def test_pass_is_padded_where_another_graph_costs_more() -> None:
    controller = Controller(FakeCosts(1.1, switch=0.2))
    observe(controller, "ngram", 3, 1.1, 4)
    choice = controller.choose(0, free([0.9, 0.9]), 15)
    assert (choice.length, choice.width) == (2, 4)
    observe(controller, "ngram", 3, 1.1, 16)  # padding up to 16 costs more than a graph
    choice = controller.choose(0, free([0.9, 0.9]), 15)
    assert (choice.length, choice.width) == (2, 3)
    cheap = Controller(FakeCosts(1.1, switch=0.0))
    observe(cheap, "ngram", 3, 1.1, 4)
    assert cheap.choose(0, free([0.9, 0.9]), 15).width == 3


def test_always_drafts_wherever_there_is_a_draft() -> None:
    controller = Controller(FakeCosts(3.0))
    controller.begin(always=True)
    assert controller.choose(0, free([0.01]), 15).length == 1
    assert controller.choose(0, [], 15).arm == "plain"
    controller.begin(arm(), 4, always=True)
    choice = controller.choose(0, [], 15)
    assert (choice.arm, choice.is_probe) == ("skip", False)
    assert controller.choose(0, free([0.01]), 15).arm == "skip"  # copies only where that pays


def test_copied_tokens_are_continued_by_a_skip_draft_where_that_gains() -> None:
    skip = arm()
    skip.learn([0.99] * 60, 60, 60)
    controller = Controller(FakeCosts(1.05, c=0.3))
    controller.begin(skip, 4)
    choice = controller.choose(0, free([0.99] * 8 + [0.01]), 15)
    assert choice.length == 8
    steep = Controller(FakeCosts(3.0, c=0.9))
    steep.begin(arm(), 15)
    assert steep.choose(0, free([0.99] * 4 + [0.01]), 15).arm == "ngram"
    assert choice.arm == "ngram+skip"
    assert choice.rule is not None


def test_plain_step_is_made_now_and_then_among_drafts_without_end() -> None:
    costs = FakeCosts(1.1)
    text = Text.drawn(N, never, lambda _: 0.6, 0)
    outcome = run(Controller(costs), costs, text, N)
    assert 2 <= outcome.rounds_by["plain"] <= 40


def test_prediction_errors_are_medians_by_arm() -> None:
    controller = Controller(FakeCosts(1.5))
    for seconds in (1.0, 1.25, 2.0):
        controller.observe(
            Choice("ngram", seconds=1.0),
            n_past=0,
            width=2,
            emitted=2,
            draft_seconds=0.0,
            verify_seconds=seconds,
        )
    assert controller.median_errors() == {"ngram": pytest.approx(0.2)}
