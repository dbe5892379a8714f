"""What draft steps, verify passes and plain steps cost, and how well that is predicted.

1. Draft: the time of a draft step under random skip sets against a prediction from the bytes of the kept weights and the
   measured non-weight time (both taken from three reference plans in the same run).
2. Plain: tokens a second of pyssd.Llama(speculative="off") against llama-bench and llama_cpp.Llama (stock libraries of
   `make peers`), alternating.
3. Schema: the share of decode time that drafting under a JSON schema spends on sampling.
4. Memory: bytes that the draft context adds, rows of logits that the target reserves.
5. CostModel: verify passes of many widths and draft steps under many plans at two context lengths, against what the model
   measured at load predicts; seconds of that measurement, and of reading it from the cost cache. Medians of the absolute
   error are what counts. As in a generation, the model observes plain passes right before it predicts.

    python benchmarks/cost.py [--model NAME] [--peers build/peers/bin] [--rounds 5]
    python benchmarks/cost.py --only-costs [--models NAME ...]     replaces part 5 of the results
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
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


def measure_predictions(model: Path, repeats: int) -> dict[str, Any]:
    import pyssd
    from pyssd.cost_cache import cost_settings, load_costs

    with (
        tempfile.TemporaryDirectory() as folder,
        pyssd.Llama(str(model), n_ctx=4096, verbose=False, speculative="off") as llm,
    ):
        os.environ["PYSSD_COSTS"] = folder
        session = llm._session
        assert session is not None
        seconds = []
        for _ in range(4):  # the first one measures
            started = time.perf_counter()
            costs = load_costs(
                session, llm.blocks, model_path=model, n_vocab=llm.n_vocab(), n_ctx=llm.n_ctx(),
                settings=cost_settings(llm, exact=False),
            )  # fmt: skip
            seconds.append(time.perf_counter() - started)
        is_kept = bool(list(Path(folder).iterdir()))
        text = np.asarray(llm.tokenize((PROMPT * 250).encode()), np.int32)
        at = {n: predictions_at(llm, costs, text, n, repeats) for n in (64, 2048)}
        return {
            "first_load_s": round(seconds[0], 3),
            "cached_load_ms": round(1e3 * statistics.median(seconds[1:]), 2) if is_kept else None,
            "noisy": not costs.is_worth_keeping,
            "row": costs.rows(),
            "cells": at,
        }


def predictions_at(llm: Any, costs: Any, text: Any, n_past: int, repeats: int) -> dict[str, Any]:
    """Predicted and measured milliseconds behind n_past cells: name -> [predicted, measured, ratio]."""
    session = llm._session
    session.rewind(0)
    session.prefill(text[:n_past])
    last = session.sample(0)
    n_blocks, n_vocab = len(llm.blocks), llm.n_vocab()
    rng = random.Random(n_past)
    is_ffn = np.asarray([block.kind == "ffn" for block in llm.blocks])
    plans = {"none": (np.zeros(n_blocks, np.uint8), 0)}
    plans["none, head/4"] = (plans["none"][0], n_vocab // 4 // 256 * 256)
    plans["all ffn"] = (is_ffn.astype(np.uint8), 0)
    plans["all attention"] = ((~is_ffn).astype(np.uint8), 0)
    for place in range(1, 9):
        skip = np.asarray([rng.random() < place / 10 for _ in range(n_blocks)], np.uint8)
        plans[f"random {place / 10}"] = (skip, n_vocab // 8 // 256 * 256 if place % 2 else 0)
    widths = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48)
    seen: dict[str, list[tuple[float, float]]] = {}  # predicted, measured

    def observe_plain() -> None:
        for number in range(4):
            started = time.perf_counter()
            session.verify(0, last, text[:0])
            spent = time.perf_counter() - started
            session.rewind(n_past)
            if number:  # the first pass builds its graph
                costs.observe_verify(1, n_past, spent, switched=False)

    for _ in range(repeats):
        for width in widths:
            observe_plain()
            predicted = costs.table(n_past)[width]
            draft = (text[n_past + 1 : n_past + width] + 1) % n_vocab
            for number in range(3):
                started = time.perf_counter()
                session.verify(0, last, draft)
                spent = time.perf_counter() - started
                session.rewind(n_past)
                if number:
                    seen.setdefault(f"V({width})", []).append((predicted, spent))
        for name, (skip, rows) in plans.items():
            session.set_skip(skip, rows)
            session.draft(0, last, 1)
            observe_plain()
            predicted = costs.draft_seconds(skip, n_past, rows)
            steps, started = session.draft_steps, time.perf_counter()
            session.draft(0, last, STEPS)
            spent = time.perf_counter() - started
            seen.setdefault(name, []).append((predicted, spent / (session.draft_steps - steps)))
    ratio = {name: statistics.median(p / m for p, m in pairs) for name, pairs in seen.items()}
    errors = {name: abs(value - 1.0) for name, value in ratio.items()}
    verify = [error for name, error in errors.items() if name.startswith("V(")]
    draft = [error for name, error in errors.items() if not name.startswith("V(")]
    return {
        "median_error_verify": round(statistics.median(verify), 4),
        "worst_error_verify": round(max(verify), 4),
        "median_error_draft": round(statistics.median(draft), 4),
        "worst_error_draft": round(max(draft), 4),
        "predicted_measured_ratio": {
            name: [
                round(1e3 * statistics.median(p for p, _ in pairs), 3),
                round(1e3 * statistics.median(m for _, m in pairs), 3),
                round(ratio[name], 3),
            ]
            for name, pairs in seen.items()
        },
    }


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
    parser.add_argument("--only-costs", action="store_true")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"],
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cost.json"))
    args = parser.parse_args()

    from pyssd.loading import physical_cores
    from pyssd.models import find_model

    model = find_model(args.model)
    threads = physical_cores()
    if args.only_costs:
        result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
        result["costs_command"] = " ".join(["python", *sys.argv])
        for name in args.models:
            found = measure_predictions(find_model(name), args.rounds)
            result.setdefault("costs", {})[name] = found
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(name, json.dumps({**found, "row": None}))
        return
    result = {
        "command": " ".join(["python", *sys.argv]),
        "model": model.name,
        "threads": threads,
        "draft": measure_draft(model, args.rounds, args.sets),
        "schema": measure_schema(model),
        "plain": measure_plain(model, args.peers.resolve(), args.rounds, args.tokens, threads),
        "costs": {name: measure_predictions(find_model(name), args.rounds) for name in args.models},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
