"""How long the drafts of the recycling table come true: replays of plain runs, and rounds that really verify them.

Three arms, one a call; each merges its part into the results file:

- replay: plain greedy runs, whose rows are replayed through tables with and without keys of pairs, with and without what
  the prompt's text tells, cold for every prompt and warm over all of them, for several draft lengths; and beside an
  n-gram index. Rows of rejected tokens do not exist here.
- rows: every round verifies the table's draft, and the table learns from every row.
- emitted: the same, but the table learns from the rows of emitted tokens only.

Lengths are mean acceptance lengths, the bonus token included. Usage:

    python benchmarks/recycle.py replay [--model NAME] [--prompts 7] [--tokens 96]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pyssd
from pyssd._core import NgramIndex, RecycleTable

DOMAINS = ("summarization", "code", "gsm8k", "text_to_sql", "chat", "storytelling")
# lengths of a simulation with rows of the prompt, single tokens, a table that is warm, chain 3 (issue 4)
SIMULATED = dict(zip(DOMAINS, (1.61, 1.54, 1.46, 1.41, 1.32, 1.15), strict=True))
LENGTHS = (3, 5, 7, 15)
N_BINS = 10

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what the target emits behind it; greedy, so each token is also the highest ranked id of its row."""

    domain: str
    prompt: Tokens
    emitted: Tokens


class Lengths:
    """Mean acceptance length by domain."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def add(self, domain: str, emitted: int) -> None:
        """Count a round."""
        counts = self._counts.setdefault(domain, [0, 0])
        counts[0] += emitted
        counts[1] += 1

    def as_dict(self) -> dict[str, float]:
        """Emitted tokens a round, by domain and over all rounds."""
        total = [sum(counts[i] for counts in self._counts.values()) for i in (0, 1)]
        counts = {**self._counts, "all": total}
        return {name: round(emitted / rounds, 3) for name, (emitted, rounds) in counts.items()}


def read_prompts(folder: Path, n: int) -> Iterator[tuple[str, str]]:
    """Yield (domain, prompt) of the first prompts of every domain, in turn."""
    lines = {
        domain: (folder / f"{domain}.dev.jsonl").read_text(encoding="utf-8").splitlines()
        for domain in DOMAINS
    }
    for i in range(n):
        for domain in DOMAINS:
            yield domain, json.loads(lines[domain][i])["prompt"]


def tokenize(llm: pyssd.Llama, prompt: str) -> Tokens:
    """A chat of one message in ChatML, without a system prompt: the form of the simulation."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return np.asarray(llm.tokenize(text.encode(), add_bos=True, special=True), dtype=np.int32)


def match_len(draft: Tokens, text: Tokens) -> int:
    """Tokens of a draft that a text begins with."""
    n = min(len(draft), len(text))
    wrong = np.flatnonzero(draft[:n] != text[:n])
    return int(wrong[0]) if len(wrong) else n


def follow_singles(table: RecycleTable, last: int, max_len: int) -> Tokens:
    """Draft by single tokens alone."""
    drafted: list[int] = []
    while len(drafted) < max_len:
        tokens, _ = table.draft(-1, last, 1)
        if not len(tokens):
            break
        last = int(tokens[0])
        drafted.append(last)
    return np.asarray(drafted, dtype=np.int32)


def replay(
    texts: list[Text],
    n_vocab: int,
    max_len: int,
    *,
    pairs: bool = True,
    copies: bool = True,
    warm: bool = True,
) -> dict[str, float]:
    """Lengths of the rounds that would have emitted these texts; a table is warm if it outlives a prompt."""
    lengths, table = Lengths(), RecycleTable(n_vocab)
    for text in texts:
        if not warm:
            table.clear()
        whole = np.append(text.prompt, text.emitted)
        if copies:
            table.begin(whole[: len(text.prompt) + 1])
        at = len(text.prompt)  # of the last token emitted
        while at + 1 < len(whole):
            before, last, rest = int(whole[at - 1]), int(whole[at]), whole[at + 1 :]
            if pairs:
                draft, _ = table.draft(before, last, max_len)
            else:
                draft = follow_singles(table, last, max_len)
            n = min(match_len(draft, rest) + 1, len(rest))
            table.learn(before, whole[at : at + n], rest[:n])
            table.extend(rest[:n])
            lengths.add(text.domain, n)
            at += n
    return lengths.as_dict()


def replay_beside_ngram(
    texts: list[Text], n_vocab: int, max_len: int, *, recycle: bool
) -> dict[str, Any]:
    """Lengths where the n-gram index drafts what it can, and the table (if at all) only where that has no match."""
    lengths, no_match, table = Lengths(), Lengths(), RecycleTable(n_vocab)
    for text in texts:
        whole = np.append(text.prompt, text.emitted)
        index = NgramIndex(4096)
        index.sync(whole[: len(text.prompt) + 1])
        table.begin(whole[: len(text.prompt) + 1])
        at = len(text.prompt)
        while at + 1 < len(whole):
            before, last, rest = int(whole[at - 1]), int(whole[at]), whole[at + 1 :]
            draft, _, matched = index.draft(max_len)
            if not matched and recycle:
                draft, _ = table.draft(before, last, max_len)
            n = min(match_len(draft, rest) + 1, len(rest))
            table.learn(before, whole[at : at + n], rest[:n])
            index.extend(rest[:n])
            lengths.add(text.domain, n)
            if not matched:
                no_match.add(text.domain, n)
            at += n
    return {"all_rounds": lengths.as_dict(), "rounds_without_match": no_match.as_dict()}


