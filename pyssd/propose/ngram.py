"""Copy from the context: propose what followed the last time these tokens came up; the search is in cpp/core/ngram.cpp."""

from __future__ import annotations

import numpy as np

from pyssd._core import NgramIndex
from pyssd.propose import NGRAM, FreeDraft, Tokens


class NgramProposer:
    """Drafts from an index over prompt and output, which outlives the generation.

    Args:
        index: The tokens so far; `start` brings it up to date.
        max_len: Longest draft.
    """

    source = NGRAM

    def __init__(self, index: NgramIndex, max_len: int) -> None:
        self._index = index
        self._max_len = max_len

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Start behind int32 [n] tokens and the last one; what the index shares with them is kept."""
        self._index.sync(np.append(tokens, np.int32(last_token)))

    def draft(self, max_len: int) -> FreeDraft | None:
        """Copy what followed the longest match."""
        tokens, chances, match_len = self._index.draft(min(self._max_len, max_len))
        return FreeDraft(NGRAM, tokens, chances.tolist()) if match_len else None

    def emitted(self, tokens: Tokens) -> None:
        """Add tokens; the index compares them with its last draft, and so learns what its matches are worth."""
        self._index.extend(tokens)
