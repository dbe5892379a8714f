"""Where drafts come from. A proposer says what might come next; only the target says what does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, a chain.

    Attributes:
        tokens: int32 [n], may be empty.
        source: The proposer that was asked last, "ngram" or "skip"; "plain" if no round was spent on one.
        chances: float32 [n], of each token to be accepted if those before it are.
    """

    tokens: Tokens
    source: str
    chances: Floats


NO_DRAFT = Draft(np.empty(0, dtype=np.int32), "plain", np.empty(0, dtype=np.float32))


class Proposer(Protocol):
    """Drafts for one generation."""

    source: str

    def propose(self, chain: int, last_token: int, max_len: int) -> Draft:
        """Draft at most max_len tokens behind last_token.

        Args:
            chain: Address of the target's sampler chain.
            last_token: Emitted before, not in KV yet.
            max_len: At least 1.

        Returns:
            The draft. NO_DRAFT = another proposer may be asked; an empty one with the own source = time was spent.
        """

    def emitted(self, tokens: Sequence[int]) -> None:
        """Learn what the target emitted in a round, whoever drafted it."""
