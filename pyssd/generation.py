"""One call of generate(): tokens one by one, with the bookkeeping that plain decoding would have after each of them.

A round emits several tokens at once. While they are handed out, `n_tokens` and `input_ids` say what plain decoding
would have evaluated so far; KV is ahead by the tokens not handed out yet and is cut back when the generation ends or is
left early. Logits processors get their round in steps, so that they are called exactly as plain decoding calls them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyssd._core import Session
from pyssd.engine import Engine
from pyssd.errors import DecodeError
from pyssd.loading import llama_lib
from pyssd.sampling import Criterion, Logits, Processor, apply_processor, chain_address

if TYPE_CHECKING:
    from pyssd.requests import Request
    from pyssd.state import SessionLlama


class Generation:
    """The tokens of one generation.

    Args:
        llm: The object; its `n_tokens`, `input_ids` and `scores` are kept up to date.
        engine: Runs the rounds.
        sampler: llama_cpp's LlamaSampler with the target's chain.
        new_sampler: Makes the same chain again (needed after tokens were sent in).
        processor: Logits processors, or None.
        criterion: Stopping criteria, or None.
    """

    def __init__(
        self,
        llm: SessionLlama,
        engine: Engine,
        sampler: Any,
        *,
        new_sampler: Any,
        processor: Processor | None,
        criterion: Criterion | None,
    ) -> None:
        self._llm = llm
        self._session = engine.session
        self._engine = engine
        self._sampler = sampler
        self._new_sampler = new_sampler
        self._processor = processor
        self._criterion = criterion
        self._handed_out: list[int] = []

    def run(self, request: Request, generation: int) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens until the context is full, a criterion holds or the request is cancelled.

        Tokens sent in are evaluated behind the one that was yielded, and sampling goes on after them.
        """
        gate = self._llm._gate
        tokens = self._tokens(self._first())
        while (token := next(tokens, None)) is not None:
            self._handed_out.append(token)
            self._engine.stats.emitted += 1
            gate.pause(request)
            sent = yield token
            gate.step(request, generation)
            if request.cancelled:
                return
            if sent:
                tokens.close()
                tokens = self._tokens(self._inject(token, sent))

    def _first(self) -> int | None:
        """Sample from the logits behind the prompt; None if a criterion holds already."""
        return self._sample(self._llm._logits_row(), position=self._llm.n_tokens)

    def _tokens(self, token: int | None) -> Generator[int, None, None]:
        if token is None:
            return
        yield token
        self._engine.start(self._llm._input_ids, token)
        yield from self._rounds(token) if self._processor is None else self._steps(token)

    def _rounds(self, token: int) -> Iterator[int]:
        llm, criterion = self._llm, self._criterion
        for emitted in self._engine.rounds(chain_address(self._sampler), token):
            llm._note_rows(llm.n_tokens, len(emitted))
            for row, next_token in enumerate(emitted):
                llm._append(token)
                if llm._logits_all:
                    llm.scores[llm.n_tokens - 1] = self._session.logits(row)
                if criterion is not None and criterion(llm._input_ids, self._read_only(row)):
                    return
                token = next_token
                yield token

    def _steps(self, token: int) -> Iterator[int]:
        """Do rounds row by row: a processor sees a row only once the token before it was handed out."""
        llm, session, engine = self._llm, self._session, self._engine
        chain = chain_address(self._sampler)
        while engine.has_room():
            turn = engine.draft(chain, token)
            draft_tokens, start = turn.tokens, llm.n_tokens
            session.verify_begin(token, draft_tokens)
            llm._open_round(start, len(draft_tokens) + 1)
            last_token = token
            seconds = time.perf_counter() - turn.drafted
            emitted: list[int] = []
            while True:
                started = time.perf_counter()
                llm._append(token)
                next_token = self._sample(len(emitted), position=llm.n_tokens)
                seconds += time.perf_counter() - started
                if next_token is None:
                    # a criterion ended the text within the round, which counts all the same
                    if emitted:
                        engine.accept(turn, np.array(emitted, dtype=np.int32), seconds)
                    return
                token = next_token
                emitted.append(token)
                yield token
                if len(emitted) > len(draft_tokens) or token != draft_tokens[len(emitted) - 1]:
                    break
            engine.learn_rows(turn, last_token, len(emitted))
            llm._close_round()
            engine.accept(turn, np.array(emitted, dtype=np.int32), seconds)

    def _sample(self, row: int | None, *, position: int) -> int | None:
        """Sample the token for a position from a row of logits; None if a criterion ends the generation."""
        if row is None:
            raise DecodeError(
                "there are no logits to sample from; evaluate the tokens before it first"
            )
        llm = self._llm
        if llm._logits_all:
            llm.scores[position - 1] = self._session.logits(row)
        token = sample_row(llm, self._session, self._sampler, row, self._processor)
        if self._criterion is not None and self._criterion(llm._input_ids, self._read_only(row)):
            return None
        return token

    def _read_only(self, row: int) -> Logits:
        logits: Logits = self._session.logits(row).view()
        logits.flags.writeable = False
        return logits

    def _inject(self, token: int, sent: Sequence[int]) -> int | None:
        llm = self._llm
        if self._session.n_past > llm.n_tokens:
            # the chain has accepted tokens that were never handed out: make it again up to here
            self._sampler = llm._sampler = self._new_sampler()
            for accepted in self._handed_out:
                llama_lib.llama_sampler_accept(self._sampler.sampler, accepted)
        llm._sync()
        llm._prefill(np.asarray([token, *sent], dtype=np.int32))
        return self._first()


def sample_row(
    llm: SessionLlama, session: Session, sampler: Any, row: int, processor: Processor | None
) -> int:
    """Sample the token behind those evaluated from a row of the last target pass, processors applied."""
    chain = chain_address(sampler)
    if processor is None:
        return session.sample(chain, row, llm.n_tokens)
    logits = session.logits(row)
    raw = logits.copy()
    logits[:] = apply_processor(processor, llm._input_ids, raw)
    try:
        return session.sample(chain, row, llm.n_tokens)
    finally:
        logits[:] = (
            raw  # logprobs, criteria and a request that reuses the row see the target's own logits
        )
