"""How a generation drafts: from the options of the call and the object, and from what was learnt before."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from pyssd._core import NgramIndex, Session
from pyssd.config import Mode, SpecConfig
from pyssd.controller import Controller, Measured
from pyssd.engine import DraftPlan
from pyssd.errors import Cancelled, PyssdError
from pyssd.select import find_skip_set
from pyssd.skipset import Block, SkipSet

_MIN_WANTED = 32  # a request for fewer tokens cannot win back the seconds of a search
_MAX_INDEXED = 1 << 16  # tokens to copy from; an index of this size takes 4 MB
_LOG = logging.getLogger("pyssd")

SkipSetLike = SkipSet | str | Path | Mapping[str, object]


class Planner:
    """Chooses a DraftPlan for each generation, and remembers sets and rates between them.

    Args:
        session: The object's session.
        blocks: The model's blocks; empty where the session refuses speculation.
        speculative: The object's option, already checked.
        skip_set: The object's option, already checked against the blocks; None = search for one.
        head_rows_limit: Size of the vocabulary; a larger head_rows means all rows.
        n_ctx: Cells of the context.
    """

    def __init__(
        self,
        session: Session,
        blocks: Sequence[Block],
        speculative: object,
        skip_set: SkipSet | None,
        head_rows_limit: int,
        n_ctx: int,
    ) -> None:
        self._session = session
        self._blocks = blocks
        self._speculative = speculative
        self._skip_set = skip_set
        self._head_rows_limit = head_rows_limit
        self._found: SkipSet | None = None
        self._n_ctx = n_ctx
        self._index: NgramIndex | None = None
        self._measured = Measured()
        self._controllers: dict[tuple[str, bool], Controller] = {}
        self._plain_controller = Controller(always=False, shared=self._measured)

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
            return DraftPlan.plain(self._plain_controller, "plain decoding: speculative is off")
        refusal = self._session.refusal
        if refusal is not None:
            return DraftPlan.plain(self._plain_controller, f"plain decoding: {refusal}")
        chosen, origin = None, ""
        if "skip" in config.proposers:
            chosen = self._skip_set if skip_set is None else read_skip_set(skip_set, self._blocks)
        always = mode == "on" or chosen is not None
        if chosen is not None:
            origin = f"the given skip set ({chosen})"
        elif "skip" in config.proposers:
            is_short = wanted is not None and wanted < _MIN_WANTED
            if self._found is None and not always and is_short:
                origin = f"no skip set: {wanted} tokens are too few to look for one"
            else:
                chosen, origin = self._search(tokens)
        copies = "ngram" in config.proposers
        if chosen is None and not copies:
            return DraftPlan.plain(self._plain_controller, f"plain decoding: {origin}")
        text = "" if chosen is None else str(chosen)
        key = (text, always)
        if key not in self._controllers:
            self._controllers[key] = Controller(always=always, shared=self._measured)
        if config.head_rows >= self._head_rows_limit:
            config = dataclasses.replace(config, head_rows=0)
        return DraftPlan(
            None if chosen is None else chosen.bits(self._blocks),
            text,
            config,
            self._controllers[key],
            ", ".join(filter(None, ("copies from the context" if copies else "", origin))),
            self._ngram_index() if copies else None,
        )

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
