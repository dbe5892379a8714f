"""Perplexity of pyssd's kernels and of upstream's on the same texts, at equal and unequal precision of attention.

Upstream's flash attention sums values in F16 where the cells are F16, which by itself moves perplexity; pyssd's sums in F32.
With cells in F32 both do, and what is left is the difference of the matrix products.

    python benchmarks/perplexity.py [--models NAME ...] [--arms ARM ...] [--data DIR] [--out FILE]

Arms that the file holds already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyssd import Llama, kernels
from pyssd.models import find_model

N_TEXTS, N_TOKENS, ROWS = 7, 1200, 64
F32 = {"type_k": 0, "type_v": 0}
ARMS: dict[str, dict[str, Any]] = {
    "pyssd": {},
    "upstream": {"kernels": "upstream"},
    "pyssd, F32 cells": F32,
    "upstream, F32 cells": {"kernels": "upstream", **F32},
    "upstream, F32 cells, no flash attention": {"kernels": "upstream", "flash_attn": False, **F32},
}
COMPARED = {
    "default": ("pyssd", "upstream"),
    "upstream's attention, F16 sums against F32": ("upstream", "upstream, F32 cells"),
    "equal attention: F32 cells": ("pyssd, F32 cells", "upstream, F32 cells"),
    "pyssd's default against F32 attention": (
        "pyssd",
        "upstream, F32 cells, no flash attention",
    ),
}


def losses_of(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Negative log probabilities of the tokens that follow; float64 [T]."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1)
    log_sum = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
    return log_sum - rows[np.arange(len(rows)), following]


def perplexity(model: Path, texts: list[str], options: dict[str, Any]) -> tuple[float, int]:
    """Perplexity of the first N_TOKENS of each text, each in a fresh pass, and the number of tokens judged."""
    losses: list[np.ndarray] = []
    with Llama(str(model), n_ctx=2048, verbose=False, speculative="off", **options) as llm:
        for text in texts:
            tokens = llm.tokenize(text.encode())[:N_TOKENS]
            logits = llm.skip_logits(tokens, None)
            for start in range(0, len(tokens) - 1, ROWS):
                stop = min(start + ROWS, len(tokens) - 1)
                following = np.asarray(tokens[start + 1 : stop + 1])
                losses.append(losses_of(logits[start:stop], following))
    joined = np.concatenate(losses)
    return float(np.exp(joined.mean())), len(joined)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/perplexity.json"))
    args = parser.parse_args()
    lines = (args.data / "long_4k.dev.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:N_TEXTS]]
    what = f"first {N_TOKENS} tokens of the first {N_TEXTS} prompts of long_4k.dev"
    results: dict[str, Any] = {"text": what, "perplexity": {}}
    if args.out.is_file():
        old = json.loads(args.out.read_text(encoding="utf-8"))
        if old.get("text") == what:
            results = old
    results["command"] = " ".join(["python", sys.argv[0]])
    results["instruction_set"] = kernels.instruction_set()
    for name in args.models:
        model = find_model(name)
        arms = results["perplexity"].setdefault(name, {})
        for arm in args.arms:
            if arm not in arms:
                value, n_tokens = perplexity(model, texts, ARMS[arm])
                arms[arm] = round(value, 5)
                results.setdefault("n_tokens", {})[name] = n_tokens
            results.setdefault("difference_percent", {})[name] = {
                label: round(100 * (arms[a] / arms[b] - 1), 3)
                for label, (a, b) in COMPARED.items()
                if a in arms and b in arms
            }
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, arms, results["difference_percent"][name])


if __name__ == "__main__":
    main()
