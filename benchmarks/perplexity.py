"""Perplexity of pyssd's kernels and of upstream's, on the same long texts.

python benchmarks/perplexity.py [--models NAME ...] [--data DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pyssd
from pyssd.models import find_model

N_TEXTS, N_TOKENS = 3, 1200
ARMS: dict[str, dict[str, Any]] = {
    "pyssd": {},
    "upstream": {"kernels": "upstream"},
    "upstream, reference mode": {"kernels": "upstream", "exact": True},
    "upstream, F32 attention": {
        "kernels": "upstream",
        "flash_attn": False,
        "type_k": 0,
        "type_v": 0,
    },
}


def perplexity(model: Path, texts: list[str], options: dict[str, Any]) -> float:
    """Perplexity of the first N_TOKENS of each text, each in a fresh pass."""
    losses: list[float] = []
    with pyssd.Llama(str(model), n_ctx=2048, verbose=False, speculative="off", **options) as llm:
        for text in texts:
            tokens = llm.tokenize(text.encode())[:N_TOKENS]
            logits = llm.skip_logits(tokens, None).astype(np.float64)[:-1]
            top = logits.max(axis=1, keepdims=True)
            log_sum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
            losses += (log_sum - logits[np.arange(len(logits)), tokens[1:]]).tolist()
    return float(np.exp(np.mean(losses)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/perplexity.json"))
    args = parser.parse_args()
    lines = (args.data / "long_4k.dev.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:N_TEXTS]]
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "text": f"first {N_TOKENS} tokens of the first {N_TEXTS} prompts of long_4k.dev",
        "perplexity": {},
    }
    for name in args.models:
        model = find_model(name)
        arms = {arm: round(perplexity(model, texts, o), 4) for arm, o in ARMS.items()}
        results["perplexity"][name] = arms
        print(name, arms)
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
