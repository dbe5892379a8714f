"""What the robustness tests share: an object that drafts a lot, deterministic prompts and completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pyssd import Llama

N_CTX = 256
DRAFTING = {"always": True, "max_draft_len": 32, "min_confidence": 0.0}
SKIPPED = "f:1,2"


def make(path: Path, **options: Any) -> Llama:
    return Llama(
        str(path), **{"n_ctx": N_CTX, "n_threads": 1, "verbose": False, "exact": True, **options}
    )


def random_prompt(llm: Llama, n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, llm.n_vocab(), n_tokens).tolist()


def complete(
    llm: Llama, prompt: str | list[int], max_tokens: int | None = 32, **options: Any
) -> dict[str, Any]:
    return llm.create_completion(prompt, max_tokens=max_tokens, temperature=0.0, **options)[
        "choices"
    ][0]


def one_sentence(error: BaseException) -> bool:
    return 0 < len(str(error)) < 500 and "\n" not in str(error).strip()
