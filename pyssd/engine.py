"""The round of self-speculative decoding: choose, draft, verify, accept.

KV invariant, kept by the Session and relied on here: between calls, KV holds exactly the target's own cells for
positions < n_past, and nothing else. The last emitted token is not among them; it is the first token of the next
verify pass. What the draft writes is gone before verify begins; what verify writes beyond the accepted run is gone when
it ends.

A round drafts tokens (copied from the context, recycled from earlier rows, or decoded with some blocks skipped),
evaluates the last token and the draft in one target pass, and samples row by row with the target's own chain until a
sample differs from the draft. So each emitted token is a sample of the target, whatever the draft was (sample and match;
Leviathan et al. 2211.17192 accept by a ratio of probabilities instead). Plain decoding is the same round with an empty
draft. Which of them a round is, the controller decides by measured costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyssd._core import NgramIndex, RecycleTable, Session
from pyssd.choice import Choice
from pyssd.config import SpecConfig
from pyssd.controller import Controller
from pyssd.propose import EMPTY, PLAIN, FreeDraft, FreeProposer, Tokens
from pyssd.propose.ngram import NgramProposer
from pyssd.propose.recycle import RecycleProposer
from pyssd.propose.skip import SkipArm
from pyssd.report import decision
from pyssd.stats import SpecStats

_UNBOUNDED = 1 << 30


class Forced(FreeProposer):
    """Free drafts whose outcome is decided beforehand, for measuring what rounds cost; the text means nothing."""

    def n_accepted(self, n_drafted: int) -> int:
        """Tell how many of the drafted tokens count as accepted."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How one generation drafts; without any means it decodes plainly.

    Attributes:
        controller: Decides round by round; it outlives the generation.
        config: Longest drafts, thresholds.
        reason: Why decoding is plain, or where drafts come from.
        skip: A skip set that may draft, or None.
        index: The tokens to copy from, or None. It outlives the generation, as the next one does.
        table: What the target ranked highest, or None.
        guard: Margin of the near-tie guard in logits, 0 = none.
        always: Draft wherever there is something to draft.
        forced: Replaces the other means, or None.
    """

    controller: Controller
    config: SpecConfig
    reason: str
    skip: SkipArm | None = None
    index: NgramIndex | None = None
    table: RecycleTable | None = None
    guard: float = 0.0
    always: bool = False
    forced: Forced | None = None


@dataclass(slots=True)
class Round:
    """A draft on its way through verification.

    Attributes:
        choice: Why it is what it is.
        tokens: int32 [n], what the target evaluates behind the last token; may be empty.
        n_free: Tokens of a free draft, which come first.
        n_drafted: Tokens that were meant; those behind them only pad the pass to a width whose graph exists.
        confidences: Of the tokens that the skip set drafted.
        n_steps: Passes of the draft context.
        started: When it began, in seconds of time.perf_counter.
        drafted: When the draft was there.
    """

    choice: Choice
    tokens: Tokens
    n_free: int
    n_drafted: int
    confidences: Sequence[float]
    n_steps: int
    started: float
    drafted: float


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
        self.stats = SpecStats(reason=plan.reason)
        self._controller = plan.controller
        self._n_ctx = n_ctx
        self._wanted = _UNBOUNDED if wanted is None else wanted
        self._counters = session.counters()
        self._graphs = sum(session.graphs_built().values())
        self.n_start = session.n_past  # cells of the prompt
        config = plan.config
        self._free: list[FreeProposer] = []
        self._recycler: RecycleProposer | None = None
        if plan.forced is not None:
            self._free.append(plan.forced)
        if plan.index is not None:
            self._free.append(NgramProposer(plan.index, config.max_ngram_len))
        if plan.table is not None:
            self._recycler = RecycleProposer(plan.table, config.max_ngram_len)
            self._free.append(self._recycler)
        if plan.skip is not None:
            self.stats.skip_set = plan.skip.text
            session.set_skip(plan.skip.bits, plan.skip.head_rows)
        self._is_plain = not self._free and plan.skip is None
        self._controller.begin(plan.skip, config.max_draft_len, always=plan.always)

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Tell what rounds go on behind: the int32 [n] tokens evaluated, and the one emitted last."""
        for proposer in self._free:
            proposer.start(tokens, last_token)
        if self._recycler is not None and len(tokens):
            before = int(tokens[-2]) if len(tokens) > 1 else -1
            self.session.recycle(self._recycler.table, before, tokens[-1:])

    def rounds(self, chain: int, last_token: int) -> Iterator[list[int]]:
        """Yield what each round emits, until the context is full.

        Args:
            chain: Address of the target's sampler chain.
            last_token: Emitted before, not in KV yet.
        """
        session, recycler, forced = self.session, self._recycler, self.plan.forced
        guard = self.plan.guard
        while self.has_room():
            turn = self.draft(chain, last_token)
            if forced is not None:
                emitted = self._force(forced, chain, last_token, turn)
            elif recycler is not None:
                emitted = session.verify(
                    chain,
                    last_token,
                    turn.tokens,
                    recycler.table,
                    recycler.before,
                    guard=guard,
                    drafted=turn.n_drafted,
                )
            else:
                emitted = session.verify(chain, last_token, turn.tokens, guard=guard)
            self.accept(turn, emitted, time.perf_counter() - turn.drafted)
            tokens: list[int] = emitted.tolist()
            yield tokens
            last_token = tokens[-1]

    def has_room(self) -> bool:
        """Tell whether one more token can be evaluated."""
        return self.session.n_past < self._n_ctx

    def draft(self, chain: int, last_token: int) -> Round:
        """Choose what to try, and draft it."""
        started = time.perf_counter()
        if self._is_plain:
            return Round(Choice(PLAIN), EMPTY, 0, 0, (), 0, started, started)
        session = self.session
        # the bonus token of the round is wanted too, so the draft is at most one shorter than what is still wanted
        max_len = min(session.max_draft(self._n_ctx), self._wanted - self.stats.emitted - 1)
        drafts: list[FreeDraft] = []
        if max_len > 0:
            for proposer in self._free:
                draft = proposer.draft(max_len)
                if draft is not None:
                    drafts.append(draft)
        choice = self._controller.choose(session.n_past, drafts, max_len)
        tokens, n_free = EMPTY, choice.length
        if choice.free is not None:
            tokens = choice.free.tokens[:n_free]
        if choice.rule is not None:
            return self._draft_on(chain, last_token, tokens, max_len, choice, started)
        if choice.width > n_free + 1:
            # any token will do: the last one is at hand
            padding = np.full(choice.width - 1 - n_free, last_token, dtype=np.int32)
            tokens = np.concatenate((tokens, padding))
        return Round(choice, tokens, n_free, n_free, (), 0, started, time.perf_counter())

    def _draft_on(
        self, chain: int, last_token: int, prefix: Tokens, max_len: int, choice: Choice, started: float
    ) -> Round:  # fmt: skip
        """Let the model draft behind the prefix, which may be empty."""
        session, config = self.session, self.plan.config
        room = min(config.max_draft_len, max_len - len(prefix))
        steps = session.draft_steps
        if config.min_confidence is None:
            tokens, confidences = session.draft(chain, last_token, room, 0.0, choice.rule, prefix)
        else:
            tokens, confidences = session.draft(
                chain, last_token, room, config.min_confidence, None, prefix
            )
        n_free = len(prefix)
        if n_free:
            tokens = np.concatenate((prefix, tokens))
        n_steps = session.draft_steps - steps
        drafted = time.perf_counter()
        return Round(
            choice, tokens, n_free, len(tokens), confidences.tolist(), n_steps, started, drafted
        )

    def _force(self, forced: Forced, chain: int, last_token: int, turn: Round) -> Tokens:
        """Verify, and emit what was decided beforehand; what the target sampled counts for the last token only."""
        session, tokens = self.session, turn.tokens
        session.verify_begin(last_token, tokens)
        n = forced.n_accepted(turn.n_drafted)
        token = session.sample(chain, n)
        session.verify_end(n + 1)
        return np.append(tokens[:n], np.int32(token))

    def learn_rows(self, turn: Round, last_token: int, n_emitted: int) -> None:
        """Recycle the rows of a round that is sampled row by row, before it is closed."""
        if self._recycler is not None:
            tokens = np.append(np.int32(last_token), turn.tokens)
            tokens[turn.n_drafted + 1 :] = -1  # padding teaches nothing
            table, before = self._recycler.table, self._recycler.before
            self.session.recycle(table, before, tokens, n_emitted)

    def accept(self, turn: Round, emitted: Tokens, verify_seconds: float) -> None:
        """Account for a round: the accepted run, and one token of the target's own unless the run ended the text."""
        stats, choice, n_drafted = self.stats, turn.choice, turn.n_drafted
        draft_seconds = turn.drafted - turn.started
        stats.decode_seconds += draft_seconds + verify_seconds
        arm = choice.arm
        stats.rounds_by[arm] = stats.rounds_by.get(arm, 0) + 1
        if self._is_plain:
            return
        began = time.perf_counter()
        tokens = turn.tokens
        accepted = n_emitted = len(emitted)
        if n_emitted > len(tokens) or emitted[-1] != tokens[n_emitted - 1]:
            accepted -= 1
        n_skip = n_drafted - turn.n_free
        for proposer in self._free:
            proposer.emitted(emitted)
        self._controller.observe(
            choice,
            n_past=max(0, self.session.n_past - n_emitted),
            width=len(tokens) + 1,
            emitted=n_emitted,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            confidences=turn.confidences,
            n_accepted=min(accepted, n_drafted) - turn.n_free if n_skip else -1,
            n_steps=turn.n_steps,
        )
        if n_drafted:
            n_drafted = max(n_drafted, accepted)  # a token of the padding may be right
            stats.rounds += 1
            stats.drafted += n_drafted
            stats.accepted += accepted
            stats.accepted_by[arm] = stats.accepted_by.get(arm, 0) + accepted
            per_pos = stats.accepted_per_pos
            if len(per_pos) < n_drafted:
                per_pos.extend([0] * (n_drafted - len(per_pos)))
            for position in range(accepted):
                per_pos[position] += 1
        seconds = time.perf_counter() - began
        stats.decode_seconds += seconds
        stats.controller_seconds += seconds + (0.0 if turn.n_steps else draft_seconds)

    def finish(self) -> SpecStats:
        """Complete the statistics; call it once, when the generation ends."""
        stats, controller = self.stats, self._controller
        counters = self.session.counters()
        stats.draft_seconds = counters["draft_seconds"] - self._counters["draft_seconds"]
        stats.verify_seconds = counters["verify_seconds"] - self._counters["verify_seconds"]
        stats.settled = int(counters["guard_rows"] - self._counters["guard_rows"])
        stats.graphs_built = sum(self.session.graphs_built().values()) - self._graphs
        stats.decision = self.plan.reason
        if self._is_plain:
            return stats
        n_past = (self.n_start + self.session.n_past) // 2
        plain = controller.plain_seconds(n_past)
        n_rounds = sum(stats.rounds_by.values())
        if n_rounds and controller.is_measured and stats.decode_seconds > 0.0:
            emitted = self.session.n_past - self.n_start
            stats.speedup = plain * emitted / stats.decode_seconds
        stats.prediction_error = controller.median_errors()
        stats.decision = decision(self.plan, stats, controller, n_past)
        stats.reason = f"{self.plan.reason}; {stats.decision}"
        return stats
