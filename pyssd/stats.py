"""What a request did: counts, seconds and rates, named as in vLLM but without ``num_``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass(slots=True, repr=False)
class SpecStats:
    """Counts and times of one request, or the sum of several.

    Attributes:
        rounds: rounds that drafted and verified.
        drafted: tokens proposed.
        accepted: drafted tokens that the target emitted.
        emitted: tokens handed out, those of plain decoding included.
        accepted_per_pos: accepted tokens at each position of a draft.
        accepted_by: accepted tokens by the arm that drafted them ("ngram", "recycle", "skip", "ngram+skip").
        rounds_by: rounds by what was tried in them, "plain" included; empty drafts count.
        prompt_tokens: tokens of the prompt that were evaluated (reused prefixes are not).
        prefill_seconds: time for those.
        decode_seconds: time for everything after; draft and verify are parts of it.
        draft_seconds: time spent drafting.
        verify_seconds: time spent verifying.
        controller_seconds: time spent choosing, on free drafts and on learning from rounds.
        settled: near-ties that the guard settled.
        graphs_built: graphs that the contexts built.
        skip_set: the skip set in use, as text.
        reason: what was used and why, one sentence.
        decision: what the controller chose and why, in words; a part of the reason.
        prediction_error: median of abs(predicted / measured seconds - 1) over the latest rounds, by arm.
        speedup: estimated time of plain decoding / decode_seconds; None if unknown.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    accepted_by: dict[str, int] = field(default_factory=dict)
    rounds_by: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    controller_seconds: float = 0.0
    settled: int = 0
    graphs_built: int = 0
    skip_set: str = ""
    reason: str = ""
    decision: str = ""
    prediction_error: dict[str, float] = field(default_factory=dict)
    speedup: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_len(self) -> float:
        """1 + accepted / rounds: tokens a round emits, bonus included; 1 without rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """emitted / decode_seconds; 0 before anything was decoded."""
        return self.emitted / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def share(self) -> dict[str, float]:
        """Share of rounds by arm, largest first."""
        n = sum(self.rounds_by.values())
        ranked = sorted(self.rounds_by.items(), key=lambda item: -item[1])
        return {arm: count / n for arm, count in ranked} if n else {}

    def as_dict(self) -> dict[str, Any]:
        """Return fields and rates as one flat dict of JSON values (copies, not views)."""
        result: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        result["accepted_per_pos"] = list(self.accepted_per_pos)
        result["accepted_by"] = dict(self.accepted_by)
        result["rounds_by"] = dict(self.rounds_by)
        result["prediction_error"] = dict(self.prediction_error)
        for name in ("acceptance_rate", "mean_acceptance_len", "tokens_per_second", "share"):
            result[name] = getattr(self, name)
        return result

    def __add__(self, other: SpecStats) -> SpecStats:
        """Sum counts and times; the texts are those of the later request that has some."""
        if not isinstance(other, SpecStats):
            return NotImplemented
        total = SpecStats(
            skip_set=other.skip_set or self.skip_set,
            reason=other.reason or self.reason,
            decision=other.decision or self.decision,
            prediction_error=dict(other.prediction_error or self.prediction_error),
        )
        for name in _SUMMED:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        total.accepted_per_pos = [
            a + b
            for a, b in zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)
        ]
        total.accepted_by = _sum_by_means(self.accepted_by, other.accepted_by)
        total.rounds_by = _sum_by_means(self.rounds_by, other.rounds_by)
        total.speedup = _joint_speedup(self, other)
        return total

    def __repr__(self) -> str:
        rate = self.acceptance_rate
        parts = [
            f"{self.emitted} tokens",
            f"{self.tokens_per_second:.1f} tokens/s",
            f"{self.rounds} rounds",
            f"drafted {self.drafted}",
            f"accepted {self.accepted}" + ("" if rate is None else f" ({rate:.0%})"),
            f"mean acceptance length {self.mean_acceptance_len:.2f}",
        ]
        if self.speedup is not None:
            parts.append(f"speed-up {self.speedup:.2f}x (estimated)")
        if self.reason:
            parts.append(" ".join(self.reason.split()))
        return f"SpecStats({', '.join(parts)})"


_SUMMED = (
    "rounds",
    "drafted",
    "accepted",
    "emitted",
    "prompt_tokens",
    "prefill_seconds",
    "decode_seconds",
    "draft_seconds",
    "verify_seconds",
    "controller_seconds",
    "settled",
    "graphs_built",
)


def _sum_by_means(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    means = dict.fromkeys((*first, *second))
    return {name: first.get(name, 0) + second.get(name, 0) for name in means}


def _joint_speedup(first: SpecStats, second: SpecStats) -> float | None:
    # Times add up, ratios do not: sum the seconds plain decoding would have taken. A request that
    # decoded nothing has no say.
    parts = [stats for stats in (first, second) if stats.decode_seconds > 0]
    plain_seconds = 0.0
    for stats in parts:
        if stats.speedup is None:
            return None
        plain_seconds += stats.speedup * stats.decode_seconds
    return plain_seconds / sum(stats.decode_seconds for stats in parts) if parts else None
