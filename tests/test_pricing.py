"""What a skip set could be worth, how much of the LM head to keep, and how far a skip draft should go."""

from __future__ import annotations

import numpy as np
import pytest
from fake_rounds import FakeCosts

from pyssd.propose.skip import Calibration, SkipArm, best_chain, make_rule
from pyssd.select.pricing import HeadTrim, head_sizes, possible_speedup


def test_flat_verification_leaves_room_for_skip_drafts_and_steep_does_not() -> None:
    flat, steep = FakeCosts(1.0).by_width, FakeCosts(2.5).by_width
    assert possible_speedup(flat) > 1.05
    assert possible_speedup(steep) < 1.0


# the LM head ----------------------------------------------------------------------------------------------------------


class HeadCosts(FakeCosts):
    """A step is 0.6 of a plain one, a quarter of which is the head."""

    def draft_seconds(self, skip: object, n_past: int, head_rows: int = 0) -> float:
        return 0.45 + 0.15 * (head_rows or 32768) / 32768


def test_sizes_are_multiples_of_what_kernels_pack() -> None:
    assert head_sizes(151936) == (75776, 37888, 18944)
    assert head_sizes(1000) == (256,)
    assert head_sizes(100) == ()


@pytest.mark.parametrize(
    ("beyond", "expected"),
    [((0.0, 0.0, 0.0), 4096), ((0.0, 0.0, 0.4), 8192), ((0.0, 0.3, 0.4), 16384), ((0.3, 0.4, 0.5), 0)],
)  # fmt: skip
def test_rows_are_chosen_by_what_they_save_and_what_they_lose(
    beyond: tuple[float, ...], expected: int
) -> None:
    head, rng = HeadTrim(32768), np.random.default_rng(0)
    bounds = [(0, 4096), (4096, 8192), (8192, 16384), (16384, 32768)]
    shares = [1.0 - beyond[2], beyond[2] - beyond[1], beyond[1] - beyond[0], beyond[0]]
    tokens = [rng.integers(*bounds[rng.choice(4, p=shares)]) for _ in range(4000)]
    head.learn(np.array(tokens, np.int32))
    arm = SkipArm(np.ones(4, np.uint8), "f:1")
    assert head.choose(HeadCosts(1.1), arm, 0) == expected


def test_nothing_known_keeps_the_head_and_a_foreign_size_is_replaced() -> None:
    head, arm = HeadTrim(32768), SkipArm(np.ones(4, np.uint8), "f:1", head_rows=2560)
    assert head.choose(HeadCosts(1.1), arm, 0) == 0


# skip drafts ----------------------------------------------------------------------------------------------------------


def test_calibration_follows_a_change_at_once_and_noise_slowly() -> None:
    known = Calibration()
    for _ in range(60):
        known.learn([0.95] * 4, 4)
    assert known.mean() > 0.95
    known.learn([0.95], 0)
    assert known.mean() > 0.9  # one miss is no change
    for _ in range(10):
        known.learn([0.95], 0)
    assert known.mean() < 0.5
    for _ in range(6):
        known.learn([0.95] * 4, 4)
    assert known.mean() > 0.7


def test_calibration_is_by_confidence() -> None:
    known = Calibration()
    for _ in range(40):
        known.learn([0.995], 1)
        known.learn([0.55], 0)
    chances = known.chances()
    assert chances[-2] > 0.9
    assert chances[3] < 0.15


def test_only_tokens_that_were_reached_count() -> None:
    known, other = Calibration(), Calibration()
    known.learn([0.9, 0.9, 0.3, 0.3], 1)
    other.learn([0.9, 0.9], 1)
    assert known.chances() == other.chances()


def test_chain_is_longer_where_it_is_cheaper() -> None:
    flat, steep = FakeCosts(1.1).by_width, FakeCosts(2.0).by_width

    def length(table: list[float], step: float) -> int:
        tokens, units = best_chain(0.9, table, step, 1.0, 15)
        places = [n for n in range(1, 16) if n * step + table[n + 1] == pytest.approx(units)]
        assert tokens == pytest.approx(1.0 + sum(0.9**i for i in range(1, places[0] + 1)))
        return places[0]

    assert length(flat, 0.1) > length(flat, 0.6) >= length(steep, 0.6)


def test_rule_asks_for_more_where_drafting_costs_more() -> None:
    known = Calibration()
    cheap = make_rule(known, FakeCosts(1.1).by_width, 0.2, 1.0, 8)
    dear = make_rule(known, FakeCosts(2.0).by_width, 0.7, 1.0, 8)
    assert (
        cheap.draft_reach[0] == dear.draft_reach[0] == 0.0
    )  # the arm was chosen for its first token
    assert (dear.draft_reach[1:] > cheap.draft_reach[1:]).all()
    assert (dear.keep_reach > cheap.keep_reach).all()
    assert len(cheap.edges) + 1 == len(cheap.chances)
    assert len(cheap.draft_reach) == 8
