"""llama_cpp.Llama with its KV kept by a Session: evaluation, prefix reuse, saved states.

`n_tokens` and `input_ids` stay real attributes, because chat handlers (multimodal ones above all) read and write them.
They say what plain decoding has evaluated; the Session is brought in line with them (`_sync`) before it is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd._core import Session
from pyssd.errors import ContextOverflowError, DecodeError, UnsupportedModelError
from pyssd.loading import llama_lib, llama_module
from pyssd.requests import Gate
from pyssd.skipset import Block, SkipSet

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
SkipSetLike = SkipSet | str | Path | Mapping[str, object]
_NOTHING_KEPT: tuple[int, Logits] = (0, np.empty(0, dtype=np.float32))
_LOG = logging.getLogger("pyssd")


class SessionLlama(llama_module.Llama):  # type: ignore[misc]
    """The part of pyssd.Llama that keeps tokens, cells and logits in line with each other."""

    _gate: Gate
    _session: Session | None
    _round_start: int | None  # n_tokens when a verify in steps began; None = none is open
    _kept_logits: tuple[int, Logits]  # n_tokens, and the row behind the last of them
    _rows: tuple[
        int, int
    ]  # position of the first row of the last round, number of rows; 0 rows after a prefill
    _vocab_only: bool
    _blocks: list[Block]
    _no_speculation: str  # why drafting is impossible, "" if it is possible
    n_tokens: int

    # bookkeeping ------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Make KV hold what n_tokens says: end an open round, drop cells that run ahead, adopt foreign ones."""
        session = self._session
        if session is None:
            return
        if self._round_start is not None:
            self._close_round()
        if session.n_past > self.n_tokens:
            row = self._logits_row()
            if row is not None:  # the session forgets its rows when it drops cells
                self._kept_logits = (self.n_tokens, session.logits(row).copy())
            session.rewind(self.n_tokens)
            self._requires_eval = True
        elif session.n_past < self.n_tokens:
            session.n_past = self.n_tokens

    def _open_round(self, start: int, n_rows: int) -> None:
        self._round_start = start
        self._note_rows(start, n_rows)

    def _close_round(self) -> None:
        start, self._round_start = self._round_start, None
        if self._session is not None and start is not None:
            self._session.verify_end(self.n_tokens - start)

    def _note_rows(self, position: int, n_rows: int) -> None:
        self._kept_logits = _NOTHING_KEPT
        self._rows = (position, n_rows)

    def _append(self, token: int) -> None:
        self.input_ids[self.n_tokens] = token
        self.n_tokens += 1

    def _logits_row(self) -> int | None:
        """Row of the last target decode that holds the logits behind the last token; None if it is gone.

        -1 = the last row: after a prefill, and when someone else has decoded on the context since.
        """
        if self._requires_eval or self.n_tokens == 0:
            return None
        position, n_rows = self._rows
        row = self.n_tokens - 1 - position
        if row < 0:
            return None
        return row if row < n_rows else -1

    def _prefill(self, tokens: Tokens) -> None:
        """Evaluate tokens at n_tokens.

        Raises:
            ContextOverflowError: They do not fit; nothing was evaluated.
            ValueError: One is not in the vocabulary.
            Cancelled: cancel() was called; the chunks before it are kept.
        """
        session = self._session
        if session is None:
            raise UnsupportedModelError(
                "this object was loaded without a context for decoding; load the model again"
            )
        start = self.n_tokens
        if start + len(tokens) > self._n_ctx:
            raise ContextOverflowError(
                f"{start + len(tokens)} tokens exceed the context of {self._n_ctx}; shorten the prompt or raise n_ctx"
            )
        if len(tokens) == 0:
            return
        if tokens.min() < 0 or tokens.max() >= self._n_vocab:
            raise ValueError(
                f"a token is outside the vocabulary of {self._n_vocab}; use this model's tokenizer"
            )
        rows = self.scores[start : start + len(tokens)] if self._logits_all else None
        self._requires_eval = True
        try:
            session.prefill(tokens, rows)
            self._requires_eval = False
        finally:
            self.input_ids[start : session.n_past] = tokens[: session.n_past - start]
            self.n_tokens = session.n_past
            self._note_rows(self.n_tokens - 1, 0)

    def _reuse_prefix(self, tokens: Tokens, *, reset: bool) -> Tokens:
        """Keep the cells that a prompt shares with what is evaluated, and return the tokens left to evaluate.

        As llama_cpp.Llama.generate does it: if everything is there and its logits are live, nothing is left; if only
        the logits are missing, the last token is evaluated again.
        """
        self._sync()
        if not reset:
            return tokens
        known = self.input_ids[: self.n_tokens]
        n = min(len(known), len(tokens))
        different = np.flatnonzero(known[:n] != tokens[:n])
        shared = int(different[0]) if different.size else n
        if shared == len(tokens) == self.n_tokens and self._logits_row() is not None:
            return tokens[:0]
        keep = shared - 1 if shared == len(tokens) else shared
        if keep > 0 and self._try_rewind(keep):
            _LOG.debug(
                "%d tokens of the prompt are in KV already, %d to evaluate",
                keep,
                len(tokens) - keep,
            )
            return tokens[keep:]
        self._clear()
        return tokens

    def _try_rewind(self, n_past: int) -> bool:
        session = self._session
        if session is None or not session.rewindable(n_past):
            return False
        try:
            session.rewind(n_past)
        except DecodeError:
            return False
        self.n_tokens = n_past
        self._requires_eval = True
        return True

    def _clear(self) -> None:
        self.n_tokens = 0
        self._kept_logits = _NOTHING_KEPT
        self._requires_eval = True
        if self._session is not None:
            self._sync()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the object for one operation on its state; generations that are under way end."""
        call, _ = self._gate.join()
        request = call.request
        with self._gate.enter(call):
            request.generation += 1
            self._gate.step(request, request.generation)
            try:
                if self._session is not None:
                    self._session.clear_cancel()
                yield
            finally:
                self._gate.pause(request)

    # llama_cpp.Llama's methods ------------------------------------------------------------------------------------

    @property
    def _scores(self) -> Logits:
        """Logits of the evaluated tokens, float32 [n_tokens, n_vocab]; without logits_all the last row only."""
        if self._logits_all and self.n_tokens > 0:
            scores: Logits = self.scores[: self.n_tokens]
            return scores
        n_tokens, kept = self._kept_logits
        if n_tokens != self.n_tokens or n_tokens == 0:
            row = self._logits_row()
            if self._session is None or row is None:
                return np.zeros((1, self._n_vocab), dtype=np.float32)
            kept = self._session.logits(row)
        last: Logits = kept.reshape(1, -1).copy()
        return last

    def reset(self) -> None:
        """Forget all tokens."""
        self.n_ctx()  # a closed object says so
        if self._session is None:
            super().reset()
            return
        with self._exclusive():
            self._clear()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those evaluated so far.

        Raises:
            ContextOverflowError: They do not fit.
            ValueError: One is not in the vocabulary.
            Cancelled: cancel() was called meanwhile.
        """
        if self._vocab_only:
            raise UnsupportedModelError(
                "the model was loaded with vocab_only=True; load it with its weights"
            )
        if self._session is None:
            super().eval(tokens)
            return
        with self._exclusive():
            self._sync()
            self._prefill(np.asarray(tokens, dtype=np.int32))

    def save_state(self) -> Any:
        """Copy KV, tokens and seed into a LlamaState; logits only with logits_all."""
        if self._session is None:
            return super().save_state()
        with self._exclusive():
            self._sync()
            state = super().save_state()
            state.scores = self.scores[: self.n_tokens].copy()
            return state

    def load_state(self, state: Any) -> None:
        """Restore a LlamaState; its last token is evaluated again before the next one is sampled.

        Raises:
            ContextOverflowError: It has more tokens than the context.
            DecodeError: It was saved from another model or with other context settings.
        """
        if self._session is None:
            super().load_state(state)
            return
        with self._exclusive():
            if state.n_tokens > self._n_ctx:
                raise ContextOverflowError(
                    f"the state has {state.n_tokens} tokens, the context {self._n_ctx}; load with n_ctx as saved"
                )
            self._clear()
            data = (llama_lib.ctypes.c_uint8 * state.llama_state_size).from_buffer_copy(
                state.llama_state
            )
            size = llama_lib.llama_state_set_data(self._ctx.ctx, data, state.llama_state_size)
            if size != state.llama_state_size:
                llama_lib.llama_memory_clear(llama_lib.llama_get_memory(self._ctx.ctx), True)
                raise DecodeError(
                    "the state does not fit this model and context; save it again from an equal one"
                )
            self._session.n_past = state.n_tokens
            self.n_tokens = state.n_tokens
            self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
            if self._logits_all and state.scores.shape[0] >= state.n_tokens:
                self.scores[: state.n_tokens] = state.scores[: state.n_tokens]
            self._seed = state.seed

    # fresh passes beside the state ----------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """The attention, FFN and mixer blocks along the residual stream; empty if the graph is not understood."""
        return list(self._blocks)

    def score(self, tokens: Sequence[int], skip_set: SkipSetLike) -> Logits:
        """Tell where a draft would propose what the target would.

        Args:
            tokens: A text; it is evaluated in fresh passes, the object's own tokens stay.
            skip_set: As Llama's argument.

        Returns:
            float32 [n], 1.0 where the draft's most likely next token is the target's, else 0.0.
        """
        session, array = self._scout_input(tokens)
        bits = SkipSet.of(skip_set, self._blocks).bits(self._blocks)
        with self._exclusive():
            draft, target = session.skip_argmax(array, bits), session.skip_argmax(array, None)
        return np.equal(draft, target).astype(np.float32)

    def skip_logits(
        self, tokens: Sequence[int], skip_set: SkipSetLike | None, head_rows: int = 0
    ) -> Logits:
        """Return the logits of a fresh pass with blocks left out.

        Args:
            tokens: A text; the object's own tokens stay.
            skip_set: As Llama's argument; None skips nothing.
            head_rows: Rows of the LM head to apply, 0 = all; logits of the others are -inf.

        Returns:
            float32 [n, n_vocab], the logits behind each token. Attention sums in chunks of cells and the text lies behind
            the object's own, so that rows agree with the target's bit for bit only where that one is empty (`reset()`).
        """
        session, array = self._scout_input(tokens)
        bits = None if skip_set is None else SkipSet.of(skip_set, self._blocks).bits(self._blocks)
        with self._exclusive():
            return session.skip_logits(array, bits, head_rows)

    def _scout_input(self, tokens: Sequence[int]) -> tuple[Session, Tokens]:
        array = np.asarray(tokens, dtype=np.int32).reshape(-1)
        self.n_ctx()  # a closed object says so
        if self._session is None or not self._blocks:
            raise UnsupportedModelError(f"blocks cannot be skipped: {self._no_speculation}")
        if not 0 < len(array) <= self._n_ctx:
            raise ValueError(f"{len(array)} tokens were given; pass 1 to {self._n_ctx}")
        return self._session, array
