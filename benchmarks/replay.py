"""What decisions are worth: texts replayed through the real proposers and the real controller, on measured costs.

A change of a proposer, of its chances or of the controller shows here within seconds, on every prompt at once and without
the noise of a machine. Texts are decoded plainly once and kept (build/replay/); costs are those of the model's cost cache,
or V(m) as given. Every prompt is met three times, each time with the drafts' memory as it was before, and the median counts,
as in pyssd bench. Rows of rejected tokens do not exist here, and rounds cost what they are predicted to.

    python benchmarks/replay.py [--models NAME ...] [--prompts 10] [--first 5] [--remember] [--verify 1.0,1.05,1.3,1.9]

Prints the speed-up of each domain and its worst prompt, and chances against what came true, of first tokens of drafts and
of those behind. With --first 5 the five prompts that benchmarks/bench.sh measures stay unseen: what is fitted on others is
judged on them.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd import Llama
from pyssd._core import NgramIndex, RecycleTable
from pyssd.bench.prompts import choose
from pyssd.bench.runner import Sampling, run_once
from pyssd.bench.summary import geometric_mean
from pyssd.controller import Controller
from pyssd.cost import MAX_WIDTH
from pyssd.models import find_model
from pyssd.propose import FreeProposer
from pyssd.propose.ngram import NgramProposer
from pyssd.propose.recycle import RecycleProposer

DOMAINS = ("chat", "code", "code_edit", "gsm8k", "summarization", "text_to_sql", "storytelling")
REPEATS = 3
SWITCH = 0.01  # of a plain pass
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what plain greedy decoding emits behind it."""

    domain: str
    id: str
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, slots=True)
class Judged:
    """A drafted token that was reached: its chance, its place in the draft, and whether it came true."""

    source: str
    place: int
    chance: float
    is_right: bool


class FixedCosts:
    """Costs of V(m) that never move, in plain passes; pyssd.choice.Costs."""

    measured, scale, switch_units, switch_seconds = True, 1.0, SWITCH, SWITCH

    def __init__(self, verify: Sequence[float]) -> None:
        self._units = list(verify)

    def units(self, _n_past: int) -> Sequence[float]:
        return self._units

    def table(self, _n_past: int) -> Sequence[float]:
        return self._units

    def draft_seconds(self, *_: Any) -> float:
        return 1.0

    def observe_verify(self, *_: Any, **__: Any) -> None:
        pass

    def observe_draft(self, *_: Any) -> None:
        pass


def texts_of(model: str, args: argparse.Namespace) -> tuple[int, list[Text], list[float]]:
    """Vocabulary, texts and V(m) of a model; decoded and measured at the first call."""
    path = Path("build/replay") / f"{model}-{args.first}-{args.prompts}.pickle"
    if not path.is_file():
        texts = []
        with Llama(str(find_model(model)), n_ctx=4096, verbose=False) as llm:
            for domain in DOMAINS:
                file = args.data / f"{domain}.dev.jsonl"
                prompts = choose([file], domains=None, limit=args.first + args.prompts)
                for prompt in prompts[args.first :]:
                    run = run_once(llm, prompt.text, Sampling(96, 0.0, 1), "off")
                    tokens = run.evaluated
                    texts.append(Text(domain, prompt.id, tokens[: run.n_prompt], run.answer))
                print(f"{model}: {domain} is decoded", flush=True)
            assert llm._planner is not None
            costs = list(llm._planner.controller.costs.units(256))
            found = (llm.n_vocab(), texts, [units / costs[1] for units in costs])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(found))
    return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]


def given_verify(text: str) -> list[float]:
    """V(1), V(2), V(4), V(8), ... as a table of all widths; beyond the last one it goes on as steeply."""
    values = [float(value) for value in text.split(",")]
    known = [2**i for i in range(len(values))]
    table = np.interp(np.arange(MAX_WIDTH + 1), known, values)
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    beyond = np.arange(MAX_WIDTH + 1) > known[-1]
    table[beyond] = values[-1] + slope * (np.arange(MAX_WIDTH + 1)[beyond] - known[-1])
    return [0.0, *table[1:].tolist()]


