"""CostModel: what it predicts from a measurement, and how it follows what rounds really take."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from fake_costs import BLOCKS, N_VOCAB, FakeSession

from pyssd.cost import MAX_WIDTH, CostModel, CostTable
from pyssd.measure import measure_costs

VERIFY = {1: 0.010, 2: 0.0102, 4: 0.0110, 8: 0.0124, 16: 0.0190}
TABLE = CostTable(verify=VERIFY, verify_per_cell={1: 1e-6, 8: 2e-6}, switch_seconds=0.0005)


def measured(session: FakeSession, **options: float) -> CostModel:
    options = {"n_ctx": session.n_ctx, **options}
    return measure_costs(session, BLOCKS, N_VOCAB, clock=session.clock, **options)  # type: ignore[arg-type]


def follow(
    costs: CostModel, widths: list[int], factor: dict[int, float] | float, n_past: int = 0
) -> None:
    """Observe passes that take their calibrated seconds times a factor."""
    fresh = CostModel(TABLE)
    for width in widths:
        times = factor if isinstance(factor, float) else factor.get(width, 1.0)
        costs.observe_verify(width, n_past, fresh.table(n_past)[width] * times, switched=False)


# ---- what is measured is what is predicted -------------------------------------------------------------------------


def test_measurement_reproduces_verify_passes() -> None:
    session = FakeSession()
    costs = measured(session, seconds=30.0)
    assert costs.measured
    for n_past in (0, 512, 2048):
        table = costs.table(n_past)
        assert len(table) == MAX_WIDTH + 1
        for width in (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32):
            assert table[width] == pytest.approx(session.verify_seconds(width, n_past), rel=1e-6)
    assert costs.switch_seconds == pytest.approx(0.1 * session.plain)


def test_measurement_reproduces_draft_steps() -> None:
    session = FakeSession()
    costs = measured(session, seconds=30.0)
    rng = random.Random(1)
    for n_past in (0, 1024):
        for rows in (0, 256, 4096, 10_240, N_VOCAB):
            for _ in range(8):
                skip = np.array([rng.random() < 0.5 for _ in BLOCKS], np.uint8)
                expected = session.draft_step(skip.tolist(), rows, n_past)
                assert costs.draft_seconds(skip, n_past, rows) == pytest.approx(expected, rel=1e-6)
    assert costs.draft_seconds(None, 0) == pytest.approx(session.draft_step([0] * 8, 0), rel=1e-6)


def test_rows_are_knapspecs() -> None:
    session = FakeSession()
    rows = measured(session, seconds=30.0).rows()
    ffn = [session.block_seconds(block) for block in BLOCKS if block.kind == "ffn"]
    assert rows["c1"] == pytest.approx(sum(ffn) / 4)
    assert rows["c2"] == pytest.approx(session.plain * session.cell_factor / 4)
    assert rows["c3"] == pytest.approx(session.block_seconds(BLOCKS[0]))
    assert [c["count"] for c in rows["classes"]] == [4, 2, 2]
    assert all(c["measured"] for c in rows["classes"])
    assert set(rows["head"]) == {"4000", "8000", "16000", "32000"} or set(rows["head"]) == {
        "3840", "7936", "15872", "32000",
    }  # fmt: skip
    assert rows["unit"] == "seconds"


def test_a_width_beyond_those_known_costs_its_share_more() -> None:
    table = CostModel(TABLE).table(0)
    assert all(b > a for a, b in itertools.pairwise(table))
    assert 1.6 * table[16] < table[32] < 2.1 * table[16]


def test_longer_contexts_make_wide_passes_dearer() -> None:
    near, far = CostModel(TABLE).table(0), CostModel(TABLE).table(3200)
    assert far[1] == pytest.approx(VERIFY[1] + 3200e-6)
    assert far[8] == pytest.approx(VERIFY[8] + 6400e-6)
    assert far[8] / far[1] > near[8] / near[1]


# ---- the allowance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [1e-4, 0.003, 0.024, 0.08, 0.2, 0.45])
@pytest.mark.parametrize("step", [0.02, 0.9])
def test_the_allowance_is_kept(plain: float, step: float) -> None:
    session = FakeSession(plain, width_factor=lambda width: 1.0 + step * (width - 1))
    costs = measured(session)
    assert session.now <= 1.5
    assert costs.measured
    assert costs.table(0)[1] == pytest.approx(
        plain, rel=0.11
    )  # a first pass alone builds its graph


def test_a_first_pass_that_takes_too_long_is_all_that_is_measured() -> None:
    session = FakeSession(2.0)
    costs = measured(session)
    assert session.n_passes == 1
    assert costs.table(0)[1] == pytest.approx(2.0, rel=0.11)
    assert not any(c["measured"] for c in costs.rows()["classes"])


def test_what_matters_most_is_measured_first() -> None:
    session = FakeSession(0.12)
    costs = measured(session)
    assert {1, 8, 4, 2} <= set(session.widths)
    for width in (1, 2, 4, 8):
        assert costs.table(0)[width] == pytest.approx(session.verify_seconds(width, 0), rel=0.11)


def test_tiny_models_take_no_time() -> None:
    session = FakeSession(1e-4)
    measured(session)
    assert session.now < 0.05


def test_what_was_not_measured_is_priced_by_its_bytes() -> None:
    session = FakeSession(0.05, width_factor=lambda width: 1.0 + 0.3 * (width - 1))
    costs = measured(session, seconds=1.0)
    classes = {(c["kind"], c["nbytes"]): c for c in costs.rows()["classes"]}
    unmeasured = [c for c in classes.values() if not c["measured"]]
    assert unmeasured  # else the case needs a smaller allowance
    for entry in unmeasured:
        block = next(b for b in BLOCKS if (b.kind, b.nbytes) == (entry["kind"], entry["nbytes"]))
        assert entry["seconds"] == pytest.approx(session.block_seconds(block), rel=0.6)
    ffn = next(b for b in BLOCKS if b.kind == "ffn")
    assert classes["ffn", ffn.nbytes]["seconds"] > classes["attn", BLOCKS[0].nbytes]["seconds"]


def test_a_short_context_has_no_second_length() -> None:
    session = FakeSession(n_ctx=128)
    costs = measured(session, seconds=30.0)
    assert not costs.knows_cells
    assert costs.table(100)[1] > session.plain  # guessed


def test_widths_that_do_not_fit_are_left_out() -> None:
    session = FakeSession(max_width=5)
    costs = measured(session, seconds=30.0)
    assert max(session.widths) == 4
    assert costs.table(0)[4] == pytest.approx(session.verify_seconds(4, 0))


def test_a_head_that_cannot_be_trimmed_is_guessed() -> None:
    session = FakeSession(trims=False)
    costs = measured(session, seconds=30.0)
    assert costs.rows()["head"] == {}
    full = session.draft_step([0] * 8, 0)
    assert costs.draft_seconds(None, 0) == pytest.approx(full, rel=0.02)
    assert costs.knows_cells  # the parts behind it are measured all the same


def test_a_refused_model_gets_a_guess() -> None:
    session = FakeSession(refusal="it keeps recurrent state")
    costs = measured(session)
    assert session.n_passes == 0
    assert not costs.measured
    assert not costs.is_worth_keeping
    assert costs.table(0)[1] == 1.0


def test_one_slow_pass_does_not_spoil_a_measurement() -> None:
    quiet = measured(FakeSession(1e-3), seconds=30.0)
    for slow in range(5, 100, 7):
        costs = measured(FakeSession(1e-3, slow_passes=frozenset({slow})), seconds=30.0)
        for width in (1, 2, 4, 8, 16):
            assert costs.table(0)[width] == pytest.approx(quiet.table(0)[width], rel=0.01)
        assert costs.draft_seconds(None, 0) == pytest.approx(quiet.draft_seconds(None, 0), rel=0.01)


def test_a_noisy_measurement_is_not_worth_keeping() -> None:
    assert measured(FakeSession()).is_worth_keeping
    every_third = frozenset(range(1, 1000, 3))
    assert not measured(FakeSession(slow_passes=every_third)).is_worth_keeping


# ---- JSON ----------------------------------------------------------------------------------------------------------


def test_json_keeps_the_measurement_and_nothing_of_the_moment() -> None:
    costs = measured(FakeSession(), seconds=30.0)
    before = list(costs.table(300))
    draft = costs.draft_seconds(None, 300, 4096)
    for _ in range(50):
        costs.observe_verify(4, 300, 3.0 * before[4], switched=False)
        costs.observe_draft(draft, 2.0 * draft)
    assert costs.table(300)[4] > 2.0 * before[4]
    again = CostModel.from_dict(json.loads(json.dumps(costs.as_dict())), BLOCKS)
    assert again.table(300) == before
    assert again.draft_seconds(None, 300, 4096) == draft
    assert again.switch_seconds == pytest.approx(0.002)
    assert again.knows_cells


def test_a_table_of_other_blocks_is_refused() -> None:
    values = measured(FakeSession()).as_dict()
    with pytest.raises(ValueError, match="blocks"):
        CostModel.from_dict(values, [*BLOCKS[:-1], BLOCKS[0].__class__(7, 3, "ffn", 1, "CPU")])


# ---- what is observed ----------------------------------------------------------------------------------------------


def test_a_guess_is_in_plain_passes_until_a_pass_is_observed() -> None:
    costs = CostModel(None, BLOCKS)
    assert not costs.measured
    assert costs.table(0)[1] == 1.0
    assert costs.draft_seconds(None, 0) == pytest.approx(1.0)
    assert costs.draft_seconds(np.ones(8, np.uint8), 0) < 0.2
    costs.observe_verify(4, 0, 0.026, switched=False)
    assert costs.measured
    assert costs.table(0)[4] == pytest.approx(0.026)
    assert costs.table(0)[1] == pytest.approx(0.02)
    assert costs.draft_seconds(None, 0) == pytest.approx(0.02)


def test_a_guess_learns_each_width_at_its_first_pass() -> None:
    costs = CostModel()
    costs.observe_verify(1, 0, 0.01, switched=False)
    costs.observe_verify(8, 0, 0.04, switched=False)  # upstream's kernels: 1.7 was guessed
    assert costs.table(0)[8] == pytest.approx(0.04)
    assert costs.table(0)[1] == pytest.approx(0.01)
    assert 0.015 < costs.table(0)[4] < 0.03


def test_observing_what_was_predicted_changes_nothing() -> None:
    costs = CostModel(TABLE)
    before = list(costs.table(0))
    follow(costs, [1, 4, 8, 4, 1, 16] * 20, 1.0)
    assert costs.table(0) == pytest.approx(before)


def test_a_slow_machine_is_followed_and_ratios_stay() -> None:
    costs = CostModel(TABLE)
    follow(costs, [4] * 20, 1.0)
    follow(costs, [4] * 12, 2.0)
    table = costs.table(0)
    assert table[4] == pytest.approx(2.0 * VERIFY[4], rel=0.05)
    assert table[1] == pytest.approx(2.0 * VERIFY[1], rel=0.08)
    assert costs.draft_seconds(None, 0) == pytest.approx(2.0 * VERIFY[1], rel=0.08)
    assert costs.switch_seconds == pytest.approx(2.0 * 0.0005, rel=0.08)
    follow(costs, [4] * 12, 1.0)
    assert costs.table(0)[4] == pytest.approx(VERIFY[4], rel=0.05)


def test_a_width_of_its_own_is_learnt_beside_plain_passes() -> None:
    costs = CostModel(TABLE)
    follow(costs, [1, 4, 1, 1] * 60, {4: 1.4})
    assert costs.table(0)[4] == pytest.approx(1.4 * VERIFY[4], rel=0.05)
    assert costs.table(0)[1] == pytest.approx(VERIFY[1], rel=0.03)
    # widths that did not come up take part of it
    assert 1.1 * VERIFY[16] < costs.table(0)[16] < 1.25 * VERIFY[16]
    assert VERIFY[4] < costs.table(0)[3] < 1.4 * VERIFY[4]


def test_wide_passes_that_are_all_dearer_are_known_from_those_that_came_up() -> None:
    costs = CostModel(TABLE)
    follow(costs, [1, 4, 1, 8, 1, 1] * 40, {4: 1.2, 8: 1.2})
    wide = costs.table(0)[16]
    assert wide == pytest.approx(1.1 * VERIFY[16], rel=0.03)
    follow(costs, [16] * 4, {16: 1.2})
    assert wide < costs.table(0)[16] < 1.21 * VERIFY[16]


@pytest.mark.parametrize("factor", [0.1, 10.0, 100.0])
def test_one_outlier_changes_next_to_nothing(factor: float) -> None:
    costs = CostModel(TABLE)
    follow(costs, [1, 4] * 10, 1.0)
    before = list(costs.table(0))
    follow(costs, [4], factor)
    follow(costs, [1, 4], 1.0)
    assert costs.table(0) == pytest.approx(before, rel=0.02)


def test_outliers_now_and_then_do_not_add_up() -> None:
    costs = CostModel(TABLE)
    for _ in range(40):
        follow(costs, [4] * 9, 1.0)
        follow(costs, [4], 10.0)
    assert costs.table(0)[4] == pytest.approx(VERIFY[4], rel=0.05)


def test_a_width_not_seen_for_long_drifts_back() -> None:
    costs = CostModel(TABLE)
    follow(costs, [1, 8] * 80, {8: 1.5})
    learnt = costs.table(0)[8] / costs.table(0)[1]
    assert learnt == pytest.approx(1.5 * VERIFY[8] / VERIFY[1], rel=0.06)
    follow(costs, [1] * 100, 1.0)
    later = costs.table(0)[8] / costs.table(0)[1]
    assert VERIFY[8] / VERIFY[1] * 1.2 < later <= learnt
    follow(costs, [1] * 2000, 1.0)
    assert costs.table(0)[8] / costs.table(0)[1] == pytest.approx(VERIFY[8] / VERIFY[1], rel=0.02)


def test_a_switched_pass_is_no_sign_of_a_slow_machine() -> None:
    costs = CostModel(TABLE)
    before = list(costs.table(0))
    for _ in range(100):
        for width in (1, 4):
            costs.observe_verify(width, 0, VERIFY[width] + 0.0005, switched=True)
    assert costs.table(0) == pytest.approx(before, rel=1e-6)


def test_a_draft_call_corrects_drafts_alone() -> None:
    costs = CostModel(TABLE)
    before = list(costs.table(0))
    for _ in range(100):
        predicted = 3 * costs.draft_seconds(None, 0)
        costs.observe_draft(predicted, 3 * 1.3 * VERIFY[1])
    assert costs.draft_seconds(None, 0) == pytest.approx(1.3 * VERIFY[1], rel=0.02)
    assert costs.table(0) == before


def test_nonsense_is_not_observed() -> None:
    costs = CostModel(TABLE)
    before = list(costs.table(0))
    for width, seconds in ((0, 0.01), (MAX_WIDTH + 1, 0.01), (4, 0.0), (4, -1.0)):
        costs.observe_verify(width, 0, seconds, switched=False)
    costs.observe_draft(0.0, 1.0)
    costs.observe_draft(1.0, 0.0)
    assert costs.table(0) == before


def test_the_table_is_made_once_while_nothing_moves() -> None:
    costs = CostModel(TABLE)
    table = costs.units(64)
    assert costs.units(65) is table
    assert costs.units(128) is not table


def test_units_do_not_move_with_the_machine() -> None:
    costs = CostModel(TABLE)
    before = list(costs.units(0))
    follow(costs, [4] * 40, 1.0)
    follow(costs, [4] * 40, 2.0)
    assert costs.units(0) == pytest.approx(before, rel=0.08)
    assert costs.scale == pytest.approx(2.0, rel=0.08)
    assert costs.table(0)[4] == pytest.approx(costs.units(0)[4] * costs.scale)
