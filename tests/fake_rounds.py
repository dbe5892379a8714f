"""A text and a clock made up: rounds as the engine runs them, with known costs and a known chance at every position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pyssd.choice import Choice
from pyssd.controller import Controller
from pyssd.cost import MAX_WIDTH
from pyssd.propose import EMPTY, SKIP, FreeDraft
from pyssd.propose.skip import SkipArm


class FakeCosts:
    """True costs, known beforehand: a pass of width 4 takes v4 plain passes, a draft step c of one."""

    measured = True
    scale = 1.0

    def __init__(self, v4: float, c: float = 0.6, switch: float = 0.0) -> None:
        self.switch_units = switch
        self.c = c
        self.by_width = [0.0] + [1.0 + (v4 - 1.0) / 3.0 * (w - 1) for w in range(1, MAX_WIDTH + 1)]

    def units(self, n_past: int) -> Sequence[float]:
        return self.by_width

    def draft_seconds(self, skip: object, n_past: int, head_rows: int = 0) -> float:
        return self.c

    def observe_verify(self, width: int, n_past: int, seconds: float, *, switched: bool) -> None:
        pass

    def observe_draft(self, predicted: float, seconds: float) -> None:
        pass


@dataclass
class Text:
    """Whether a drafted token is right at each position, by means.

    Attributes:
        skip: bool [n].
        free: bool [n], of a free draft; its stated chances follow.
        chances: float [n], of each position of the free draft to be right, as the proposer states it; 0 = no draft.
    """

    skip: np.ndarray
    free: np.ndarray
    chances: np.ndarray

    @classmethod
    def drawn(
        cls, n: int, agreement: Callable[[int], float], chance: Callable[[int], float], seed: int
    ) -> Text:
        rng = np.random.default_rng(seed)
        chances = np.array([chance(i) for i in range(n + 100)])
        agreements = np.array([agreement(i) for i in range(n + 100)])
        return cls(rng.random(n + 100) < agreements, rng.random(n + 100) < chances, chances)


@dataclass
class Outcome:
    seconds: float
    rounds_by: dict[str, int]


def run(
    controller: Controller,
    costs: FakeCosts,
    text: Text,
    n: int,
    *,
    skip: SkipArm | None = None,
    max_len: int = 15,
    slow_round: int = -1,
    confidence: float = 0.9,
) -> Outcome:
    """Emit n tokens; the clock runs by the costs, and one round may take ten times as long."""
    controller.begin(skip, max_len if skip is not None else 0)
    seconds, at, last_width, n_rounds = 0.0, 0, 0, 0
    rounds_by: dict[str, int] = {}
    while at < n:
        drafts = []
        if text.chances[at] > 0.0:
            drafts.append(FreeDraft("ngram", EMPTY, text.chances[at : at + max_len].tolist()))
        choice = controller.choose(at, drafts, max_len)
        right = text.free[at : at + choice.length]
        n_steps, confidences = 0, []
        width = max(choice.width, choice.length + 1)
        if choice.rule is not None:
            n_drafted, n_steps = drafted(choice, confidence, max_len)
            confidences = [confidence] * n_drafted
            right = np.append(right, text.skip[at + choice.length :][:n_drafted])
            width = len(right) + 1
        accepted = len(right) if right.all() else int(np.argmin(right))
        draft_seconds = n_steps * costs.c
        verify_seconds = costs.by_width[width] + (
            costs.switch_units if width != last_width else 0.0
        )
        if n_rounds == slow_round:
            verify_seconds *= 10.0
        controller.observe(
            choice,
            n_past=at,
            width=width,
            emitted=accepted + 1,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            confidences=confidences,
            n_accepted=accepted - choice.length if choice.rule is not None else -1,
            n_steps=n_steps,
        )
        rounds_by[choice.arm] = rounds_by.get(choice.arm, 0) + 1
        seconds += draft_seconds + verify_seconds
        at += accepted + 1
        last_width = width
        n_rounds += 1
    return Outcome(seconds, rounds_by)


def drafted(choice: Choice, confidence: float, max_len: int) -> tuple[int, int]:
    """Tokens and steps of a skip draft by the rule, every token being drafted with the same confidence (see draft.cpp)."""
    rule = choice.rule
    assert rule is not None
    chance = float(rule.chances[bisect_right(rule.edges.tolist(), confidence)])
    reach, n, steps = 1.0, 0, 0
    while n < min(max_len, len(rule.keep_reach)):
        steps += 1
        reach *= chance
        if reach < rule.keep_reach[n]:
            break
        n += 1
        if n < len(rule.draft_reach) and reach < rule.draft_reach[n]:
            break
    return n, steps


def best_fixed(
    costs: FakeCosts, text: Text, n: int, *, with_skip: bool, slow_round: int = -1
) -> tuple[float, str, int]:
    """Seconds of the best fixed choice for the whole text, its arm and its length: what hindsight would have chosen."""
    results = []
    arms = ["ngram"] + ([SKIP] if with_skip else [])
    for arm in arms:
        bits = text.free if arm == "ngram" else text.skip
        for length in range(16):
            seconds, at, rounds = 0.0, 0, 0
            while at < n:
                right = bits[at : at + length]
                accepted = len(right) if right.all() else int(np.argmin(right))
                step = length * costs.c if arm == SKIP else 0.0
                verify = costs.by_width[length + 1] * (10.0 if rounds == slow_round else 1.0)
                seconds += step + verify
                at += accepted + 1
                rounds += 1
            results.append((seconds, arm if length else "plain", length))
    return min(results)
