"""The near-tie guard on upstream's kernels: how many texts fork from plain decoding's, and what preventing it costs.

Each prompt is evaluated once; then every arm continues it greedily from the same cells, one after the other:

    plain       no drafts
    unguarded   drafts, verified by upstream's kernels as they are
    single      drafts as by default: each row of a verify pass computed as if it were alone
    settled     unguarded, but near-ties are decided by a pass of one token, behind the cells as they are
    rewritten   the same, after the cells that wide passes have written were written again singly

A fork is a text that differs from plain's. Slow-down is the decode time of an arm over that of the unguarded arm of the same
prompt, draft and verify included. Resumable: a prompt that the output holds is not run again. Usage:

    python benchmarks/guard.py [--model NAME ...] [--prompts 100] [--tokens 128] [--margin 0.4] [--seconds 110]

The machine must be quiet for the times; texts do not depend on it, as far as the controller chooses alike.
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
from pyssd.guard import DEFAULT_MARGIN
from pyssd.models import find_model

DOMAINS = ("chat", "code", "code_edit", "gsm8k", "summarization", "text_to_sql", "storytelling")
# speculative, rows computed singly, guard: None or whether it rewrites cells
ARMS: dict[str, tuple[Any, bool, bool | None]] = {
    "plain": ("off", False, None),
    "unguarded": ("auto", False, None),
    "single": ("auto", True, None),
    "settled": ("auto", False, False),
    "rewritten": ("auto", False, True),
}


class Guarded:
    """A session whose verify has a guard; everything else is the session's own."""

    def __init__(self, session: Any, margin: float) -> None:
        self.session = session
        self._margin = margin
        self.rewrite: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def verify(self, *args: Any, **options: Any) -> Any:
        """Session.verify under the guard, if there is one."""
        if self.rewrite is not None:
            options.update(guard=self._margin, rewrite=self.rewrite)
        return self.session.verify(*args, **options)


def read_prompts(folder: Path, n: int) -> list[tuple[str, str, str]]:
    """Take (domain, id, prompt) of the first prompts of each domain in turn, so that any part is a fair mixture."""
    files = {
        domain: (folder / f"{domain}.dev.jsonl").read_text(encoding="utf-8").splitlines()
        for domain in DOMAINS
    }
    found = []
    for i in range(max(map(len, files.values()))):
        for domain, lines in files.items():
            if i < len(lines):
                row = json.loads(lines[i])
                found.append((domain, row["id"], row["prompt"]))
    return found[:n]


