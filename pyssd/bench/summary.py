"""Figures of a benchmark, from the records of its prompts: speed-ups with intervals, acceptance, texts, noise.

The speed-up of a prompt is the ratio of its median rates over the repeats, pyssd to plain; that of a domain is the
geometric mean over its prompts. Rates of a domain are geometric means too, so that their ratio is the speed-up. The
interval is a bootstrap over prompts: it says how far another choice of prompts would move the mean, and a prompt's two
rates stay together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_SPREAD = 0.15  # of the plain runs of a prompt, median over prompts: beyond, nothing is claimed
SLOW = 0.95  # below this x plain in every repeat, a prompt counts as slow
SLOW_TOKENS = 64  # shorter answers are too short to tell
RESAMPLES = 4000

Record = Mapping[str, Any]
Interval = tuple[float, float]


def geometric_mean(values: Sequence[float]) -> float:
    """Return exp of the mean logarithm of positive values."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> Interval | None:
    """Return the percentile bootstrap interval of the geometric mean; None for fewer than two values.

    Args:
        values: one positive figure a prompt.
        seed: of the resampling; the same seed gives the same interval.
        level: chance that the interval is meant to have.
    """
    if len(values) < 2:
        return None
    logs = np.log(np.asarray(values, np.float64))
    picks = np.random.default_rng(seed).integers(0, len(logs), size=(RESAMPLES, len(logs)))
    tail = (1.0 - level) / 2.0
    low, high = np.exp(np.quantile(logs[picks].mean(axis=1), [tail, 1.0 - tail]))
    return float(low), float(high)


def spread(rates: Sequence[float]) -> float:
    """Return max / min - 1 of one prompt's rates."""
    return max(rates) / min(rates) - 1.0


def noise(records: Iterable[Record]) -> float | None:
    """Return the median over prompts of the spread of their plain runs; None where no prompt ran twice."""
    spreads = [
        spread(rates)
        for record in records
        if len(rates := record["plain"]["tokens_per_second"]) > 1
    ]
    return statistics.median(spreads) if spreads else None


def is_noisy(records: Iterable[Record]) -> bool:
    """Tell whether the plain runs differ too much among themselves to claim a speed-up."""
    measured = noise(records)
    return measured is None or measured > MAX_SPREAD


def speedup(record: Record) -> float | None:
    """Return one prompt's pyssd rate / plain rate; None where an answer was too short for a rate."""
    return ratio(
        record["pyssd"]["tokens_per_second"], record["plain"]["tokens_per_second"]
    )  # fmt: skip


def ratio(rates: Sequence[float], others: Sequence[float]) -> float | None:
    """Return the ratio of two medians; None if there is no rate on one side."""
    if not rates or not others:
        return None
    return statistics.median(rates) / statistics.median(others)


def is_slow(record: Record) -> bool:
    """Tell whether pyssd was slower than plain in every pair of an answer that is long enough to tell."""
    pairs = list(
        zip(record["plain"]["tokens_per_second"], record["pyssd"]["tokens_per_second"], strict=True)
    )
    return (
        bool(pairs)
        and record["tokens"] >= SLOW_TOKENS
        and all(fast < SLOW * slow for slow, fast in pairs)
    )


def by_domain(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by domain, in the order of their first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["domain"], []).append(record)
    return groups


