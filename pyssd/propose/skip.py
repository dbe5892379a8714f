"""The model itself drafts, without the blocks of a skip set; the steps are in cpp/core/draft.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyssd._core import Session
from pyssd.config import SpecConfig
from pyssd.propose import Draft


class SkipProposer:
    """Drafts with the session's own blocks.

    Args:
        session: The sequence.
        skip: uint8 [n_blocks], 1 = skipped.
        config: Draft length, confidence, head rows.
    """

    source = "skip"

    def __init__(self, session: Session, skip: npt.NDArray[np.uint8], config: SpecConfig) -> None:
        self._session = session
        self._max_len = config.max_draft_len
        self._min_confidence = config.min_confidence
        session.set_skip(skip, config.head_rows)

    def propose(self, chain: int, last_token: int, max_len: int) -> Draft:
        """Decode with the plan until a token is not confident; its confidence stands for its chance."""
        tokens, confidences = self._session.draft(
            chain, last_token, min(self._max_len, max_len), self._min_confidence
        )
        return Draft(tokens, self.source, confidences)

    def emitted(self, tokens: Sequence[int]) -> None:
        """Nothing to learn: the session sees what it emits."""
