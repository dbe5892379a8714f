"""What a trimmed LM head costs and saves: R = 1/2, 1/4, 1/8 of the vocabulary's first rows.

1. Lost: the share of the tokens of plain greedy decoding whose id is R or more, by domain. A draft never proposes them, so
   that is by how much its agreement with the target falls at least.
2. Saved: milliseconds of a draft step (the pass and the choice of a token) against those with the whole head, plans in turn.

    python benchmarks/head_trim.py [--model smollm2-135m ...] [--data ../shared/data] [--prompts 5] [--tokens 96]

Prompts are read where they lie. Results of models that are not measured again are kept.
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

import numpy as np

import pyssd
from pyssd.config import HEAD_ROWS_STEP

MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
DOMAINS = (
    "chat", "code", "code_edit", "gsm8k", "summarization", "text_to_sql", "storytelling", "translation",
)  # fmt: skip
SHARES = {"1/2": 1 / 2, "1/4": 1 / 4, "1/8": 1 / 8}
PROMPT = "Write a Python function that parses a CSV file and returns a list of dictionaries."
STEPS = 8


def rows_of(share: float, n_vocab: int) -> int:
    """A share of the vocabulary in rows that a head can be trimmed to."""
    return max(1, round(share * n_vocab / HEAD_ROWS_STEP)) * HEAD_ROWS_STEP


def plain_tokens(llm: pyssd.Llama, prompt: str, n_tokens: int) -> np.ndarray:
    """Ids of a plain greedy answer."""
    llm.reset()
    answer = llm.create_chat_completion(
        [{"role": "user", "content": prompt}],
        max_tokens=n_tokens,
        temperature=0.0,
        speculative="off",
    )
    # the last token of an answer is not evaluated
    n_prompt = answer["usage"]["prompt_tokens"]
    return llm.input_ids[n_prompt : llm.n_tokens].copy()


def measure_lost(
    llm: pyssd.Llama, data: Path, n_prompts: int, n_tokens: int, rows: dict[str, int]
) -> dict[str, Any]:
    """Shares of ids beyond the rows, by domain and over all."""
    ids: dict[str, np.ndarray] = {}
    for domain in DOMAINS:
        lines = (data / f"{domain}.dev.jsonl").read_text(encoding="utf-8").splitlines()[:n_prompts]
        answers = [plain_tokens(llm, json.loads(line)["prompt"], n_tokens) for line in lines]
        ids[domain] = np.concatenate(answers)
        print(f"{domain}: {len(ids[domain])} tokens", file=sys.stderr)
    everything = np.concatenate(list(ids.values()))
    return {
        domain: {
            "tokens": len(values),
            **{name: round(float((values >= r).mean()), 4) for name, r in rows.items()},
        }
        for domain, values in {"all": everything, **ids}.items()
    }


def time_draft(session: Any, last: int) -> float:
    """Seconds of one draft step."""
    started = time.perf_counter()
    tokens, _ = session.draft(0, last, STEPS)
    return (time.perf_counter() - started) / len(tokens)


def measure_saved(llm: pyssd.Llama, repeats: int, rows: dict[str, int]) -> dict[str, Any]:
    """Milliseconds of a draft step with the whole model and with every second FFN left out, by rows of the head."""
    session = llm._session
    assert session is not None
    session.rewind(0)
    session.prefill(np.asarray(llm.tokenize(PROMPT.encode()), np.int32))
    last = session.sample(0)
    skips = {
        "none": np.zeros(len(llm.blocks), np.uint8),
        "half of the ffn": np.array(
            [block.kind == "ffn" and block.layer % 2 for block in llm.blocks], np.uint8
        ),
    }
    heads = {"1": 0, **rows}
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for skip_name, skip in skips.items():
            for head_name, head_rows in heads.items():
                session.set_skip(skip, head_rows)
                session.draft(0, last, 2)  # builds the graph
                taken = [time_draft(session, last) for _ in range(3)]
                seconds.setdefault((skip_name, head_name), []).append(min(taken))
    result: dict[str, Any] = {}
    for skip_name in skips:
        whole = seconds[skip_name, "1"]
        row = {"ms": round(1e3 * statistics.median(whole), 3)}
        for name in rows:
            trimmed = seconds[skip_name, name]
            pairs = [a - b for a, b in zip(whole, trimmed, strict=True)]
            row[f"ms at {name}"] = round(1e3 * statistics.median(trimmed), 3)
            row[f"ms saved at {name}"] = round(1e3 * statistics.median(pairs), 3)
        result[skip_name] = row
    session.set_skip(None)
    session.rewind(0)
    return result


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All of one model."""
    with pyssd.Llama(str(path), n_ctx=4096, verbose=False, speculative="off") as llm:
        rows = {name: rows_of(share, llm.n_vocab()) for name, share in SHARES.items()}
        session = llm._session
        assert session is not None
        heads = {"output.weight", "token_embd.weight"}
        # warm, with sizes as they will be
        saved = measure_saved(llm, 1, rows) and measure_saved(llm, args.repeats, rows)
        head = [
            {"name": name, "type": kind, "buffer": buffer, "MB": round(nbytes / 1e6, 1)}
            for name, kind, buffer, nbytes in session.weights()
            if name in heads
        ]
        return {
            "file": path.name,
            "threads": llm.n_threads,
            "vocabulary": llm.n_vocab(),
            "rows": rows,
            "head": head[-1],
            "draft_step": saved,
            "lost": measure_lost(llm, args.data, args.prompts, args.tokens, rows),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/head_trim.json"))
    args = parser.parse_args()

    from pyssd.models import find_model

    result: dict[str, Any] = {"machine": "", "models": {}}
    if args.out.is_file():
        result = json.loads(args.out.read_text(encoding="utf-8"))
    for name in args.model:
        load = [round(value, 2) for value in os.getloadavg()]
        measured = measure(find_model(name), args)
        result["machine"] = f"{platform.machine()}, {os.cpu_count()} processors"
        result["models"][name] = {
            "command": f"python benchmarks/head_trim.py --model {name} --prompts {args.prompts}"
            f" --tokens {args.tokens} --repeats {args.repeats}",
            "load_at_start": load,
            **measured,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