def measure(
    llm: Any, guarded: Guarded, prompt: str, n_tokens: int, arms: list[str], index: int
) -> dict[str, Any] | None:
    """Run one prompt through plain and the arms; None if it does not fit."""
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    tokens = llm.tokenize(chat.encode(), special=True)
    if len(tokens) + n_tokens > llm.n_ctx():
        return None
    llm.reset()
    # two tokens: behind one the prompt's last row would still be live for the first arm alone
    llm.create_completion(tokens, max_tokens=2, temperature=0.0, speculative="off")
    session = guarded.session
    row: dict[str, Any] = {"prompt_tokens": len(tokens), "arms": {}}
    texts: dict[str, list[int]] = {}
    drafting = [name for name in arms if name != "plain"]
    turn = index % len(drafting)  # no arm always comes first
    for name in ("plain", *drafting[turn:], *drafting[:turn]):
        speculative, session.single_rows, guarded.rewrite = ARMS[name]
        llm._planner.forget_drafts()  # what an arm has learnt from this text must not help the next one
        before = guarded.counters()
        # all but the last token of the prompt are reused: every arm starts from the same cells
        llm.create_completion(tokens, max_tokens=n_tokens, temperature=0.0, speculative=speculative)
        after = guarded.counters()
        texts[name] = llm.input_ids[len(tokens) : llm.n_tokens].tolist()
        stats = llm.stats
        row["arms"][name] = {
            "emitted": stats.emitted,
            "seconds": round(stats.decode_seconds, 4),
            "drafted_rounds": stats.rounds,
            "accepted": stats.accepted,
            "guard_rows": int(after["guard_rows"] - before["guard_rows"]),
            "guard_passes": int(after["guard_passes"] - before["guard_passes"]),
            "fork": first_difference(texts["plain"], texts[name]),
        }
    guarded.rewrite = None
    session.single_rows = True
    return row


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Position of the first token that differs; None if the texts are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fork rates and paired times."""
    summary: dict[str, Any] = {"prompts": len(rows)}
    # the first prompts pay for the search for a skip set and for the controller's trials
    for name in ARMS:
        having = [row["arms"] for row in rows if name in row["arms"]]
        if not having:
            continue
        arms = [row[name] for row in having]
        per_token = [arm["seconds"] / max(1, arm["emitted"]) for arm in arms]
        forked = [arm["fork"] is not None for arm in arms]
        entry: dict[str, Any] = {
            "prompts": len(arms),
            "forks": sum(forked),
            "fork_rate": round(statistics.mean(forked), 3),
            "share_of_prompts_with_accepted_drafts": round(
                statistics.mean(arm["accepted"] > 0 for arm in arms), 3
            ),
            "guard_rows": sum(arm["guard_rows"] for arm in arms),
            "guard_passes": sum(arm["guard_passes"] for arm in arms),
            "milliseconds_per_token": round(1e3 * statistics.mean(per_token), 3),
        }
        if name not in ("plain", "unguarded"):
            base = [
                row["unguarded"]["seconds"] / max(1, row["unguarded"]["emitted"]) for row in having
            ]
            ratios = [time / other for time, other in zip(per_token, base, strict=True) if other]
            entry["slow_down_median"] = round(statistics.median(ratios) - 1.0, 4)
            entry["slow_down_mean"] = round(sum(per_token) / sum(base) - 1.0, 4)
            entry["slow_down_interval"] = interval(np.array(per_token), np.array(base))
        summary[name] = entry
    return summary


def interval(times: Any, base: Any) -> list[float]:
    """Bootstrap 95% interval of the mean slow-down, prompts resampled."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(times), (2000, len(times)))
    ratios = times[picks].sum(axis=1) / base[picks].sum(axis=1) - 1.0
    return [round(float(q), 4) for q in np.quantile(ratios, (0.025, 0.975))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--margin", type=float, default=DEFAULT_MARGIN)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/guard.json"))
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    result: dict[str, Any] = {"models": {}}
    if args.out.is_file():
        result = json.loads(args.out.read_text(encoding="utf-8"))
    result.update(
        command=" ".join(["python", *sys.argv]),
        machine=f"{platform.machine()}, {os.cpu_count()} processors",
        kernels="upstream",
        tokens=args.tokens,
        margin=args.margin,
        domains=list(DOMAINS),
    )
    for model in args.model:
        entry = result["models"].setdefault(model, {"summary": {}, "prompts": {}})
        todo = [
            item
            for item in read_prompts(args.data, args.prompts)
            if f"{item[0]}/{item[1]}" not in entry["prompts"]
        ]
        if not todo or time.monotonic() > deadline:
            continue
        with pyssd.Llama(
            str(find_model(model)), n_ctx=2048, kernels="upstream", verbose=False
        ) as llm:
            guarded = Guarded(llm._session, args.margin)
            llm._session = llm._planner._session = guarded
            measure(
                llm, guarded, "Count from one to ten, twice.", 64, args.arms, 0
            )  # searches and trials
            for domain, name, prompt in todo:
                if time.monotonic() > deadline:
                    break
                row = measure(llm, guarded, prompt, args.tokens, args.arms, len(entry["prompts"]))
                if row is not None:
                    entry["prompts"][f"{domain}/{name}"] = row
                    write(args.out, result)
        entry["summary"] = summarise(list(entry["prompts"].values()))
        print(model, json.dumps(entry["summary"], indent=1), file=sys.stderr)
        write(args.out, result)


def write(path: Path, result: dict[str, Any]) -> None:
    """Keep what there is: the next run goes on from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
