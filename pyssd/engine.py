"""The round of self-speculative decoding: draft, verify, accept.

KV invariant, kept by the Session and relied on here: between calls, KV holds exactly the target's own cells for
positions < n_past, and nothing else. The last emitted token is not among them; it is the first token of the next
verify pass. What the draft writes is gone before verify begins; what verify writes beyond the accepted run is gone when
it ends.

A round drafts tokens, copied from the context or by the model with some blocks skipped, evaluates the last token and
the draft in one target pass, and samples row by row with the target's own chain until a sample differs from the draft.
So each emitted token is a sample of the target, whatever the draft was (sample and match; Leviathan et al. 2211.17192
accept by a ratio of probabilities instead). Plain decoding is the same round with an empty draft.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyssd._core import NgramIndex, Session
from pyssd.config import SpecConfig
from pyssd.controller import Controller
from pyssd.propose import NO_DRAFT, Draft, Proposer, Tokens
from pyssd.propose.ngram import NgramProposer
from pyssd.propose.skip import SkipProposer
from pyssd.stats import SpecStats

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How one generation drafts; with neither a skip set nor an index it decodes plainly.

    Attributes:
        skip: uint8 [n_blocks], 1 = skipped; None = no skip drafts.
        skip_set: The set as text, "" if there is none.
        config: Draft lengths, confidence, head rows.
        controller: Decides round by round; it outlives the generation.
        reason: Why decoding is plain, or where drafts come from.
        index: The tokens to copy from; None = no n-gram drafts. It outlives the generation.
    """

    skip: npt.NDArray[np.uint8] | None
    skip_set: str
    config: SpecConfig
    controller: Controller
    reason: str
    index: NgramIndex | None = None

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
        self._counters = session.counters()
        self._graphs = sum(session.graphs_built().values())
        self._ngram: NgramProposer | None = None
        self._proposers: list[Proposer] = []  # asked in this order: first what costs nothing
        if plan.index is not None:
            self._ngram = NgramProposer(plan.index, plan.config.max_ngram_len, self._worth)
            self._proposers.append(self._ngram)
        if plan.skip is not None:
            self._proposers.append(SkipProposer(session, plan.skip, plan.config))
        plan.controller.begin()

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Tell what rounds go on behind: the int32 [n] tokens evaluated, and the one emitted last."""
        if self._ngram is not None:
            self._ngram.sync(tokens, last_token)

    def rounds(self, chain: int, last_token: int) -> Iterator[list[int]]:
        """Yield what each round emits, until the context is full.

        Args:
            chain: Address of the target's sampler chain.
            last_token: Emitted before, not in KV yet.
        """
        while self.has_room():
            started = time.perf_counter()
            draft = self.draft(chain, last_token)
            drafted = time.perf_counter()
            emitted: list[int] = self.session.verify(chain, last_token, draft.tokens).tolist()
            self.accept(draft, emitted, drafted - started, time.perf_counter() - drafted)
            yield emitted
            last_token = emitted[-1]

    def has_room(self) -> bool:
        """Tell whether one more token can be evaluated."""
        return self.session.n_past < self._n_ctx

    def draft(self, chain: int, last_token: int) -> Draft:
        """Propose tokens by the first means that has some; none where plain decoding is the choice."""
        draft = NO_DRAFT
        if not self._proposers:
            return draft
        # the bonus token of the round is wanted too, so the draft is at most one shorter than what is still wanted
        still_wanted = self._wanted - self.stats.emitted
        max_len = min(self.session.max_draft(self._n_ctx), still_wanted - 1)
        if max_len <= 0:
            return draft
        for proposer in self._proposers:
            if self.plan.controller.wants(proposer.source):
                draft = proposer.propose(chain, last_token, max_len)
                if len(draft.tokens):
                    break
        return draft

    def accept(
        self, draft: Draft, emitted: Sequence[int], draft_seconds: float, verify_seconds: float
    ) -> None:
        """Account for a round: the accepted run, and one token of the target's own unless the run ended the text."""
        stats, draft_tokens = self.stats, draft.tokens
        n_drafted = len(draft_tokens)
        stats.decode_seconds += draft_seconds + verify_seconds
        stats.rounds_by[draft.source] = stats.rounds_by.get(draft.source, 0) + 1
        self.plan.controller.observe(
            source=draft.source,
            emitted=len(emitted),
            width=n_drafted + 1,
            seconds=draft_seconds + verify_seconds,
            verify_seconds=verify_seconds,
        )
        for proposer in self._proposers:
            proposer.emitted(emitted)
        if n_drafted == 0:
            return
        accepted = len(emitted) - 1
        if accepted < n_drafted and emitted[accepted] == draft_tokens[accepted]:
            accepted += 1
        stats.rounds += 1
        stats.drafted += n_drafted
        stats.accepted += accepted
        stats.accepted_by[draft.source] = stats.accepted_by.get(draft.source, 0) + accepted
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
        if not self._proposers:
            return stats
        plain = controller.plain_seconds_per_token
        if stats.rounds and plain is not None and stats.decode_seconds > 0.0:
            stats.speedup = plain * stats.emitted / stats.decode_seconds
        sources = [proposer.source for proposer in self._proposers]
        stats.reason = f"{self.plan.reason}; {controller.describe(sources)}"
        return stats

    def _worth(self, chances: Sequence[float]) -> int:
        """Cut an n-gram draft to what pays; who asked for a draft in every round gets a token where nothing else drafts."""
        n = self.plan.controller.worth(chances)
        is_asked = self.plan.controller.always and self.plan.skip is None
        return max(n, 1) if is_asked else n
