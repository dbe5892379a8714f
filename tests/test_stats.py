"""Statistics: formulae, sums, and the one-line form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from pyssd.stats import SpecStats

counts = st.integers(0, 1000)
stats_values = st.builds(
    SpecStats,
    rounds=counts,
    drafted=counts,
    accepted=counts,
    emitted=counts,
    accepted_per_pos=st.lists(counts, max_size=5),
    accepted_by=st.dictionaries(st.sampled_from(["skip", "ngram"]), counts),
    decode_seconds=st.sampled_from([0.0, 1.0, 2.0]),
    speedup=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    reason=st.sampled_from(["", "plain was faster"]),
    rounds_by=st.dictionaries(st.sampled_from(["plain", "recycle", "ngram"]), counts),
    prediction_error=st.dictionaries(st.sampled_from(["plain", "skip"]), st.sampled_from([0.1])),
    decision=st.sampled_from(["", "copied"]),
)


def test_rates_follow_the_papers() -> None:
    stats = SpecStats(rounds=10, drafted=30, accepted=15, emitted=25, decode_seconds=5.0)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_len == 2.5
    assert stats.tokens_per_second == 5.0


def test_rates_without_drafts() -> None:
    assert SpecStats().acceptance_rate is None
    assert SpecStats().mean_acceptance_len == 1.0
    assert SpecStats().tokens_per_second == 0.0


def test_speedup_of_a_sum_weighs_by_time() -> None:
    fast = SpecStats(decode_seconds=1.0, speedup=2.0)
    slow = SpecStats(decode_seconds=3.0, speedup=1.0)
    assert (fast + slow).speedup == pytest.approx(5 / 4)
    assert (fast + SpecStats()).speedup == 2.0
    assert (fast + SpecStats(decode_seconds=1.0)).speedup is None


def test_sum_keeps_the_latest_words() -> None:
    first, second = SpecStats(reason="a", skip_set="f:1"), SpecStats(reason="b")
    assert (first + second).reason == "b"
    assert (first + second).skip_set == "f:1"


@given(stats_values)
def test_shares_add_up_and_the_largest_comes_first(stats: SpecStats) -> None:
    shares = list(stats.share.values())
    assert sum(shares) == pytest.approx(1.0 if sum(stats.rounds_by.values()) else 0.0)
    assert shares == sorted(shares, reverse=True)


@given(stats_values, stats_values)
def test_sums_add_every_count(first: SpecStats, second: SpecStats) -> None:
    total = first + second
    for name in ("rounds", "drafted", "accepted", "emitted", "decode_seconds"):
        assert getattr(total, name) == getattr(first, name) + getattr(second, name)
    assert sum(total.accepted_per_pos) == sum(first.accepted_per_pos + second.accepted_per_pos)
    assert sum(total.accepted_by.values()) == sum(first.accepted_by.values()) + sum(
        second.accepted_by.values()
    )


@given(stats_values)
def test_dict_is_json_and_a_copy(stats: SpecStats) -> None:
    values = json.loads(json.dumps(stats.as_dict()))
    assert {"acceptance_rate", "mean_acceptance_len", "tokens_per_second"} <= set(values)
    stats.as_dict()["accepted_per_pos"].append(1)
    assert stats.as_dict() == values


@given(stats_values)
def test_repr_is_one_line(stats: SpecStats) -> None:
    stats.reason += "\nmore"
    assert "\n" not in repr(stats)