def decode_plain(llm: pyssd.Llama, domain: str, prompt: Tokens, n_tokens: int) -> Text:
    """Greedy tokens, up to an end of generation."""
    session = llm._session
    assert session is not None
    session.rewind(0)
    session.prefill(prompt)
    emitted = [session.sample(0)]
    while len(emitted) < n_tokens and emitted[-1] != llm.token_eos():
        emitted += session.verify(0, emitted[-1], NO_TOKENS).tolist()
    return Text(domain, prompt, np.asarray(emitted, dtype=np.int32))


class Calibration:
    """Chances against what came true of them."""

    def __init__(self) -> None:
        self._bins = [[0, 0.0, 0] for _ in range(N_BINS)]

    def add(self, chances: npt.NDArray[np.float32], n_right: int) -> None:
        """Count the tokens of a draft that were judged: the right ones and the first wrong one."""
        for i, chance in enumerate(chances[: n_right + 1].tolist()):
            cell = self._bins[min(int(chance * N_BINS), N_BINS - 1)]
            cell[0] += 1
            cell[1] += chance
            cell[2] += i < n_right

    def rows(self) -> list[dict[str, float]]:
        """One row for each bin of chances."""
        return [
            {"tokens": n, "chance": round(sum_ / n, 3), "came_true": round(hits / n, 3)}
            for n, sum_, hits in self._bins
            if n
        ]


def verify_rounds(llm: pyssd.Llama, args: argparse.Namespace, max_len: int) -> dict[str, Any]:
    """Real rounds with a table that stays warm over all prompts."""
    session = llm._session
    assert session is not None
    lengths, calibration, table = Lengths(), Calibration(), RecycleTable(llm.n_vocab())
    digests: list[str] = []
    before_all, draft_seconds, rounds = session.counters(), 0.0, 0
    for domain, prompt in read_prompts(args.data, args.prompts):
        ids = tokenize(llm, prompt)
        session.rewind(0)
        session.prefill(ids)
        tokens = [int(ids[-1]), session.sample(0)]
        table.begin(np.append(ids, np.int32(tokens[-1])))
        while len(tokens) <= args.tokens and tokens[-1] != llm.token_eos():
            before, last = tokens[-2:]
            started = time.perf_counter()
            draft, chances = table.draft(before, last, min(max_len, args.tokens - len(tokens)))
            draft_seconds += time.perf_counter() - started
            if args.arm == "rows":
                emitted = session.verify(0, last, draft, table, before)
            else:
                emitted = session.verify(0, last, draft)
                table.learn(before, np.append(np.int32(last), emitted[:-1]), emitted)
            table.extend(emitted)
            calibration.add(chances, match_len(draft, emitted))
            lengths.add(domain, len(emitted))
            tokens += emitted.tolist()
            rounds += 1
        digests.append(digest(np.asarray(tokens[1:], dtype=np.int32)))
        print(f"{domain}: {lengths.as_dict()[domain]}", file=sys.stderr)
    counters = session.counters()
    spent = {name: counters[name] - before_all[name] for name in ("tops_seconds", "verify_seconds")}
    return {
        "lengths": lengths.as_dict(),
        "calibration": calibration.rows(),
        "learning_share_of_verify": round(spent["tops_seconds"] / spent["verify_seconds"], 5),
        "draft_microseconds": round(draft_seconds / rounds * 1e6, 2),
        "texts": digests,
    }


def digest(tokens: Tokens) -> str:
    """A short name of a text."""
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


def replay_all(llm: pyssd.Llama, args: argparse.Namespace) -> dict[str, Any]:
    """The replays of every kind of table."""
    texts = []
    for domain, prompt in read_prompts(args.data, args.prompts):
        texts.append(decode_plain(llm, domain, tokenize(llm, prompt), args.tokens))
        print(f"{domain}: {len(texts[-1].emitted)} tokens", file=sys.stderr)
    n_vocab = llm.n_vocab()
    tables: dict[str, Callable[[int], dict[str, float]]] = {
        f"{keys}, {sources}, {state}": lambda n, k=keys, o=sources, s=state: replay(
            texts, n_vocab, n, pairs=k != "single", copies=o != "rows", warm=s == "warm"
        )
        for keys in ("single", "pairs")
        for sources in ("rows", "rows and prompt")
        for state in ("cold", "warm")
    }
    return {
        "lengths": {
            name: {str(n): measure(n) for n in LENGTHS} for name, measure in tables.items()
        },
        "beside_ngram": {
            name: {str(n): replay_beside_ngram(texts, n_vocab, n, recycle=on) for n in LENGTHS}
            for name, on in (("ngram", False), ("ngram, else recycle", True))
        },
        "texts": [digest(text.emitted) for text in texts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arm", choices=("replay", "rows", "emitted"))
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int, default=7, help="of each domain")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-len", type=int, default=3, help="of rows and emitted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recycle.json"))
    args = parser.parse_args()

    from pyssd.models import find_model

    path = str(find_model(args.model))
    with pyssd.Llama(path, n_ctx=4096, verbose=False, speculative="off") as llm:
        if args.arm == "replay":
            measured = replay_all(llm, args)
            name = args.arm
        else:
            measured = verify_rounds(llm, args, args.draft_len)
            name = f"{args.arm}, {args.draft_len}"
    merged = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    merged["simulated"] = SIMULATED
    merged[f"{args.model}, {name}"] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": platform.machine(),
        "prompts_per_domain": args.prompts,
        "tokens": args.tokens,
        **measured,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
