"""Figures and sentences of pyssd bench, on made-up records; test_bench_run.py runs it on models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from bench_records import SETTINGS, row

from pyssd.bench import report, summary
from pyssd.bench.results import Results


def report_of(records: list[dict[str, Any]], **settings: Any) -> str:
    results = Results(None, {**SETTINGS, **settings}, {})
    results.records = records
    return "\n".join(report.lines(results.as_dict()))


# figures -------------------------------------------------------------------------------------------------------------


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert summary.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert summary.geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)


def test_interval_agrees_with_the_normal_one_and_repeats_itself() -> None:
    rng = np.random.default_rng(3)
    values = np.exp(rng.normal(0.3, 0.2, 200)).tolist()
    low, high = summary.bootstrap_interval(values, seed=5) or (0.0, 0.0)
    # of a mean of 200 logarithms with this deviation
    half = 1.96 * np.std(np.log(values)) / math.sqrt(200)
    middle = float(np.mean(np.log(values)))
    assert math.log(low) == pytest.approx(middle - half, abs=0.003)
    assert math.log(high) == pytest.approx(middle + half, abs=0.003)
    assert summary.bootstrap_interval(values, seed=5) == (low, high)
    assert summary.bootstrap_interval(values, seed=6) != (low, high)


def test_interval_of_two_prompts_spans_them_and_of_one_is_unknown() -> None:
    assert summary.bootstrap_interval([1.0, 2.0]) == pytest.approx((1.0, 2.0))
    assert summary.bootstrap_interval([1.5]) is None


def test_speedup_of_a_domain_is_the_geometric_mean_of_ratios_of_medians() -> None:
    # the outlier of the second plain run moves no median
    rows = [row("a", [10, 10, 99], [20, 20, 20]), row("b", [40, 40, 40], [20, 20, 20])]
    figures = summary.summarise(rows)
    assert figures["speedup"] == pytest.approx(1.0)
    assert figures["plain_tokens_per_second"] == pytest.approx(20.0)
    assert figures["pyssd_tokens_per_second"] == pytest.approx(20.0)
    assert figures["seconds_per_token"] == pytest.approx(0.05)
    assert figures["interval"] == pytest.approx([0.5, 2.0])
    assert figures["worst"] == {"id": "b", "speedup": 0.5}
    assert figures["wall_speedup"] == pytest.approx(1.0)


def test_counts_are_summed_before_they_are_divided() -> None:
    few = {"rounds": 1, "drafted": 1, "accepted": 1, "decode_seconds": 1.0}
    many = {"rounds": 9, "drafted": 39, "accepted": 9, "decode_seconds": 3.0}
    few["controller_seconds"], many["controller_seconds"] = 0.0, 0.1
    rounds = [{"plain": 3, "ngram": 1}, {"ngram": 9, "recycle": 3}]
    rows = [
        row(str(n), [10, 10], [10, 10], stats={**stats, "rounds_by": by})
        for n, (stats, by) in enumerate(zip((few, many), rounds, strict=True))
    ]
    figures = summary.summarise(rows)
    assert figures["acceptance_rate"] == pytest.approx(10 / 40)
    assert figures["mean_acceptance_len"] == pytest.approx(2.0)
    assert figures["controller_share"] == pytest.approx(0.025)
    assert figures["share"] == {"plain": 0.1875, "ngram": 0.625, "recycle": 0.1875}


def test_slow_prompt_is_long_and_slow_in_every_pair() -> None:
    assert summary.is_slow(row("a", [10, 10], [9, 9.4]))
    assert not summary.is_slow(row("a", [10, 10], [9, 9.6]))
    assert not summary.is_slow(row("a", [10, 10], [9, 9], tokens=63))
    # pairs count, not medians: the machine as a whole was slower in the second
    assert not summary.is_slow(row("a", [10, 5], [9.9, 4.9]))


@pytest.mark.parametrize(("rates", "noisy"), [([10.0, 11.4], False), ([10.0, 11.6], True)])
def test_noise_is_the_median_over_prompts_of_the_spread_of_plain_runs(
    rates: list[float], noisy: bool
) -> None:
    # pyssd's own spread does not count, nor does one bad prompt
    rows = [row("a", [10, 10], [9, 20]), row("b", rates, [9, 9]), row("c", [10, 30], [9, 9])]
    assert summary.noise(rows) == pytest.approx(rates[1] / 10 - 1)
    assert summary.is_noisy(rows) is noisy


def test_answers_of_one_token_have_no_speedup_but_count_as_texts() -> None:
    rows = [row("a", [10, 10], [20, 20]), row("b", [], [], tokens=1, same=False)]
    figures = summary.summarise(rows)
    assert figures["too_short"] == 1
    assert figures["speedup"] == pytest.approx(2.0)
    assert figures["fork_rate"] == 0.5
    assert "speedup" not in summary.summarise(rows[1:])
    assert "nothing is claimed" in report_of(rows[1:])


def test_peers_are_compared_prompt_by_prompt() -> None:
    def peer(rates: list[float], **more: Any) -> dict[str, Any]:
        return {"draft": {"tokens_per_second": rates, "tokens": 96, "same_prompt": True, **more}}

    rows = [
        row("a", [10, 10], [20, 20], peers=peer([10, 12, 11])),
        row("b", [10, 10], [30, 30], peers=peer([], error="exit status 1: no memory")),
    ]
    entry = summary.summarise(rows)["peers"]["draft"]
    assert entry["tokens_per_second"] == pytest.approx(11.0)
    assert entry["pyssd_ratio"] == pytest.approx(20 / 11, rel=1e-3)
    assert (entry["prompts"], entry["failed"]) == (1, 1)
    text = report_of(rows)
    assert "11.0 (1.82x)" in text
    assert "draft failed on 1 prompts of code: exit status 1: no memory" in text


# text ----------------------------------------------------------------------------------------------------------------


def test_report_says_speedup_interval_and_worst_prompt() -> None:
    rows = [row("a", [10, 10], [20, 20]), row("b", [10, 10.1], [11, 11], same=False)]
    text = report_of([*rows, row("c", [8, 8], [8, 8], domain="chat")])
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    table = [line.split() for line in text.splitlines() if line.startswith("code ")]
    assert table[0][:4] == ["code", "2", "10.0", "14.8"]
    assert table[0][5:] == ["1.480", "1.095", "to", "2.000", "1.095", "b"]
    assert table[1][1:3] == ["50%", "3.00"]
    assert lines["small.gguf:"][1:3] == ["96", "tokens,"]
    assert "chat" in lines
    assert "1 of 3 texts fork from plain decoding's (fork rate 33.3%)." in text
    assert "No prompt of 64 tokens or more stayed below 0.95 x plain." in text


def test_report_of_a_noisy_machine_claims_no_speedup() -> None:
    rows = [row("a", [10, 12], [5, 5]), row("b", [10, 12], [30, 30])]
    text = report_of(rows)
    assert "too noisy to claim a speed-up: plain runs of one prompt differ by 20%" in text
    for claim in ("speed-up  ", "interval", "worst", "Below", "stayed below"):
        assert claim not in text
    assert "Every text equals plain decoding's." in text  # texts do not depend on noise
    results = Results(None, SETTINGS, {})
    results.records = rows
    assert results.as_dict()["noisy"] is True


def test_report_names_slow_prompts() -> None:
    text = report_of([row("a", [10, 10], [9, 9]), row("b", [10, 10], [12, 12])])
    assert "Below 0.95 x plain in every pair: code a." in text
    short = report_of([row("a", [10, 10], [9, 9], tokens=20)])
    assert "No answer has the 64 tokens" in short


def test_report_of_forced_drafts_compares_with_the_prediction() -> None:
    rows = [
        row("a", [10, 10], [19, 19], synthetic={"predicted_speedup": [2.0, 2.0]}),
        row("b", [10, 10], [29, 29], synthetic={"predicted_speedup": [2.9, 3.1]}),
    ]
    figures = summary.summarise(rows)
    assert figures["predicted_speedup"] == pytest.approx(math.sqrt(6.0), rel=1e-3)
    assert figures["measured_to_predicted"] == pytest.approx(
        math.sqrt(0.95 * 2.9 / 3.0), rel=1e-3
    )  # fmt: skip
    text = report_of(rows, synthetic_acceptance=0.8)
    assert "each token spoilt with chance 0.2" in text
    assert "measured / predicted" in text


def test_table_is_aligned() -> None:
    lines = report.table(["a", "number"], [["long name", "1"], ["b", "22"]])
    assert lines == ["a          number", "long name       1", "b              22"]
