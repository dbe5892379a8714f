"""The round of self-speculative decoding: draft, verify, accept.

KV invariant, kept by the Session and relied on here: between calls, KV holds exactly the target's own cells for
positions < n_past, and nothing else. The last emitted token is not among them; it is the first token of the next
verify pass. What the draft writes is gone before verify begins; what verify writes beyond the accepted run is gone when
it ends.

A round drafts up to gamma tokens with some blocks skipped, evaluates the last token and the draft in one target pass,
and samples row by row with the target's own chain until a sample differs from the draft. So each emitted token is a
sample of the target, whatever the draft was (sample and match; Leviathan et al. 2211.17192 accept by a ratio of
probabilities instead). Plain decoding is the same round with an empty draft.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyssd._core import Session
from pyssd.config import SpecConfig
from pyssd.controller import Controller
from pyssd.stats import SpecStats

Tokens = npt.NDArray[np.int32]
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How one generation drafts.

    Attributes:
        skip: uint8 [n_blocks], 1 = skipped; None = decode plainly.
        skip_set: The set as text, "" if plain.
        config: Draft length, confidence, head rows.
        controller: Decides round by round; it outlives the generation.
        reason: Why decoding is plain, or where the set comes from.
    """

    skip: npt.NDArray[np.uint8] | None
    skip_set: str
    config: SpecConfig
    controller: Controller
    reason: str

    @classmethod
    def plain(cls, controller: Controller, reason: str) -> DraftPlan:
        """A plan that never drafts."""
        return cls(None, "", SpecConfig(), controller, reason)


class Engine:
    """Runs the rounds of one generation and counts what they do.

    Args:
        session: The sequence; its prompt is evaluated.
        n_ctx: Cells of the context.
        plan: How to draft.
        wanted: Tokens the caller takes at most; None = as many as fit.
    """

    def __init__(self, session: Session, n_ctx: int, plan: DraftPlan, wanted: int | None) -> None:
        self.session = session
        self.plan = plan
        self.stats = SpecStats(skip_set=plan.skip_set, reason=plan.reason)
        self._n_ctx = n_ctx
        self._wanted = _UNBOUNDED if wanted is None else wanted
        self._round_seconds = 0.0
        self._drafting = False
        self._counters = session.counters()
        self._graphs = sum(session.graphs_built().values())
        if plan.skip is not None:
            session.set_skip(plan.skip, plan.config.head_rows)

    def rounds(self, chain: int, last_token: int) -> Iterator[list[int]]:
        """Yield what each round emits, until the context is full.

        Args:
            chain: Address of the target's sampler chain.
            last_token: Emitted before, not in KV yet.
        """
        while self.has_room():
            started = time.perf_counter()
            draft_tokens = self.draft(chain, last_token)
            emitted: list[int] = self.session.verify(chain, last_token, draft_tokens).tolist()
            self.accept(draft_tokens, emitted, time.perf_counter() - started)
            yield emitted
            last_token = emitted[-1]

    def has_room(self) -> bool:
        """Tell whether one more token can be evaluated."""
        return self.session.n_past < self._n_ctx

    def draft(self, chain: int, last_token: int) -> Tokens:
        """Propose tokens with the draft, int32 [0..gamma]; empty where plain decoding is the choice."""
        self._drafting = False
        if self.plan.skip is None or not self.plan.controller.wants_draft():
            return _NO_TOKENS
        config = self.plan.config
        # the bonus token of the round is wanted too, so the draft is at most one shorter than what is still wanted
        still_wanted = self._wanted - self.stats.emitted
        max_len = min(config.max_draft_len, self.session.max_draft(self._n_ctx), still_wanted - 1)
        if max_len <= 0:
            return _NO_TOKENS
        self._drafting = True
        draft_tokens, _ = self.session.draft(chain, last_token, max_len, config.min_confidence)
        return draft_tokens

    def accept(self, draft_tokens: Tokens, emitted: Sequence[int], seconds: float) -> None:
        """Account for a round: the accepted run, and one token of the target's own unless the run ended the text."""
        self.stats.decode_seconds += seconds
        self.plan.controller.observe(drafting=self._drafting, emitted=len(emitted), seconds=seconds)
        n_drafted = len(draft_tokens)
        if n_drafted == 0:
            return
        accepted = len(emitted) - 1
        if accepted < n_drafted and emitted[accepted] == draft_tokens[accepted]:
            accepted += 1
        stats = self.stats
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += accepted
        if len(stats.accepted_per_pos) < n_drafted:
            stats.accepted_per_pos.extend([0] * (n_drafted - len(stats.accepted_per_pos)))
        for position in range(accepted):
            stats.accepted_per_pos[position] += 1

    def finish(self) -> SpecStats:
        """Complete the statistics; call it once, when the generation ends."""
        stats, controller = self.stats, self.plan.controller
        counters = self.session.counters()
        stats.draft_seconds = counters["draft_seconds"] - self._counters["draft_seconds"]
        stats.verify_seconds = counters["verify_seconds"] - self._counters["verify_seconds"]
        stats.graphs_built = sum(self.session.graphs_built().values()) - self._graphs
        if stats.accepted:
            stats.accepted_by = {"skip": stats.accepted}
        if self.plan.skip is None:
            return stats
        plain = controller.plain_seconds_per_token
        if stats.rounds and plain is not None and stats.decode_seconds > 0.0:
            stats.speedup = plain * stats.emitted / stats.decode_seconds
        stats.reason = f"{self.plan.reason}; {controller.describe()}"
        return stats
