"""What a draft step and a plain step cost, measured in one paired run.

1. Draft: the time of a draft step under random skip sets against a prediction from the bytes of the kept weights and the
   measured non-weight time (both taken from three reference plans in the same run).
2. Plain: tokens a second of pyssd.Llama(speculative="off") against llama-bench and llama_cpp.Llama (stock libraries of
   `make peers`), alternating.
3. Schema: the share of decode time that drafting under a JSON schema spends on sampling.
4. Memory: bytes that the draft context adds, rows of logits that the target reserves.

    python benchmarks/cost.py [--model NAME] [--peers build/peers/bin] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = "Write a Python function that parses a CSV file and returns a list of dictionaries."
STEPS = 12

# run in a process of its own: the stock library cannot share one with ours
PLAIN = """
import json, sys, time
kind, model, n, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if kind == "pyssd":
    import pyssd
    llm = pyssd.Llama(model, n_ctx=512, verbose=False, speculative="off")
else:
    import llama_cpp
    options = {} if kind == "llama_cpp_default" else dict(n_threads=threads, n_threads_batch=threads, flash_attn=True)
    llm = llama_cpp.Llama(model, n_ctx=512, verbose=False, **options)
tokens = llm.tokenize(sys.argv[5].encode())
stream = llm.generate(tokens, temp=0.0)
next(stream)
for _ in range(3):
    next(stream)
started = time.perf_counter()
for _ in range(n):
    next(stream)
print(json.dumps(n / (time.perf_counter() - started)))
"""


def time_draft(session: Any, last: int, repeats: int) -> float:
    """Seconds of one draft step: the fastest of several calls of STEPS steps."""
    best = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens, _ = session.draft(0, last, STEPS)
        best.append((time.perf_counter() - started) / len(tokens))
    return statistics.median(best)


def measure_draft(model: Path, repeats: int, n_sets: int) -> dict[str, Any]:
    import pyssd

    with pyssd.Llama(str(model), n_ctx=512, verbose=False, speculative="off") as llm:
        session = llm._session
        assert session is not None
        prompt = np.asarray(llm.tokenize(PROMPT.encode()), np.int32)
        session.prefill(prompt)
        last = session.sample(0)
        blocks = llm.blocks
        is_ffn = np.asarray([block.kind == "ffn" for block in blocks])
        nbytes = np.asarray([block.nbytes for block in blocks], float)
        rng = random.Random(0)
        plans = {
            "none": np.zeros(len(blocks), np.uint8),
            "all ffn": np.where(is_ffn, 1, 0).astype(np.uint8),
            "all attention": np.where(is_ffn, 0, 1).astype(np.uint8),
        }
        for number in range(n_sets):
            share = (number + 1) / (n_sets + 1)
            plans[f"random {share:.2f}"] = np.asarray(
                [rng.random() < share for _ in blocks], np.uint8
            )
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(repeats):
            for name, skip in plans.items():
                session.set_skip(skip)
                time_draft(session, last, 1)  # builds the graph
                seconds[name].append(time_draft(session, last, 3))
        median = {name: statistics.median(values) for name, values in seconds.items()}
        # seconds per byte of FFN weights; what attention costs beyond its bytes; head, norms and the call itself. (Not from
        # a plan without any block: with nothing else to read, a part of the head stays in the last-level cache.)
        per_byte = (median["none"] - median["all ffn"]) / nbytes[is_ffn].sum()
        attention = (median["none"] - median["all attention"]) - per_byte * nbytes[~is_ffn].sum()
        fixed = median["all ffn"] + median["all attention"] - median["none"]
        rows = []
        for name, skip in plans.items():
            kept = skip == 0
            n_attention = (kept & ~is_ffn).sum() / (~is_ffn).sum()
            predicted = fixed + per_byte * nbytes[kept].sum() + attention * n_attention
            rows.append(
                {
                    "plan": name,
                    "kept_bytes_share": round(float(nbytes[kept].sum() / nbytes.sum()), 3),
                    "ms": round(1e3 * median[name], 3),
                    "predicted_ms": round(1e3 * predicted, 3),
                    "ratio": round(median[name] / predicted, 4),
                }
            )
        sizes = session.context_nbytes()
        return {
            "steps": rows,
            "worst_deviation": round(max(abs(row["ratio"] - 1) for row in rows), 4),
            "weight_GBps": round(1e-9 / per_byte, 2),
            "draft_context_MB": round(sizes["draft"] / 1e6, 2),
            "target_context_MB": round(sizes["target"] / 1e6, 2),
        }


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "year", "tags"],
}


def measure_schema(model: Path) -> dict[str, Any]:
    import pyssd

    with pyssd.Llama(
        str(model), n_ctx=1024, verbose=False, skip_set="f:1,3,6,9,12,13,15,27"
    ) as llm:
        session = llm._session
        assert session is not None
        before = session.counters()
        decode = drafted = 0.0
        for book in ("Moby Dick", "Dune", "The Hobbit", "Emma"):
            llm.create_chat_completion(
                [{"role": "user", "content": f"Describe the book {book} as JSON."}],
                response_format={"type": "json_object", "schema": SCHEMA},
                temperature=0.7,
                seed=1,
                max_tokens=96,
                speculative={"max_draft_len": 3, "min_confidence": 0.0, "always": True},
            )
            decode += llm.stats.decode_seconds
            drafted += llm.stats.drafted
        sampling = session.counters()["draft_sampling_seconds"] - before["draft_sampling_seconds"]
        return {"drafted": drafted, "draft_sampling_share": round(sampling / decode, 4)}


def run_plain(kind: str, model: Path, n: int, threads: int, peers: Path) -> float:
    if kind == "llama-bench":
        command = [
            str(peers / "llama-bench"), "-m", str(model), "-p", "0", "-n", str(n), "-t", str(threads),
            "-fa", "1", "-r", "1", "-o", "json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)[0]["avg_ts"])
    env = dict(os.environ)
    if kind != "pyssd":
        env["LLAMA_CPP_LIB_PATH"] = str(peers)
    command = [sys.executable, "-c", PLAIN, kind, str(model), str(n), str(threads), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure_plain(model: Path, peers: Path, rounds: int, n: int, threads: int) -> dict[str, Any]:
    kinds = ["pyssd", "llama-bench", "llama_cpp_equal", "llama_cpp_default"]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            rates[kind].append(run_plain(kind, model, n, threads, peers))
    pairs = {
        kind: [a / b for a, b in zip(rates["pyssd"], rates[kind], strict=True)]
        for kind in kinds[1:]
    }
    return {
        "tokens_per_second": {
            kind: [round(rate, 2) for rate in values] for kind, values in rates.items()
        },
        "pyssd_over": {
            kind: {
                "median": round(statistics.median(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
            }
            for kind, values in pairs.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--peers", type=Path, default=Path("build/peers/bin"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--sets", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cost.json"))
    args = parser.parse_args()

    from pyssd.loading import physical_cores
    from pyssd.models import find_model

    model = find_model(args.model)
    threads = physical_cores()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "model": model.name,
        "threads": threads,
        "draft": measure_draft(model, args.rounds, args.sets),
        "schema": measure_schema(model),
        "plain": measure_plain(model, args.peers.resolve(), args.rounds, args.tokens, threads),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
