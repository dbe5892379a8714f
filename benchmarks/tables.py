"""Show results of pyssd bench as Markdown, and the cells that break a promise.

    python benchmarks/tables.py [FILE...]     (default: benchmarks/results/bench-*.json)

A cell is a domain of one file. Promises: no interval lies below 0.98 x plain, no prompt of 64 tokens stays below 0.95 in
all its pairs, forced drafts reach 0.97 of the predicted speed-up, rounds take within 10% of what was predicted, pyssd is not
slower than llama.cpp's own n-grams where texts are copied, and 1.1 x llama-cpp-python's prompt lookup everywhere. Exit
status: 1 if one is broken. Noisy files are listed, not judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEVER_SLOWER = 0.98
PREDICTED = 0.97
PREDICTION_ERROR = 0.10
COPYING = ("code_edit", "rag", "summarization")
NGRAMS = {"ngram-simple": 1.0, "ngram-mod": 1.0}
LOOKUPS = {"prompt-lookup": 1.1, "prompt-lookup-2": 1.1}


def rows(name: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row a domain."""
    for domain, figures in result["domains"].items():
        if "speedup" not in figures:
            continue
        low, high = figures["interval"] or (None, None)
        share = ", ".join(f"{arm} {part:.0%}" for arm, part in figures["share"].items())
        yield [
            name,
            domain,
            str(figures["prompts"]),
            f"{figures['plain_tokens_per_second']:.1f}",
            f"{figures['pyssd_tokens_per_second']:.1f}",
            f"{figures['speedup']:.2f}" + ("" if low is None else f" ({low:.2f}-{high:.2f})"),
            f"{figures['mean_acceptance_len']:.2f}",
            share,
            "" if figures["controller_share"] is None else f"{figures['controller_share']:.1%}",
            f"{figures['worst']['speedup']:.2f}",
            f"{figures['same_text']}/{figures['prompts']}",
        ]


def peer_rows(name: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """Yield pyssd's rate / that of each peer, a row a domain."""
    peers = result["settings"]["peers"]
    for domain, figures in result["domains"].items():
        entries = [figures.get("peers", {}).get(peer, {}) for peer in peers]
        cells = [
            f"{e['tokens_per_second']:.1f} ({e['pyssd_ratio']:.2f}x)" if "pyssd_ratio" in e else "-"
            for e in entries
        ]
        yield [name, domain, f"{figures.get('pyssd_tokens_per_second', 0.0):.1f}", *cells]


def broken(name: str, result: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each broken promise."""
    for domain, figures in result["domains"].items():
        where = f"{name}, {domain}"
        interval = figures.get("interval")
        if interval is not None and interval[1] < NEVER_SLOWER:
            yield f"{where}: the interval ends at {interval[1]:.3f}"
        for prompt in figures.get("slow_prompts", []):
            yield f"{where}: {prompt} is below 0.95 in all its pairs"
        reached = figures.get("measured_to_predicted")
        if reached is not None and reached < PREDICTED:
            yield f"{where}: {reached:.3f} of the predicted speed-up"
        wanted = {**LOOKUPS, **(NGRAMS if domain in COPYING else {})}
        for peer, entry in figures.get("peers", {}).items():
            if entry.get("pyssd_ratio", 1e9) < wanted.get(peer, 0.0):
                yield f"{where}: {entry['pyssd_ratio']:.2f} x {peer}"
        for arm, error in figures["prediction_error"].items():
            if error > PREDICTION_ERROR:
                yield f"{where}: {arm} rounds are predicted with an error of {error:.0%}"


def markdown(header: list[str], lines: list[list[str]]) -> None:
    """Print a table, if it has rows."""
    if lines:
        print("| " + " | ".join(header) + " |")
        print("|" + "---|" * len(header))
        for line in lines:
            print("| " + " | ".join(line) + " |")
        print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    files = args.files or sorted(Path("benchmarks/results").glob("bench-*.json"))
    results = {
        path.stem.removeprefix("bench-"): json.loads(path.read_text(encoding="utf-8"))
        for path in files
    }
    header = ["file", "domain", "prompts", "plain", "pyssd", "speed-up (95%)", "length", "rounds"]
    header += ["controller", "worst", "same text"]
    quiet = {name: result for name, result in results.items() if not result["noisy"]}
    markdown(header, [row for name, result in quiet.items() for row in rows(name, result)])
    for name, result in quiet.items():
        if result["settings"]["peers"]:
            peers = ["file", "domain", "pyssd", *result["settings"]["peers"]]
            markdown(peers, list(peer_rows(name, result)))
    for name in results.keys() - quiet.keys():
        print(f"{name}: too noisy to tell")
    found = [sentence for name, result in quiet.items() for sentence in broken(name, result)]
    for sentence in found:
        print(sentence)
    print(f"{len(found)} promises broken in {len(quiet)} files")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