class Replay:
    """Runs texts through one controller, one table and one index, as one loaded model would.

    Attributes:
        judged: What became of every drafted token that was reached, proposed or not.
    """

    def __init__(self, n_vocab: int, verify: Sequence[float]) -> None:
        self._verify = verify
        self._controller = Controller(FixedCosts(verify))
        self.table = RecycleTable(n_vocab)
        self._index = NgramIndex(4096)
        self.judged: list[Judged] = []

    def speedup(self, text: Text) -> float:
        """Plain passes that the text takes over the units of the rounds that emit it."""
        self._index.rewind(0)
        answer = [int(token) for token in text.answer]
        proposers: list[FreeProposer] = [
            NgramProposer(self._index, MAX_WIDTH - 1),
            RecycleProposer(self.table, MAX_WIDTH - 1),
        ]
        self._controller.begin()
        for proposer in proposers:
            proposer.start(text.prompt, answer[0])
        self._learn(text, 0, answer[:1])
        at, units = 1, 0.0
        while at < len(answer):
            emitted, cost = self._round(text, answer, at, proposers)
            units += cost
            at += emitted
        return (len(answer) - 1) / units

    def _round(
        self, text: Text, answer: list[int], at: int, proposers: list[FreeProposer]
    ) -> tuple[int, float]:
        room = len(answer) - at - 1
        drafts = [d for p in proposers if room > 0 and (d := p.draft(room)) is not None]
        n_past = len(text.prompt) + at
        choice = self._controller.choose(n_past, drafts, room)
        for draft in drafts:
            n_right = match_len(draft.tokens, answer[at:])
            for place in range(min(n_right + 1, len(draft.tokens), len(answer) - at)):
                judged = Judged(draft.source, place, draft.chances[place], place < n_right)
                self.judged.append(judged)
        n = 0
        if choice.free is not None:
            n = match_len(choice.free.tokens[: choice.length], answer[at : len(answer) - 1])
        switched = choice.width != self._controller._last_width
        cost = self._verify[choice.width] + SWITCH * switched
        emitted = answer[at : at + n + 1]
        self._learn(text, at, emitted)
        for proposer in proposers:
            proposer.emitted(np.array(emitted, np.int32))
        self._controller.observe(
            choice, n_past=n_past, width=choice.width, emitted=n + 1, draft_seconds=0.0, verify_seconds=cost
        )  # fmt: skip
        return n + 1, cost

    def _learn(self, text: Text, at: int, emitted: list[int]) -> None:
        """Let the table learn from the rows behind which these tokens were emitted."""
        whole = np.append(text.prompt, text.answer)
        start = len(text.prompt) + at - 1
        rows = whole[start : start + len(emitted)].astype(np.int32)
        before = int(whole[start - 1]) if start else -1
        self.table.learn(before, rows, np.array(emitted, np.int32))


def match_len(draft: Tokens, answer: list[int]) -> int:
    """Tokens of a draft that an answer begins with."""
    n = 0
    while n < min(len(draft), len(answer)) and int(draft[n]) == answer[n]:
        n += 1
    return n


def calibration(judged: list[Judged]) -> Iterator[str]:
    """Lines about chances: their mean, what came true, the log loss, and what came true by chance."""
    for source in ("ngram", "recycle"):
        for name, is_first in (("first tokens", True), ("behind", False)):
            rows = [j for j in judged if j.source == source and (j.place == 0) == is_first]
            if not rows:
                continue
            chances = np.array([row.chance for row in rows])
            right = np.array([row.is_right for row in rows])
            loss = -np.log(np.clip(np.where(right, chances, 1.0 - chances), 1e-3, 1.0)).mean()
            bins = []
            for low, high in itertools.pairwise(EDGES):
                chosen = (chances >= low) & (chances < high)
                if chosen.any():
                    bins.append(f"{low:.1f}: {right[chosen].mean():.2f} ({chosen.sum()})")
            yield (
                f"  {source}, {name}: {len(rows)}, chance {chances.mean():.3f}, came true {right.mean():.3f},"
                f" log loss {loss:.4f}; by chance {', '.join(bins)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "qwen2.5-coder-1.5b"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int, default=10, help="of each domain")
    parser.add_argument("--first", type=int, default=5, help="prompts of each domain to pass over")
    parser.add_argument("--remember", action="store_true", help="drafts know the prompts before")
    parser.add_argument("--verify", help="V(1),V(2),V(4),V(8),... instead of the measured ones")
    args = parser.parse_args()
    for model in args.models:
        n_vocab, texts, verify = texts_of(model, args)
        if args.verify:
            verify = given_verify(args.verify)
        replay = Replay(n_vocab, verify)
        found: dict[str, list[tuple[float, str, int]]] = {}
        for text in texts:
            if len(text.answer) < 3:
                continue
            memory, speeds = replay.table.copy(), []
            for _ in range(REPEATS):
                if args.remember:
                    replay.table = memory.copy()
                else:
                    replay.table.clear()
                speeds.append(replay.speedup(text))
            entry = (statistics.median(speeds), text.id, len(text.answer))
            found.setdefault(text.domain, []).append(entry)
        widths = ", ".join(f"V({width}) {verify[width]:.2f}" for width in (2, 4, 8, 16))
        print(f"{model}: {widths}")
        for domain, entries in found.items():
            mean, worst = geometric_mean([entry[0] for entry in entries]), min(entries)
            print(f"  {domain:14} {mean:.3f}  worst {worst[0]:.3f} {worst[1]} ({worst[2]} tokens)")
        every = [entry[0] for entries in found.values() for entry in entries]
        n_slow = sum(value < 0.98 for value in every)
        print(f"  all {geometric_mean(every):.4f}; {n_slow} of {len(every)} below 0.98")
        for line in calibration(replay.judged):
            print(line)


if __name__ == "__main__":
    main()
