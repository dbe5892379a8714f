"""Where drafts come from. A proposer says what might come next; only the target says what does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

# arms of the controller: what a round may try
PLAIN, NGRAM, RECYCLE, SKIP, NGRAM_SKIP = "plain", "ngram", "recycle", "skip", "ngram+skip"
EMPTY: Tokens = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class FreeDraft:
    """A chain of tokens that cost microseconds, so that only their verification has a price.

    Attributes:
        source: The proposer, "ngram" or "recycle".
        tokens: int32 [n], at least one.
        chances: [n], of each token to be accepted if those before it are.
    """

    source: str
    tokens: Tokens
    chances: Sequence[float]


class FreeProposer(Protocol):
    """Drafts without a model. It sees every token that is emitted, whoever drafted it."""

    source: str

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Go on behind int32 [n] tokens and the last one."""

    def draft(self, max_len: int) -> FreeDraft | None:
        """Propose at most max_len (at least 1) tokens behind the last one; None = nothing is known."""

    def emitted(self, tokens: Tokens) -> None:
        """Learn what the target emitted in a round: it says which tokens of the last draft were right."""
