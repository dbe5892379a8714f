"""Drafts of which each token is accepted with a given chance: measured against predicted speed, free of any proposer's luck.

A draft is plain decoding's own answer with one token spoilt, where the chance says that it ends. So rounds are real ones:
the target rejects the spoilt token by itself, and the answer stays plain decoding's. Lengths are the controller's choice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyssd.engine import Forced
from pyssd.propose import FreeDraft, Tokens

if TYPE_CHECKING:
    from pyssd.bench.runner import Run
    from pyssd.llama import Llama

SOURCE = "ngram"  # the arm that such rounds count under: their drafts are free, as copies are
_STEP = (math.sqrt(5.0) - 1.0) / 2.0


class Outcomes:
    """Lengths of accepted runs at a chance per token.

    They follow an even sequence instead of a random one: the share of each length is right within a few rounds, so that a
    short benchmark does not compare luck. The same seed gives the same lengths.

    Args:
        acceptance: chance of each token to be accepted if those before it were, 0 to 1.
        seed: where the sequence begins.
    """

    def __init__(self, acceptance: float, seed: int) -> None:
        self._acceptance = acceptance
        self._at = (0.5 + seed * _STEP) % 1.0

    def next(self, max_len: int) -> int:
        """Return how many of max_len tokens are accepted next."""
        self._at = (self._at + _STEP) % 1.0
        if self._acceptance >= 1.0:
            return max_len
        if self._acceptance <= 0.0:
            return 0
        # at least k tokens have the chance A^k: the inverse of that distribution
        length = math.log(1.0 - self._at) / math.log(self._acceptance)
        return min(int(length), max_len)


class SpoiltDrafts(Forced):
    """Proposes an answer that is known, spoilt where the outcome says.

    Args:
        answer: int32 [n], tokens of the answer as far as they are known.
        acceptance: the chance told to the controller.
        outcomes: how far each draft is right.
    """

    source = SOURCE

    def __init__(self, answer: Tokens, acceptance: float, outcomes: Outcomes) -> None:
        self._answer = answer
        self._acceptance = acceptance
        self._outcomes = outcomes
        self._at = 0  # of the next token in the answer
        self._n_right = 0

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Begin behind the first token of the answer."""
        del tokens, last_token
        self._at = 1

    def draft(self, max_len: int) -> FreeDraft | None:
        """Propose what is known of the rest of the answer, right up to the next outcome."""
        tokens = self._answer[self._at : self._at + max_len].copy()
        if not len(tokens):
            return None
        self._n_right = self._outcomes.next(len(tokens))
        if self._n_right < len(tokens):
            tokens[self._n_right] = 1 if tokens[self._n_right] == 0 else 0
        return FreeDraft(SOURCE, tokens, [self._acceptance] * len(tokens))

    def emitted(self, tokens: Tokens) -> None:
        """Go on behind these tokens."""
        self._at += len(tokens)

    def n_accepted(self, n_drafted: int) -> int:
        """Tell how many of the drafted tokens count as accepted."""
        return min(self._n_right, n_drafted)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a cost table promises for a chance of acceptance.

    Attributes:
        speedup: over plain decoding; 1 where no draft pays.
        draft_len: of the first round, 0 = plain.
    """

    speedup: float
    draft_len: int


def predict(
    table: Sequence[float], acceptance: float, tokens: int, switch: float = 0.0
) -> Prediction:
    """Return the speed-up of the best draft lengths, by the expected seconds of a whole answer.

    Near its end drafts get shorter, since no round may emit more than what is still wanted; an answer of a hundred tokens
    feels that, so the steady rate of tokens a second would promise too much.

    Args:
        table: seconds of a verify pass by width, the first entry unused.
        acceptance: chance of each token, 0 to 1.
        tokens: of the answer, those behind the first one; at least 1.
        switch: seconds that a pass takes longer whose width differs from the one before.
    """
    seconds = np.asarray(table[1:], np.float64)  # by draft length
    # expected seconds of what is left, by tokens left and by the draft length of the pass before
    left = np.zeros((tokens + 1, len(seconds)))
    draft_len, total = 0, 0.0
    for wanted in range(1, tokens + 1):
        n = min(len(seconds), wanted)  # the bonus token is wanted too
        rounds = seconds[:n].copy()
        reach = 1.0
        for k in range(n):  # k tokens are accepted: all of a draft of k, the first ones of a longer
            rest = left[wanted - k - 1]
            rounds[k] += reach * rest[k]
            rounds[k + 1 :] += reach * (1.0 - acceptance) * rest[k + 1 : n]
            reach *= acceptance
        draft_len = int(rounds.argmin())
        total = float(rounds[draft_len]) + switch
        left[wanted] = total
        left[wanted, :n] = np.minimum(total, rounds)
    return Prediction((tokens * float(table[1]) + switch) / total, draft_len)


class Forcing:
    """Forces the drafts of pyssd's runs, and notes what the cost model promised before each of them.

    Args:
        llm: the loaded model.
        acceptance: chance of each token.
        seed: of the outcomes.
    """

    def __init__(self, llm: Llama, acceptance: float, seed: int) -> None:
        self._llm = llm
        self._acceptance = acceptance
        self._outcomes = Outcomes(acceptance, seed)
        self._predictions: list[Prediction] = []

    @contextlib.contextmanager
    def __call__(self, plain: Run) -> Iterator[None]:
        """Force drafts while it is entered; plain is a run of the same prompt without drafts."""
        planner = self._llm._planner
        if planner is None:
            yield  # a model that cannot draft: its own reason is in the statistics
            return
        costs = planner.controller.costs
        middle = (plain.n_prompt + len(plain.evaluated)) // 2
        tokens = max(len(plain.answer), 1)
        self._predictions.append(
            predict(costs.table(middle), self._acceptance, tokens, costs.switch_seconds)
        )
        planner.forced = SpoiltDrafts(
            plain.answer.astype(np.int32), self._acceptance, self._outcomes
        )
        try:
            yield
        finally:
            planner.forced = None

    def take(self) -> dict[str, Any]:
        """Return the predictions since the last call, JSON values only."""
        predictions, self._predictions = self._predictions, []
        return {
            "predicted_speedup": [round(one.speedup, 4) for one in predictions],
            "draft_len": [one.draft_len for one in predictions],
        }
