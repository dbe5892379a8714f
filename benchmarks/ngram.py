"""Plain decoding against the default (n-gram and skip drafts): paired runs, plain default plain default.

Each prompt runs in a fresh context, greedily, as a chat. The first prompt of a run is repeated unmeasured, so that the
search for a skip set and the first graphs do not count; they are reported as first_seconds. Usage:

    python benchmarks/ngram.py [--model NAME] [--domain code_edit rag summarization chat] [--prompts 5] [--tokens 96]

Texts are compared; the machine must be quiet, or the spread says that it was not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyssd

DOMAINS = ("code_edit", "rag", "summarization", "chat")
ARMS: dict[str, Any] = {"plain": "off", "default": "auto"}
ORDER = ("plain", "default", "plain", "default")


def read_prompts(folder: Path, domain: str, n: int) -> list[str]:
    """Take the first prompts of a domain."""
    lines = (folder / f"{domain}.dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:n]]


def run(llm: pyssd.Llama, prompt: str, n_tokens: int, arm: str, proposers: list[str]) -> Any:
    """Answer once; returns (text, stats)."""
    llm.reset()
    speculative = ARMS[arm] if arm == "plain" else {"proposers": proposers}
    answer = llm.create_chat_completion(
        [{"role": "user", "content": prompt}],
        max_tokens=n_tokens,
        temperature=0.0,
        speculative=speculative,
    )
    return answer["choices"][0]["message"]["content"], llm.stats


def measure(llm: pyssd.Llama, prompt: str, n_tokens: int, proposers: list[str]) -> dict[str, Any]:
    """One prompt, twice each way in turn."""
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    texts = set()
    for arm in ORDER:
        text, stats = run(llm, prompt, n_tokens, arm, proposers)
        texts.add(text)
        rates[arm].append(stats.tokens_per_second)
    pairs = [fast / slow for slow, fast in zip(rates["plain"], rates["default"], strict=True)]
    # stats are those of the last run, one of the default
    return {
        "tokens": stats.emitted,
        "prompt_tokens": len(llm.tokenize(prompt.encode())),
        **{f"{name}_tokens_per_second": [round(rate, 2) for rate in rates[name]] for name in ARMS},
        "speedup": round(statistics.median(pairs), 3),
        "spread": round(max(rates["plain"]) / min(rates["plain"]) - 1.0, 3),
        "same_text": len(texts) == 1,
        "mean_acceptance_len": round(stats.mean_acceptance_len, 2),
        "acceptance_rate": None
        if stats.acceptance_rate is None
        else round(stats.acceptance_rate, 3),
        "accepted_by": stats.accepted_by,
        "rounds_by": stats.rounds_by,
        "reason": stats.reason,
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a domain."""
    speedups = [row["speedup"] for row in rows]
    return {
        "speedup_median": round(statistics.median(speedups), 3),
        "speedup_lowest": min(speedups),
        "speedup_highest": max(speedups),
        "plain_tokens_per_second": round(
            statistics.median(rate for row in rows for rate in row["plain_tokens_per_second"]), 2
        ),
        "mean_acceptance_len": round(
            statistics.median(row["mean_acceptance_len"] for row in rows), 2
        ),
        "spread_median": round(statistics.median(row["spread"] for row in rows), 3),
        "same_text": all(row["same_text"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--domain", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--proposers", nargs="+", default=["ngram", "skip"])
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ngram.json"))
    args = parser.parse_args()

    from pyssd.models import find_model

    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "model": args.model,
        "tokens": args.tokens,
        "proposers": args.proposers,
        "order": list(ORDER),
        "domains": {},
        "prompts": {},
    }
    with pyssd.Llama(str(find_model(args.model)), n_ctx=args.n_ctx, verbose=False) as llm:
        result["exactness"] = llm.exactness.level
        started = time.perf_counter()
        first = read_prompts(args.data, args.domain[0], 1)[0]
        run(llm, first, 48, "default", args.proposers)
        result["first_seconds"] = round(time.perf_counter() - started, 2)
        result["skip_set"] = llm.stats.skip_set
        for domain in args.domain:
            rows = []
            for prompt in read_prompts(args.data, domain, args.prompts):
                rows.append(measure(llm, prompt, args.tokens, args.proposers))
                row = rows[-1]
                print(
                    f"{domain} {len(rows)}/{args.prompts}: {row['speedup']:.2f}x, mean acceptance length"
                    f" {row['mean_acceptance_len']}, {row['rounds_by']}, same text: {row['same_text']}",
                    file=sys.stderr,
                )
            result["domains"][domain] = summarise(rows)
            result["prompts"][domain] = rows
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["domains"], indent=1))


if __name__ == "__main__":
    main()