def summarise(records: Sequence[Record], *, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one domain, JSON values only.

    Prompts whose answer had fewer than two tokens have no rate; they count in "too_short" and "fork_rate" only.
    """
    speedups = {record["id"]: value for record in records if (value := speedup(record)) is not None}
    timed = [record for record in records if record["id"] in speedups]
    forks = [record for record in records if not record["same_text"]]
    summary: dict[str, Any] = {
        "prompts": len(records),
        "too_short": len(records) - len(timed),
        "tokens": sum(record["tokens"] for record in records),
        "same_text": len(records) - len(forks),
        "fork_rate": round(len(forks) / len(records), 4),
        "spread": _rounded(noise(timed)),
        **_counts(records),
        "share": _share(records),
        "prediction_error": _errors(records),
    }
    if not timed:
        return {**summary, "long_enough": 0}
    values = list(speedups.values())
    worst = min(speedups, key=speedups.__getitem__)
    for arm in ("plain", "pyssd"):
        summary[f"{arm}_tokens_per_second"] = _rounded(
            geometric_mean([statistics.median(r[arm]["tokens_per_second"]) for r in timed])
        )
    return {
        **summary,
        "seconds_per_token": _rounded(1.0 / summary["pyssd_tokens_per_second"]),
        "speedup": _rounded(geometric_mean(values)),
        "interval": _interval(values, seed),
        "wall_speedup": _rounded(_wall(timed)),
        "first_token_ratio": _rounded(_first_token(timed)),
        "worst": {"id": worst, "speedup": _rounded(speedups[worst])},
        "long_enough": sum(record["tokens"] >= SLOW_TOKENS for record in timed),
        "slow_prompts": [record["id"] for record in timed if is_slow(record)],
        "peers": _peers(timed, seed),
        **_predicted(timed),
    }


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    totals = {
        name: sum(record["pyssd"]["stats"].get(name) or 0 for record in records)
        for name in ("rounds", "drafted", "accepted", "decode_seconds", "controller_seconds")
    }
    rounds, drafted, seconds = totals["rounds"], totals["drafted"], totals["decode_seconds"]
    known = any("controller_seconds" in record["pyssd"]["stats"] for record in records)
    return {
        "acceptance_rate": _rounded(totals["accepted"] / drafted if drafted else None),
        "mean_acceptance_len": _rounded(1.0 + totals["accepted"] / rounds if rounds else 1.0),
        "controller_share": _rounded(
            totals["controller_seconds"] / seconds if known and seconds > 0 else None
        ),
    }


def _share(records: Sequence[Record]) -> dict[str, float]:
    """Share of all rounds by what was tried in them."""
    counts: dict[str, int] = {}
    for record in records:
        for name, count in record["pyssd"]["stats"].get("rounds_by", {}).items():
            counts[name] = counts.get(name, 0) + count
    total = sum(counts.values())
    return {name: round(count / total, 4) for name, count in counts.items() if count}


def _errors(records: Sequence[Record]) -> dict[str, float]:
    """Median over prompts of |predicted / measured - 1| of a round's time, by arm."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in (record["pyssd"]["stats"].get("prediction_error") or {}).items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def _wall(timed: Sequence[Record]) -> float:
    """Plain / pyssd in seconds from the call to the last token, prompt included."""
    return geometric_mean(
        [
            statistics.median(r["plain"]["wall_seconds"])
            / statistics.median(r["pyssd"]["wall_seconds"])
            for r in timed
        ]
    )


def _first_token(timed: Sequence[Record]) -> float | None:
    """Pyssd / plain in seconds to the first text."""
    known = [
        (statistics.median(fast), statistics.median(slow))
        for r in timed
        if (fast := r["pyssd"]["first_token_seconds"])
        and (slow := r["plain"]["first_token_seconds"])
    ]
    return geometric_mean([fast / slow for fast, slow in known]) if known else None


def _predicted(timed: Sequence[Record]) -> dict[str, float | None]:
    """Speed-up that the cost model promised for forced acceptance, and the measured one / it; empty without forcing."""
    pairs = [
        (value, statistics.median(predicted))
        for record in timed
        if (predicted := record.get("synthetic", {}).get("predicted_speedup"))
        and (value := speedup(record)) is not None
    ]
    if not pairs:
        return {}
    return {
        "predicted_speedup": _rounded(geometric_mean([promised for _, promised in pairs])),
        "measured_to_predicted": _rounded(geometric_mean([a / b for a, b in pairs])),
    }


def _peers(timed: Sequence[Record], seed: int) -> dict[str, Any]:
    """Rate of each peer, and pyssd's rate / its rate with an interval."""
    names = dict.fromkeys(name for record in timed for name in record.get("peers", {}))
    result: dict[str, Any] = {}
    for name in names:
        runs = [(r, r["peers"][name]) for r in timed if name in r.get("peers", {})]
        errors = [run["error"] for _, run in runs if run.get("error")]
        pairs = [(r, run) for r, run in runs if run.get("tokens_per_second")]
        entry: dict[str, Any] = {"prompts": len(pairs), "failed": len(errors)}
        if errors:
            entry["error"] = errors[0]
        if pairs:
            rates = [statistics.median(run["tokens_per_second"]) for _, run in pairs]
            ratios = [
                statistics.median(r["pyssd"]["tokens_per_second"]) / rate
                for (r, _), rate in zip(pairs, rates, strict=True)
            ]
            entry |= {
                "tokens_per_second": _rounded(geometric_mean(rates)),
                "pyssd_ratio": _rounded(geometric_mean(ratios)),
                "interval": _interval(ratios, seed),
            }
        result[name] = entry
    return result


def _interval(values: Sequence[float], seed: int) -> list[float] | None:
    found = bootstrap_interval(values, seed=seed)
    return None if found is None else [round(found[0], 4), round(found[1], 4)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
