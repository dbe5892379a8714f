"""How a generation drafts: from the options of the call and the object, and from what was learnt before."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from pyssd._core import NgramIndex, RecycleTable, Session
from pyssd.choice import Costs
from pyssd.config import Mode, SpecConfig
from pyssd.controller import Controller
from pyssd.engine import DraftPlan, Forced
from pyssd.errors import Cancelled, PyssdError
from pyssd.propose.skip import SkipArm
from pyssd.select import find_skip_set
from pyssd.select.pricing import HeadTrim, possible_speedup
from pyssd.skipset import Block, SkipSet

_MIN_WANTED = 32  # a request for fewer tokens cannot win back the seconds of a search
_MAX_INDEXED = 1 << 16  # tokens to copy from; an index of this size takes 4 MB
_FREE_SPEEDUP = 1.1  # of free drafts, before anything is known
_SEARCH_GAIN = 1.03  # over what is reached without, for a search to pay
_LOG = logging.getLogger("pyssd")

SkipSetLike = SkipSet | str | Path | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What drafts were recycled from at some moment (Llama.draft_memory).

    Attributes:
        table: A copy of the recycling table, or None where nothing had been recycled yet.
    """

    table: RecycleTable | None


class Planner:
    """Chooses a DraftPlan for each generation, and remembers sets, costs, rates and tokens between them.

    Args:
        session: The object's session.
        blocks: The model's blocks; empty where the session refuses speculation.
        costs: What rounds cost; corrected as they run.
        speculative: The object's option, already checked.
        skip_set: The object's option, already checked against the blocks; None = search for one.
        n_vocab: Rows of the LM head.
        n_ctx: Cells of the context.
        can_trim: Whether the LM head may be trimmed; with a LoRA it may not.
        is_exact: Whether rows are the same at every width; then there is nothing for a near-tie guard to do.

    Attributes:
        forced: Replaces all means of drafting while it is set (see Forced).
    """

    def __init__(
        self,
        session: Session,
        blocks: Sequence[Block],
        costs: Costs,
        speculative: object,
        skip_set: SkipSet | None,
        n_vocab: int,
        n_ctx: int,
        *,
        can_trim: bool = True,
        is_exact: bool = True,
    ) -> None:
        self._can_trim = can_trim
        self._is_exact = is_exact
        self.forced: Forced | None = None
        self._session = session
        self._blocks = blocks
        self._speculative = speculative
        self._skip_set = skip_set
        self._found: SkipSet | None = None
        self._n_vocab = n_vocab
        self._n_ctx = n_ctx
        self._index: NgramIndex | None = None
        self._table: RecycleTable | None = None
        self._head = HeadTrim(n_vocab)
        self._arms: dict[str, SkipArm] = {}
        self.controller = Controller(costs)

    def plan(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        speculative: object = None,
        skip_set: object = None,
        wanted: int | None = None,
    ) -> DraftPlan:
        """Decide how to draft behind these tokens.

        Args:
            tokens: int32 [n], the prompt.
            speculative: The call's option, None = the object's.
            skip_set: The call's option, None = the object's.
            wanted: Tokens the caller takes at most, None = unknown.

        Raises:
            SkipSetError: The call's skip set does not fit the model.
            Cancelled: cancel() was called during the search.
        """
        mode, config = self.mode(speculative, skip_set)
        if mode == "off":
            return self._plain("speculative is off")
        refusal = self._session.refusal
        if refusal is not None:
            return self._plain(refusal)
        if self.forced is not None:
            return DraftPlan(self.controller, config, "forced outcomes", forced=self.forced)
        given: SkipSet | None = None
        if "skip" in config.proposers:
            given = self._skip_set if skip_set is None else read_skip_set(skip_set, self._blocks)
        always = mode == "on" or given is not None
        chosen, origin = given, f"the given skip set ({given})"
        if given is None:
            chosen, origin = self._look_for(tokens, config, wanted, always=always)
        copies = "ngram" in config.proposers
        # a given set drafts wherever nothing can be copied: that is what was asked for
        recycles = "recycle" in config.proposers and given is None
        if chosen is None and not copies and not recycles:
            return self._plain(origin)
        means = (
            "copies from the context" if copies else "",
            "recycles what the model ranked highest before" if recycles else "",
            origin,
        )
        return DraftPlan(
            self.controller,
            config,
            ", ".join(filter(None, means)),
            skip=None if chosen is None else self._arm(chosen, config),
            index=self._ngram_index() if copies else None,
            table=self._recycle_table() if recycles else None,
            guard=0.0 if self._is_exact else config.guard_margin,
            always=always,
        )

    def learn(self, tokens: npt.NDArray[np.int32]) -> None:
        """Note int32 [n] tokens that the target emitted: they say how much of the LM head drafting needs."""
        self._head.learn(tokens)

    def draft_memory(self) -> DraftMemory:
        """Return a copy of what drafts are recycled from."""
        return DraftMemory(None if self._table is None else self._table.copy())

    def forget_drafts(self, back_to: DraftMemory | None = None) -> None:
        """Forget tokens to copy, and those to recycle, all of them or what came after a memory was taken.

        What rounds cost is kept, and without a memory how often drafts were right.
        """
        if self._index is not None:
            self._index.rewind(0)
        if back_to is not None and back_to.table is not None:
            self._table = back_to.table.copy()
        elif self._table is not None:
            self._table.clear()

    def _plain(self, reason: str) -> DraftPlan:
        return DraftPlan(self.controller, SpecConfig(), f"plain decoding: {reason}")

    def _arm(self, chosen: SkipSet, config: SpecConfig) -> SkipArm:
        text = str(chosen)
        if text not in self._arms:
            self._arms[text] = SkipArm(chosen.bits(self._blocks), text)
        arm = self._arms[text]
        if config.head_rows is None and self._can_trim:
            arm.head_rows = self._head.choose(self.controller.costs, arm, self._session.n_past)
        else:
            rows = config.head_rows or 0
            arm.head_rows = rows if rows < self._n_vocab else 0
        return arm

    def _look_for(
        self,
        tokens: npt.NDArray[np.int32],
        config: SpecConfig,
        wanted: int | None,
        *,
        always: bool,
    ) -> tuple[SkipSet | None, str]:
        """Find a skip set if one could pay for the search; returns it and where it is from, or why there is none."""
        if "skip" not in config.proposers:
            return None, ""
        if self._found is not None or always or config.selector is not None:
            return self._search(tokens)
        if wanted is not None and wanted < _MIN_WANTED:
            return None, f"no skip set: {wanted} tokens are too few to look for one"
        n_past = self._session.n_past
        possible = possible_speedup(self.controller.costs.units(n_past))
        reached = self.controller.rate(n_past)
        if len(config.proposers) > 1:
            reached = max(reached, _FREE_SPEEDUP)
        if possible < _SEARCH_GAIN * reached:
            return None, (
                f"no skip set: at the measured costs one could give {possible:.2f}x at best, "
                f"and {reached:.2f}x is expected without"
            )
        return self._search(tokens)

    def mode(self, speculative: object, skip_set: object) -> tuple[Mode, SpecConfig]:
        """Resolve the call's and the object's speculative option; a call's skip set alone switches drafting on."""
        mode, config = SpecConfig.of(self._speculative if speculative is None else speculative)
        if mode == "off" and speculative is None and skip_set is not None:
            return SpecConfig.of(True)
        return mode, config

    def _ngram_index(self) -> NgramIndex:
        # one for all generations: the turns of a conversation share most of their tokens
        if self._index is None:
            self._index = NgramIndex(min(self._n_ctx, _MAX_INDEXED))
        return self._index

    def _recycle_table(self) -> RecycleTable:
        if self._table is None:
            self._table = RecycleTable(self._n_vocab)
        return self._table

    def _search(self, tokens: npt.NDArray[np.int32]) -> tuple[SkipSet | None, str]:
        """Find a skip set, or say why there is none."""
        try:
            found = self._find(tokens)
        except Cancelled:
            raise
        except PyssdError as error:
            _LOG.warning("no skip set could be looked for: %s", error)
            return None, f"no skip set, as no sweep was possible ({error})"
        return found, f"a skip set found by a sweep ({found})"

    def _find(self, tokens: npt.NDArray[np.int32]) -> SkipSet:
        if self._found is None:
            try:
                self._found = find_skip_set(self._session, self._blocks, tokens)
            finally:
                self._session.free_scout()
            _LOG.info("found the skip set %s", self._found)
        return self._found


def read_skip_set(value: object, blocks: Sequence[Block] | None) -> SkipSet:
    """Turn an argument into a skip set that fits the blocks.

    Raises:
        SkipSetError: It is malformed or made for another model.
    """
    return SkipSet.of(cast("SkipSetLike", value), blocks)
