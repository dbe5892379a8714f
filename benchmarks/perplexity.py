"""Perplexity of pyssd's kernels and of upstream's on the same texts, at equal and unequal precision of attention.

Flash attention of upstream sums values in F16, which by itself moves perplexity; pyssd's sums in F32. Without flash
attention and with cells in F32 both run upstream's attention, and what is left is the difference of the products with
weights. (Cells in F32 alone would change nothing: llama.cpp casts them to F16 for flash attention.)

Differences are of the mean loss of the same tokens, in percent of perplexity, with the standard error of that mean.

    python benchmarks/perplexity.py [--models NAME ...] [--texts 7] [--data DIR] [--out FILE]

A model that the file holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyssd import Llama
from pyssd.bench import machine
from pyssd.models import find_model

N_TOKENS, ROWS = 1200, 64
F32_ATTENTION = {"flash_attn": False, "type_k": 0, "type_v": 0}
ARMS: dict[str, dict[str, Any]] = {
    "pyssd": {},
    "upstream": {"kernels": "upstream"},
    "pyssd, F32 attention": F32_ATTENTION,
    "upstream, F32 attention": {"kernels": "upstream", **F32_ATTENTION},
}
COMPARED = {
    "defaults": ("pyssd", "upstream"),
    "equal attention": ("pyssd, F32 attention", "upstream, F32 attention"),
    "pyssd's attention against F32": ("pyssd", "pyssd, F32 attention"),
    "upstream's attention against F32": ("upstream", "upstream, F32 attention"),
}


def losses_of(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Negative log probabilities of the tokens that follow; float64 [T]."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1)
    log_sum = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
    return log_sum - rows[np.arange(len(rows)), following]


def losses(model: Path, texts: list[str], options: dict[str, Any]) -> np.ndarray:
    """Losses of the first N_TOKENS of each text but its first one, each text in a fresh pass; float64 [T]."""
    found: list[np.ndarray] = []
    with Llama(str(model), n_ctx=2048, verbose=False, speculative="off", **options) as llm:
        for text in texts:
            tokens = llm.tokenize(text.encode())[:N_TOKENS]
            logits = llm.skip_logits(tokens, None)
            for start in range(0, len(tokens) - 1, ROWS):
                stop = min(start + ROWS, len(tokens) - 1)
                following = np.asarray(tokens[start + 1 : stop + 1])
                found.append(losses_of(logits[start:stop], following))
    return np.concatenate(found)


def difference(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """How much higher the perplexity of the first is, in percent, and the standard error of that."""
    by_token = first - second
    error = by_token.std(ddof=1) / math.sqrt(len(by_token))
    return {
        "percent": round(100.0 * math.expm1(by_token.mean()), 3),
        "standard_error": round(100.0 * error, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--texts", type=int, default=7)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/perplexity.json"))
    args = parser.parse_args()
    lines = (args.data / "long_4k.dev.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: args.texts]]
    session = machine.session(["python", *sys.argv])
    results: dict[str, Any] = {
        "text": f"first {N_TOKENS} tokens of the first {len(texts)} prompts of long_4k.dev",
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{machine.processor()}, {session['instructions']}",
        "models": {},
    }
    if args.out.is_file():
        old = json.loads(args.out.read_text(encoding="utf-8"))
        if old.get("text") == results["text"]:
            results = old
    for name in args.models:
        if name in results["models"]:
            continue
        found = {arm: losses(find_model(name), texts, ARMS[arm]) for arm in ARMS}
        results["models"][name] = {
            "tokens": len(found["pyssd"]),
            "perplexity": {arm: round(math.exp(values.mean()), 4) for arm, values in found.items()},
            "difference": {
                label: difference(found[a], found[b]) for label, (a, b) in COMPARED.items()
            },
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(results["models"][name], indent=1))


if __name__ == "__main__":
    main()
