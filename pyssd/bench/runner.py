"""Paired runs of one prompt: plain, pyssd, plain, pyssd, in one process and on one loaded model.

What drifts (clock rates, neighbours, page cache) then hits both alike. Each run begins without KV cells, and each pyssd
run without what an earlier run of the same prompt has taught the drafts: drafts that copy the answer from last time would
measure nothing. Measured costs and rates of acceptance stay, as they do between the requests of a user.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyssd.bench.prompts import Prompt
from pyssd.bench.summary import Record

if TYPE_CHECKING:
    from pyssd.llama import Llama

PeerRun = Callable[[list[int]], Mapping[str, Any]]
_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every run samples.

    Attributes:
        tokens: the most tokens of an answer.
        temperature: 0 = greedy.
        seed: the same for all runs.
    """

    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One answer.

    Attributes:
        text: its text.
        evaluated: int32 [n], prompt and answer without its last token, which is never evaluated.
        n_prompt: tokens of the prompt.
        finish_reason: as in OpenAI's completions.
        wall_seconds: from the call to the end.
        first_token_seconds: from the call to the first text; None for an answer without text.
        stats: `SpecStats.as_dict()`.
    """

    text: str
    evaluated: npt.NDArray[np.int32]
    n_prompt: int
    finish_reason: str
    wall_seconds: float
    first_token_seconds: float | None
    stats: dict[str, Any]

    @property
    def answer(self) -> npt.NDArray[np.int32]:
        """Tokens of the answer, without the last one."""
        return self.evaluated[self.n_prompt :]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens behind the first one, which costs no pass of its own, by the seconds of decoding them."""
        tokens, seconds = self.stats["emitted"] - 1, self.stats["decode_seconds"]
        return tokens / seconds if tokens > 0 and seconds > 0 else None


def run_once(llm: Llama, text: str, sampling: Sampling, speculative: object) -> Run:
    """Answer a prompt in an empty context; as a chat where the model has a template for one."""
    llm.reset()
    pieces: list[str] = []
    reason, first = "", None
    started = time.perf_counter()
    for piece, finish_reason in _pieces(llm, text, sampling, speculative):
        if piece and first is None:
            first = time.perf_counter() - started
        pieces.append(piece)
        reason = finish_reason or reason
    wall = time.perf_counter() - started
    stats = llm.stats.as_dict()
    n_answer = max(stats["emitted"] - 1, 0)
    evaluated = llm.input_ids[: llm.n_tokens].astype(np.int32)
    return Run(
        "".join(pieces), evaluated, len(evaluated) - n_answer, reason, wall, first, stats
    )  # fmt: skip


def _pieces(
    llm: Llama, text: str, sampling: Sampling, speculative: object
) -> Iterator[tuple[str, str | None]]:
    options: dict[str, Any] = {
        "max_tokens": sampling.tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "speculative": speculative,
        "stream": True,
    }
    if "tokenizer.chat_template" in llm.metadata:
        messages = [{"role": "user", "content": text}]
        for chunk in llm.create_chat_completion(messages, **options):
            choice = chunk["choices"][0]
            yield choice["delta"].get("content") or "", choice["finish_reason"]
        return
    for chunk in llm.create_completion(text, **options):
        choice = chunk["choices"][0]
        yield choice["text"], choice["finish_reason"]


def warm_up(llm: Llama, text: str, sampling: Sampling) -> float:
    """Run a prompt both ways without measuring, so that first-use work does not count; returns its seconds."""
    started = time.perf_counter()
    for speculative in ("auto", "off"):
        run_once(llm, text, sampling, speculative)
    return time.perf_counter() - started


def measure(
    llm: Llama,
    prompt: Prompt,
    sampling: Sampling,
    repeats: int,
    *,
    peers: Mapping[str, PeerRun] | None = None,
    force: Callable[[Run], AbstractContextManager[None]] | None = None,
    remember: bool = False,
) -> dict[str, Any]:
    """Run one prompt in pairs, and peers after each pair.

    Args:
        llm: the loaded model.
        prompt: what to answer.
        sampling: the same for all.
        repeats: pairs.
        peers: name to what runs it on the tokens of the prompt.
        force: makes what is entered around a pyssd run from the plain run before it.
        remember: drafts know the prompts measured before this one, never this one.

    Returns:
        The prompt's record, JSON values only.
    """
    plain: list[Run] = []
    fast: list[Run] = []
    others: dict[str, list[Mapping[str, Any]]] = {name: [] for name in peers or {}}
    memory = llm.draft_memory() if remember else None
    for _ in range(repeats):
        plain.append(run_once(llm, prompt.text, sampling, "off"))
        llm.forget_drafts(memory)
        with nullcontext() if force is None else force(plain[-1]):
            fast.append(run_once(llm, prompt.text, sampling, "auto"))
        tokens = plain[0].evaluated[: plain[0].n_prompt].tolist()
        for name, run_peer in (peers or {}).items():
            others[name].append(run_peer(tokens))
    return {
        **record(prompt, plain, fast),
        **({"peers": {name: _peer_record(runs) for name, runs in others.items()}} if peers else {}),
    }


