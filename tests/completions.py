"""Objects on the random llama and their completions as tokens, for the tests of requests and of state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyssd import Llama

EAGER: dict[str, Any] = {
    "skip_set": "f:1,2",
    "speculative": {"max_draft_len": 5, "min_confidence": 0.0},
}
PROMPT = [(11 * i) % 300 + 20 for i in range(60)]


def make(path: Path, **options: Any) -> Llama:
    settings = {
        "n_ctx": 512,
        "n_threads": 1,
        "verbose": False,
        "exact": True,
        "speculative": "off",
        **options,
    }
    return Llama(str(path), **settings)


def complete(llm: Any, prompt: Any = None, n: int = 24, **options: Any) -> list[int]:
    """Emitted tokens of a completion, the last one left out (it is not evaluated)."""
    prompt = PROMPT if prompt is None else prompt
    llm.create_completion(prompt, **{"max_tokens": n, "temperature": 0.0, **options})
    return llm.input_ids[len(prompt) : llm.n_tokens].tolist()
