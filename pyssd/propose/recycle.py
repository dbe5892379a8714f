"""Follow what the target ranked highest the last time it stood behind these tokens; the table is in cpp/core/recycle.cpp.

The table learns from the rows of logits that verification computes anyway (Session.verify), so a draft costs nothing but
the look-up, and what it is worth is only a question of the verify pass.
"""

from __future__ import annotations

import numpy as np

from pyssd._core import RecycleTable
from pyssd.propose import RECYCLE, FreeDraft, Tokens

_UNKNOWN = -1


class RecycleProposer:
    """Drafts from a table that outlives the generation.

    Args:
        table: What earlier rows said; Session.verify(recycle=table, before=proposer.before) goes on filling it.
        max_len: Longest draft.

    Attributes:
        before: The token before the last one, -1 if none is known.
    """

    source = RECYCLE

    def __init__(self, table: RecycleTable, max_len: int) -> None:
        self.table = table
        self.before = _UNKNOWN
        self._last = _UNKNOWN
        self._max_len = max_len

    def start(self, tokens: Tokens, last_token: int) -> None:
        """Start behind int32 [n] tokens and the last one, from which the table takes what follows what."""
        self.before = int(tokens[-1]) if len(tokens) else _UNKNOWN
        self._last = last_token
        self.table.begin(np.append(tokens, np.int32(last_token)))

    def draft(self, max_len: int) -> FreeDraft | None:
        """Follow the table from the last token; None where it knows nothing."""
        tokens, chances = self.table.draft(self.before, self._last, min(self._max_len, max_len))
        return FreeDraft(RECYCLE, tokens, chances.tolist()) if len(tokens) else None

    def emitted(self, tokens: Tokens) -> None:
        """Go on behind these tokens; the table learns from them what its entries, the last draft, were worth."""
        self.table.extend(tokens)
        if len(tokens):
            self.before = int(tokens[-2]) if len(tokens) > 1 else self._last
            self._last = int(tokens[-1])
