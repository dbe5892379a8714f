"""Check this installation with a model: which libraries run, and how far logits depend on the width of a batch.

128 tokens are decoded singly, and in batches of 2, 4, 8 and 16, after 40 and 300 tokens; the largest difference between the
two logits is the width noise. Speculation verifies drafts in batches, so 0 means that its text equals plain decoding's. The
error of the gap between the two best tokens gives the margin of the near-tie guard.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyssd.cli import info, options, output
from pyssd.guard import WidthNoise, width_noise

if TYPE_CHECKING:
    from pyssd.exactness import Exactness
    from pyssd.llama import Llama

NAME = "check"
HELP = "check the libraries, and measure how exact speculation is here"

CONTEXTS = (40, 300)
_PROBED = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    options.add_model(parser, n_ctx=512)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if the libraries are not what they should be, else 0."""
    # the level is that of exact=True unless --no-exact asks for the other
    wanted = None if args.exact is False else True
    noise: dict[str, dict[str, float]] = {}
    margins: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for exact in (True, None) if wanted is None else (None, True):
        args.exact = exact
        with options.load(args) as llm:
            facts = {"model": str(llm.model_path), **info.library_facts()}
            mode = "exact" if exact else "default"
            measured = measure(llm)
            noise[mode] = {name: found.largest for name, found in measured.items()}
            margins[mode] = max((found.margin for found in measured.values()), default=0.0)
            facts["exactness"] = _level(llm.exactness, max(noise[mode].values(), default=0.0))
    facts["single_ggml_cpu"] = _single_cpu_library()
    facts["width_noise"] = noise
    facts["guard_margin"] = margins
    if args.json:
        output.write_json(facts)
    else:
        for line in _lines(facts):
            print(line)
    return 0 if facts["single_ggml_cpu"] is not False else 1


def measure(llm: Llama) -> dict[str, WidthNoise]:
    """Measure how rows of a batch differ from the same rows decoded singly, by context and width.

    Returns:
        {"40 tokens, width 2": noise, ...}; contexts that do not fit are left out, and all where nothing can be verified.
    """
    session = info.session_of(llm)
    if session.refusal is not None:
        return {}
    tokens = _text_tokens(llm, max(CONTEXTS) + _PROBED)
    return {
        f"{context} tokens, width {width}": noise
        for context in CONTEXTS
        if context + _PROBED <= llm.n_ctx()
        for width, noise in width_noise(session, tokens[: context + _PROBED], context).items()
    }


def _text_tokens(llm: Llama, count: int) -> npt.NDArray[np.int32]:
    text = "The quick brown fox jumps over the lazy dog, and then it counts: one, two, three. "
    tokens = llm.tokenize((text * (1 + count // 8)).encode(), special=False)
    # a vocabulary may hold long texts in one token: repeat as often as it takes
    return np.resize(np.asarray(tokens, np.int32), count)


def _single_cpu_library() -> bool | None:
    """Tell whether exactly pyssd's own CPU backend is mapped; None where the system does not say."""
    from pyssd import _loader

    mapped = [path.resolve() for path in _loader.mapped("ggml-cpu")]
    return mapped == [_loader.libraries().files["ggml-cpu"].resolve()] if mapped else None


def _level(promised: Exactness, measured: float) -> dict[str, Any]:
    if promised.level >= 2 and measured > 0.0:
        reason = f"logits differ by {measured:.2g} with the width of the batch, here and now"
        return {"level": 1, "reason": reason}
    return {"level": promised.level, "reason": promised.reason}


def _lines(facts: dict[str, Any]) -> list[str]:
    single = {True: "yes", False: "NO", None: "unknown on this system"}[facts["single_ggml_cpu"]]
    lines = [
        f"model       {facts['model']}",
        f"libraries   pyssd {facts['pyssd']}, llama_cpp {facts['llama_cpp']}, ggml {facts['ggml']}",
        *(f"  {name:<10} {path}" for name, path in facts["libraries"].items()),
        f"one ggml-cpu, ours: {single}",
        "width noise (largest difference of a logit)",
    ]
    for mode, noise in facts["width_noise"].items():
        lines += [f"  {mode:<8} {name:<20} {value:.3g}" for name, value in noise.items()]
    for mode, margin in facts["guard_margin"].items():
        if margin > 0.0:
            lines.append(f"near-tie guard, {mode}: margin {margin:.2g} (3 x the error of a gap)")
    exactness = facts["exactness"]
    return [*lines, f"exactness   level {exactness['level']}: {exactness['reason']}"]
