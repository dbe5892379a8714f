"""When to draft, by which means, and how long: with times made up here."""

from __future__ import annotations

import pytest

from pyssd.controller import Controller, Measured
from pyssd.cost import WidthSeconds


def drive(
    controller: Controller,
    n_tokens: int,
    *,
    plain: float,
    round_seconds: float,
    emitted: int,
    source: str = "skip",
) -> tuple[float, int]:
    """Seconds for n_tokens, and how many rounds drafted, with the given times."""
    seconds, done, drafted = 0.0, 0, 0
    while done < n_tokens:
        drafting = controller.wants(source)
        took, got = (round_seconds, emitted) if drafting else (plain, 1)
        observe(controller, source if drafting else "plain", got, took, width=5 if drafting else 1)
        seconds, done, drafted = seconds + took, done + got, drafted + drafting
    return seconds, drafted


def observe(controller: Controller, source: str, emitted: int, seconds: float, width: int) -> None:
    controller.observe(
        source=source, emitted=emitted, width=width, seconds=seconds, verify_seconds=seconds
    )


@pytest.mark.parametrize("source", ["ngram", "skip"])
def test_drafting_goes_on_where_it_pays(source: str) -> None:
    controller = Controller(always=False)
    seconds, _ = drive(controller, 1000, plain=1.0, round_seconds=2.0, emitted=3, source=source)
    assert seconds < 1000 * 0.72
    assert controller.speedup(source) == pytest.approx(1.5)
    assert "1.50x" in controller.describe([source])


@pytest.mark.parametrize("source", ["ngram", "skip"])
def test_drafting_stops_where_it_does_not_and_is_tried_again_ever_less(source: str) -> None:
    controller = Controller(always=False)
    seconds, drafted = drive(
        controller, 4000, plain=1.0, round_seconds=2.0, emitted=1, source=source
    )
    assert seconds < 4000 * 1.02
    assert 6 < drafted < (40 if source == "skip" else 80)
    assert controller.rests(source)
    assert "plain decoding for now" in controller.describe([source])


def test_drafting_comes_back_when_it_starts_to_pay() -> None:
    controller = Controller(always=False)
    drive(controller, 100, plain=1.0, round_seconds=2.0, emitted=1)
    seconds, _ = drive(controller, 2000, plain=1.0, round_seconds=2.0, emitted=4)
    assert seconds < 2000 * 0.6


def test_always_drafts_in_every_round() -> None:
    controller = Controller(always=True)
    _, drafted = drive(controller, 100, plain=1.0, round_seconds=9.0, emitted=1)
    assert drafted == 100
    assert controller.speedup("skip") is None


def test_ngram_drafts_from_the_first_token_on_and_skip_after_plain_steps() -> None:
    controller = Controller(always=False)
    assert controller.wants("ngram")
    assert not controller.wants("skip")
    for _ in range(5):
        observe(controller, "plain", 1, 1.0, 1)
    assert controller.wants("skip")


def test_plain_is_measured_even_where_every_round_could_copy() -> None:
    controller = Controller(always=False)
    for _ in range(20):
        source = "ngram" if controller.wants("ngram") else "plain"
        observe(controller, source, 4 if source == "ngram" else 1, 1.0, 8)
    assert controller.plain_seconds_per_token == 1.0
    assert controller.speedup("ngram") == pytest.approx(4.0)


def test_one_slow_arm_does_not_stop_the_other() -> None:
    controller = Controller(always=False)
    for _ in range(5):
        observe(controller, "plain", 1, 1.0, 1)
    for _ in range(10):
        observe(controller, "ngram", 4, 1.2, 8)
        if controller.wants("skip"):
            observe(controller, "skip", 1, 2.0, 3)
    assert controller.rests("skip")
    assert controller.wants("ngram")
    text = controller.describe(["ngram", "skip"])
    assert "n-gram drafts while they pay: 3.33x" in text
    assert "skip drafts rest, as they measured 0.50x" in text


def test_new_request_gives_copying_a_new_chance() -> None:
    shared = Measured()
    controller = Controller(always=False, shared=shared)
    drive(controller, 200, plain=1.0, round_seconds=2.0, emitted=1, source="ngram")
    assert controller.rests("ngram")
    other = Controller(always=False, shared=shared)  # of another skip set
    other.begin()
    assert other.wants("ngram")
    assert other.plain_seconds_per_token == pytest.approx(1.0)


def test_step_that_pays_for_a_change_of_width_is_no_measure_of_plain() -> None:
    controller = Controller(always=False)
    for _ in range(3):
        observe(controller, "plain", 1, 1.0, 1)
    observe(controller, "ngram", 2, 1.0, 4)
    observe(controller, "plain", 1, 1.5, 1)
    assert controller.plain_seconds_per_token == pytest.approx(1.0)
    assert controller.speedup("ngram") == pytest.approx(2.0 / 1.5)  # it is charged for it


# length of n-gram drafts ----------------------------------------------------------------------------------------------


def measured(by_width: dict[int, float]) -> Controller:
    controller = Controller(always=False)
    for _ in range(3):
        observe(controller, "plain", 1, 1.0, 1)
    for _ in range(8):
        for width, seconds in by_width.items():
            observe(controller, "ngram", 1, seconds, width)
    for _ in range(40):
        observe(controller, "plain", 1, 1.0, 1)
    return controller


def test_length_of_a_free_draft_follows_its_chances_and_the_cost_of_width() -> None:
    flat = measured({2: 1.05, 4: 1.2, 8: 1.6, 16: 2.2})
    steep = measured({2: 1.9, 4: 3.3, 8: 7.7})
    assert flat.worth([0.95] * 15) == 15
    assert 0 < flat.worth([0.5] * 15) < 5
    assert flat.worth([0.03] * 15) == 0
    assert flat.worth([]) == 0
    assert steep.worth([0.7] * 15) == 0
    assert 0 < steep.worth([0.95] * 15) < 8
    assert flat.worth([0.9, 0.9, 0.02, 0.9, 0.9]) == 2


def test_first_draft_needs_no_measurement() -> None:
    assert Controller(always=False).worth([0.6, 0.7, 0.8]) == 3


def test_copying_that_goes_well_makes_time_dearer() -> None:
    controller = measured({2: 1.05, 4: 1.2, 8: 1.6, 16: 2.2})
    before = controller.worth([0.75] * 15)
    for _ in range(30):
        observe(controller, "ngram", 8, 1.6, 8)
    assert 0 < controller.worth([0.75] * 15) < before


# seconds by width -----------------------------------------------------------------------------------------------------


def test_widths_between_measured_ones_are_interpolated() -> None:
    widths = WidthSeconds()
    assert not widths.measured
    assert widths.table()[1] == 1.0
    widths.add(1, 0.1)
    assert widths.table()[8] == pytest.approx(0.17)  # the guess, at the scale of what is known
    for _ in range(20):
        widths.add(8, 0.34)
    table = widths.table()
    assert table[8] == pytest.approx(0.34, rel=0.05)
    assert 0.1 == table[1] < table[2] < table[5] < table[8] < table[9]
    assert len(table) == 65


def test_slow_outlier_is_cut_and_a_width_not_seen_for_long_is_guessed_again() -> None:
    widths = WidthSeconds()
    for _ in range(4):
        widths.add(1, 1.0)
    widths.add(4, 100.0)
    assert widths.table()[4] == pytest.approx(2.6)
    widths.add(1, 50.0)
    assert widths.table()[1] == pytest.approx(1.25)
    for _ in range(300):
        widths.add(1, 1.0)
    assert widths.table()[4] == pytest.approx(1.3)
