"""Copy from the context: propose what followed the last time these tokens came up; the search is in cpp/core/ngram.cpp.

A draft costs microseconds, so what it is worth is only a question of the verify pass: see Controller.worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pyssd._core import NgramIndex
from pyssd.propose import NO_DRAFT, Draft, Tokens


class NgramProposer:
    """Drafts from an index over prompt and output, which outlives the generation.

    Args:
        index: The tokens so far; `sync` brings it up to date.
        max_len: Longest draft.
        worth: Tells from chances [n] how many of the tokens to propose, 0 to n.
    """

    source = "ngram"

    def __init__(
        self, index: NgramIndex, max_len: int, worth: Callable[[Sequence[float]], int]
    ) -> None:
        self._index = index
        self._max_len = max_len
        self._worth = worth

    def sync(self, tokens: Tokens, last_token: int) -> None:
        """Start behind int32 [n] tokens and the last one; what the index shares with them is kept."""
        self._index.sync(np.append(tokens, np.int32(last_token)))

    def propose(self, chain: int, last_token: int, max_len: int) -> Draft:
        """Copy what followed the longest match, cut to the length that pays; NO_DRAFT if none does."""
        del (
            chain,
            last_token,
        )  # the index ends with the last token, and copying is blind to sampling
        tokens, chances, match_len = self._index.draft(min(self._max_len, max_len))
        if match_len == 0:
            return NO_DRAFT
        n = self._worth(chances.tolist())
        return Draft(tokens[:n], self.source, chances[:n]) if n else NO_DRAFT

    def emitted(self, tokens: Sequence[int]) -> None:
        """Add tokens; the index compares them with its last draft, and so learns what its matches are worth."""
        self._index.extend(np.asarray(tokens, dtype=np.int32))
