"""What commands print: one line of statistics, JSON, sizes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyssd.stats import SpecStats

_PLAIN = "plain decoding: "  # how the reason of a request begins that was never to draft


def write_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Print a piece of the model's text at once; what the terminal cannot show is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def summary(stats: SpecStats) -> str:
    """Say in one line what a request did: speed-up, accepted, share by means, or why speculation was off."""
    speed = f"{stats.emitted} tokens, {stats.tokens_per_second:.1f} tokens/s"
    rate = stats.acceptance_rate
    if rate is None:
        why = " ".join(stats.reason.split())
        if why.startswith(_PLAIN) or not why:
            return f"speculation off: {why.removeprefix(_PLAIN) or 'nothing was drafted'} | {speed}"
        return f"nothing was worth drafting ({why}) | {speed}"
    speedup = "unknown" if stats.speedup is None else f"{stats.speedup:.2f}x (estimated)"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in share_by_means(stats).items())
    return f"speed-up {speedup} | accepted {stats.accepted} of {stats.drafted} drafted ({rate:.0%}) | {shares} | {speed}"


def share_by_means(stats: SpecStats) -> dict[str, float]:
    """Return the share of the emitted tokens that each means contributed; they add up to 1.

    "target" are tokens that no draft had: plain decoding, and the one the target adds to every round.
    """
    if not stats.emitted:
        return {}
    # a request may end inside an accepted draft, whose rest is then counted as accepted but never emitted
    accepted = min(sum(stats.accepted_by.values()), stats.emitted)
    whole = sum(stats.accepted_by.values())
    shares = {
        name: count / whole * accepted / stats.emitted
        for name, count in stats.accepted_by.items()
        if count
    }
    return {**shares, "target": 1.0 - accepted / stats.emitted}


def size(nbytes: int) -> str:
    """Write a number of bytes for people: 1.2 MB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