def record(prompt: Prompt, plain: list[Run], fast: list[Run]) -> dict[str, Any]:
    """Put the runs of one prompt together."""
    forks = [fork for run in fast if (fork := first_difference(plain[0], run)) is not None]
    rated = all(run.tokens_per_second is not None for run in (*plain, *fast))
    return {
        "domain": prompt.domain,
        "id": prompt.id,
        "prompt_tokens": plain[0].n_prompt,
        "tokens": min(run.stats["emitted"] for run in (*plain, *fast)),
        "finish_reason": plain[0].finish_reason,
        "text_sha256": hashlib.sha256(plain[0].text.encode()).hexdigest()[:12],
        "same_text": not forks,
        "fork": min(forks, default=None),
        "plain_repeats": all(first_difference(plain[0], run) is None for run in plain),
        "plain": _arm(plain, rated=rated),
        "pyssd": {**_arm(fast, rated=rated), "stats": joint_stats([run.stats for run in fast])},
    }


def first_difference(run: Run, other: Run) -> int | None:
    """Return the position in the answer of the first token that differs; None if the texts are the same."""
    first, second = run.answer, other.answer
    n = min(len(first), len(second))
    different = np.flatnonzero(first[:n] != second[:n])
    if different.size:
        return int(different[0])
    return None if len(first) == len(second) and run.text == other.text else n


def joint_stats(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts and times of several runs; prediction errors are averaged, words are the last run's."""
    joint: dict[str, Any] = {}
    for name in _SUMMED:
        if all(name in one for one in stats):
            joint[name] = round(sum(one[name] for one in stats), 6)
    for name in ("rounds_by", "accepted_by"):
        joint[name] = {
            key: sum(one.get(name, {}).get(key, 0) for one in stats)
            for key in dict.fromkeys(key for one in stats for key in one.get(name, {}))
        }
    errors = [one.get("prediction_error") or {} for one in stats]
    if any(errors):
        joint["prediction_error"] = {
            key: round(float(np.mean([one[key] for one in errors if key in one])), 4)
            for key in dict.fromkeys(key for one in errors for key in one)
        }
    for name in ("skip_set", "reason"):  # the reason ends with the decision
        if stats[-1].get(name):
            joint[name] = stats[-1][name]
    return joint


_SUMMED = (
    "emitted",
    "rounds",
    "drafted",
    "accepted",
    "graphs_built",
    "prefill_seconds",
    "decode_seconds",
    "draft_seconds",
    "verify_seconds",
    "controller_seconds",
)


def _arm(runs: list[Run], *, rated: bool) -> dict[str, Any]:
    rates = [rate for run in runs if (rate := run.tokens_per_second) is not None]
    first = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    return {
        "tokens_per_second": [round(rate, _DIGITS - 2) for rate in rates] if rated else [],
        "wall_seconds": [round(run.wall_seconds, _DIGITS) for run in runs],
        "first_token_seconds": [round(seconds, _DIGITS) for seconds in first],
    }


def _peer_record(runs: list[Mapping[str, Any]]) -> Record:
    rates = [run["tokens_per_second"] for run in runs if run.get("tokens_per_second")]
    errors = [run["error"] for run in runs if run.get("error")]
    result: dict[str, Any] = {
        "tokens_per_second": [round(rate, _DIGITS - 2) for rate in rates],
        "tokens": max((run.get("tokens", 0) for run in runs), default=0),
        "same_prompt": all(run.get("same_prompt", False) for run in runs),
    }
    for name in ("drafted", "accepted"):
        if runs and all(name in run for run in runs):
            result[name] = sum(run[name] for run in runs)
    return {**result, "error": errors[0]} if errors else result
