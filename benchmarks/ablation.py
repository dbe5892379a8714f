"""What each means of drafting adds: copies, recycled drafts, both, both with a skip set, and the skip set alone.

Every arm answers a prompt after plain decoding has, in turn, `--repeats` times over, in one process. By default no skip set
is looked for where the measured costs say that none can pay; here one is (`selector="greedy"`), once, outside of the times.
The controller decides round by round in all arms, plain decoding included, but "skip, always" drafts in every round.

    python benchmarks/ablation.py [--models NAME ...] [--domains NAME ...] [--limit 2] [--repeats 2] [--out FILE]

Results are added to those in the file; a model that it holds is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from pyssd import Llama
from pyssd.bench import machine
from pyssd.bench.prompts import Prompt, choose
from pyssd.bench.runner import Run, Sampling, first_difference, run_once, warm_up
from pyssd.bench.summary import bootstrap_interval, geometric_mean
from pyssd.models import find_model

ARMS: dict[str, Any] = {
    "plain": "off",
    "ngram": {"proposers": ("ngram",)},
    "recycle": {"proposers": ("recycle",)},
    "ngram, recycle": {"proposers": ("ngram", "recycle")},
    "ngram, recycle, skip": {"selector": "greedy"},
    "skip": {"proposers": ("skip",), "selector": "greedy"},
    "skip, always": {"proposers": ("skip",), "selector": "greedy", "always": True},
}
DOMAINS = ("chat", "code", "code_edit", "gsm8k", "summarization", "text_to_sql", "storytelling")
ADDED = (
    "ngram, recycle, skip",
    "ngram, recycle",
)  # what skip adds to free drafts: the first / the second


def measure(llm: Llama, prompt: Prompt, sampling: Sampling, repeats: int) -> dict[str, Any]:
    """Run all arms of one prompt in turn."""
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    for _ in range(repeats):
        for name, speculative in ARMS.items():
            llm.forget_drafts()
            runs[name].append(run_once(llm, prompt.text, sampling, speculative))
    plain = runs["plain"][0]
    return {
        "domain": prompt.domain,
        "id": prompt.id,
        "tokens": plain.stats["emitted"],
        "same_text": all(first_difference(plain, run) is None for all_ in runs.values() for run in all_),
        "rates": {name: [run.tokens_per_second for run in all_] for name, all_ in runs.items()},
        "acceptance_rate": {name: all_[-1].stats["acceptance_rate"] for name, all_ in runs.items()},
        "mean_acceptance_len": {name: all_[-1].stats["mean_acceptance_len"] for name, all_ in runs.items()},
        "share": {name: all_[-1].stats["share"] for name, all_ in runs.items()},
        "skip_set": runs["skip"][-1].stats["skip_set"],
    }  # fmt: skip


def figures(ratios: list[float]) -> dict[str, Any]:
    """Geometric mean and its bootstrap interval over prompts."""
    interval = bootstrap_interval(ratios)
    return {
        "mean": round(geometric_mean(ratios), 4),
        "interval": None if interval is None else [round(end, 4) for end in interval],
        "lowest": round(min(ratios), 4),
    }


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-up of each arm over plain, by domain and over all prompts, and what skip adds to free drafts."""
    timed = [r for r in records if all(rate for rates in r["rates"].values() for rate in rates)]
    summary: dict[str, Any] = {}
    for domain in [*dict.fromkeys(r["domain"] for r in timed), "all"]:
        chosen = [r for r in timed if domain in ("all", r["domain"])]
        rates = [{a: statistics.median(r["rates"][a]) for a in ARMS} for r in chosen]
        summary[domain] = {
            "prompts": len(chosen),
            "speedup": {a: figures([r[a] / r["plain"] for r in rates]) for a in ARMS if a != "plain"},
            "skip_adds": figures([r[ADDED[0]] / r[ADDED[1]] for r in rates]),
        }  # fmt: skip
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--domains", nargs="*", default=list(DOMAINS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablation.json"))
    args = parser.parse_args()
    results: dict[str, Any] = {"processor": machine.processor(), "models": {}}
    if args.out.is_file():
        results = json.loads(args.out.read_text(encoding="utf-8"))
    files = [args.data / f"{domain}.dev.jsonl" for domain in args.domains]
    prompts = choose(files, domains=None, limit=args.limit)
    sampling = Sampling(args.tokens, 0.0, 1)
    for model in args.models:
        if model in results["models"]:
            continue
        records = []
        with Llama(str(find_model(model)), n_ctx=4096, verbose=False) as llm:
            warm_up(llm, prompts[0].text, sampling)
            run_once(llm, prompts[0].text, sampling, ARMS["skip, always"])  # looks for the set
            for prompt in prompts:
                records.append(measure(llm, prompt, sampling, args.repeats))
                print(model, prompt.domain, prompt.id, records[-1]["rates"], flush=True)
        results["models"][model] = {
            "settings": {"limit": args.limit, "tokens": args.tokens, "repeats": args.repeats},
            "same_text": sum(r["same_text"] for r in records),
            "summary": summarise(records),
            "records": records,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(results["models"][model]["summary"]["all"], indent=1))


if __name__ == "__main__":
    main()
