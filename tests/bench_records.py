"""Made-up records of prompts, for the tests of pyssd bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def row(
    name: str,
    plain: Sequence[float],
    fast: Sequence[float],
    *,
    domain: str = "code",
    tokens: int = 96,
    same: bool = True,
    stats: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A record as runner.measure makes it."""

    def arm(rates: Sequence[float]) -> dict[str, Any]:
        return {
            "tokens_per_second": list(rates),
            "wall_seconds": [100.0 / rate for rate in rates],
            "first_token_seconds": [0.1 for _ in rates],
        }

    counts = {"rounds": 10, "drafted": 40, "accepted": 20, "decode_seconds": 2.0}
    return {
        "domain": domain,
        "id": name,
        "prompt_tokens": 12,
        "tokens": tokens,
        "same_text": same,
        "fork": None if same else 7,
        "plain": arm(plain),
        "pyssd": {**arm(fast), "stats": counts if stats is None else stats},
        **more,
    }


SETTINGS: dict[str, Any] = {
    "model": {"name": "small.gguf"},
    "tokens": 96,
    "temperature": 0.0,
    "seed": 1,
    "repeats": 2,
    "n_threads": 2,
    "exactness": 2,
    "synthetic_acceptance": None,
}
