"""Requests: per-call options, one request at a time, cancellation. The OpenAI shapes stay llama_cpp's own."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd.config import SpecConfig
from pyssd.engine import Engine
from pyssd.errors import Cancelled, ContextOverflowError, DecodeError, UnsupportedModelError
from pyssd.generation import Generation, sample_row
from pyssd.loading import llama_module, no_redirection
from pyssd.options import bind, per_call_signature
from pyssd.planning import Planner, read_skip_set
from pyssd.requests import Call, CallOptions, Request, stream
from pyssd.sampling import check_grammar, couple, joint_processor, prepend_bias, read_bias
from pyssd.state import SessionLlama
from pyssd.stats import SpecStats


class RequestCriteria:
    """Stopping criteria of a request: the user's, and whether it was cancelled.

    llama_cpp's `_create_completion` returns the text so far only if a criterion says stop, so this one always goes along;
    `generate` takes the user's out of it again.
    """

    def __init__(self, request: Request, user: Callable[..., bool] | None) -> None:
        self.request = request
        self.user = user

    def __call__(self, input_ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> bool:
        return self.request.cancelled or (
            self.user is not None and bool(self.user(input_ids, logits))
        )


@contextlib.contextmanager
def _named_overflow() -> Iterator[None]:
    """Give llama_cpp's bare ValueError for a prompt that does not fit the name it has elsewhere."""
    try:
        yield
    except ValueError as error:
        if "exceed context window" not in str(error):
            raise
        raise ContextOverflowError(f"{error}; shorten the prompt or raise n_ctx") from None


def _overflow_named(chunks: Iterator[Any]) -> Iterator[Any]:
    with _named_overflow():
        yield from chunks


_COMPLETION = per_call_signature(llama_module.Llama.create_completion)
_CHAT = per_call_signature(llama_module.Llama.create_chat_completion)


class RequestLlama(SessionLlama):
    """The part of pyssd.Llama that runs requests."""

    stats: SpecStats
    totals: SpecStats
    coupling: str
    _planner: Planner | None

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text from a prompt, as llama_cpp.Llama does.

        Args:
            *args: As in llama_cpp.Llama.create_completion.
            **kwargs: Likewise, and `speculative` and `skip_set`, which hold for this call only.

        Returns:
            OpenAI's completion dict, or an iterator of chunks with stream=True. finish_reason is "cancelled" after
            `cancel()`.
        """
        given = bind(_COMPLETION, "create_completion", args, kwargs)
        max_tokens = given.get("max_tokens", 16)
        bias = given.pop("logit_bias", None)
        options = self._call_options(
            given,
            wanted=max_tokens if max_tokens and max_tokens > 0 else None,
            bias=None if bias is None else read_bias(bias, self.n_vocab()),
        )
        call, owned = self._gate.join(options)
        criteria = given.get("stopping_criteria")
        if criteria is not None and not callable(criteria):
            criteria = llama_module.StoppingCriteriaList(criteria)
        given["stopping_criteria"] = RequestCriteria(call.request, criteria)

        def edit(chunk: Any) -> Any:
            choice = chunk["choices"][0]
            if call.request.cancelled and choice["finish_reason"] is not None:
                choice["finish_reason"] = "cancelled"
            return chunk

        if given.get("stream"):
            chunks = _overflow_named(super().create_completion(**given))
            return stream(self._gate, call, owned, chunks, edit)
        with self._gate.enter(call), _named_overflow():
            return edit(super().create_completion(**given))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text from a prompt; the same as `create_completion`."""
        return self.create_completion(*args, **kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Generate a chat answer, as llama_cpp.Llama does.

        Args:
            *args: As in llama_cpp.Llama.create_chat_completion.
            **kwargs: Likewise, and `speculative` and `skip_set`, which hold for this call only.

        Returns:
            OpenAI's chat completion dict, or an iterator of chunks with stream=True.
        """
        given = bind(_CHAT, "create_chat_completion", args, kwargs)
        options = self._call_options(given)
        call, owned = self._gate.join(options)
        if not given.get("stream"):
            with self._gate.enter(call), no_redirection():
                return super().create_chat_completion(**given)
        with self._gate.enter(call), no_redirection():
            before = call.request.generation
            chunks = super().create_chat_completion(**given)
            if call.request.generation == before:
                return stream(self._gate, call, owned, chunks, lambda chunk: chunk)
            # a multimodal handler has evaluated its prompt already: start here, before anyone else can come in between
            answer = stream(self._gate, call, owned, chunks, lambda chunk: chunk)
            return itertools.chain([next(answer)], answer)

    def _call_options(
        self,
        given: dict[str, Any],
        *,
        wanted: int | None = None,
        bias: dict[int, float] | None = None,
    ) -> CallOptions:
        """Take pyssd's options out of a call's arguments, checked now: a stream would fail only at its first chunk."""
        speculative, skip_set = given.pop("speculative", None), given.pop("skip_set", None)
        if speculative is not None:
            SpecConfig.of(speculative)
        if skip_set is not None:
            if self._planner is None or not self._blocks:
                raise UnsupportedModelError(
                    f"skip_set cannot be used: {self._no_speculation}; leave it out"
                )
            skip_set = read_skip_set(skip_set, self._blocks)
        return CallOptions(speculative, skip_set, wanted, bias)

    def cancel(self) -> None:
        """End the running request within one pass, from any thread; its finish_reason is "cancelled"."""
        self._gate.cancel(self._interrupt)

    def _interrupt(self) -> None:
        session = self._session
        if session is not None:
            session.cancel()

    # generation ---------------------------------------------------------------------------------------------------

    def _init_sampler(
        self, *, grammar: Any = None, logits_processor: Any = None, **settings: Any
    ) -> Any:
        """Build the sampler chain; logits processors are not part of it where a Session calls them itself."""
        if grammar is not None:
            check_grammar(self._model.vocab, grammar)
        in_chain = logits_processor if self._session is None else None
        sampler = super()._init_sampler(grammar=grammar, logits_processor=in_chain, **settings)
        call = self._gate.call
        if self._session is not None and self._coupling(call) == "gumbel":
            couple(sampler, self._seed)
        if call is not None and call.options.bias:
            prepend_bias(sampler, call.options.bias, self._n_vocab)
        return sampler

    def _coupling(self, call: Call | None) -> str:
        speculative = call.options.speculative if call is not None else None
        if speculative is not None and SpecConfig.of(speculative)[1].coupling == "llama_cpp":
            return "llama_cpp"
        return self.coupling

    def sample(
        self, *, idx: int | None = None, logits_processor: Any = None, **settings: Any
    ) -> int:
        """Sample the token behind those evaluated, as llama_cpp.Llama does (arguments by keyword).

        Raises:
            DecodeError: There are no logits behind position idx; evaluate tokens first.
        """
        session = self._session
        if session is None:
            return int(super().sample(idx=idx, logits_processor=logits_processor, **settings))
        with self._exclusive():
            self._sync()
            row = self._logits_row()
            if row is None or idx not in (None, self.n_tokens - 1):
                raise DecodeError(
                    "there are no logits to sample from; evaluate the tokens before it first"
                )
            sampler = self._sampler or self._init_sampler(**settings)
            return sample_row(self, session, sampler, row, joint_processor(logits_processor))

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens behind a prompt, as llama_cpp.Llama does; drafting changes their pace, not the tokens.

        Args:
            tokens: The prompt; cells of a prefix that is evaluated already are kept.
            top_k: This and the others as in llama_cpp.Llama.generate.
        """
        settings = {
            "top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p, "temp": temp,
            "repeat_penalty": repeat_penalty, "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty, "tfs_z": tfs_z, "mirostat_mode": mirostat_mode,
            "mirostat_tau": mirostat_tau, "mirostat_eta": mirostat_eta, "penalize_nl": penalize_nl,
            "grammar": grammar,
        }  # fmt: skip
        if self._session is None:
            yield from super().generate(
                tokens,
                reset=reset,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                **settings,
            )
            return
        criterion = (
            stopping_criteria.user
            if isinstance(stopping_criteria, RequestCriteria)
            else stopping_criteria
        )
        call, owned = self._gate.join()
        with self._gate.enter(call, keep=True):
            call.request.generation += 1
        generation = call.request.generation
        self.stats = SpecStats()
        engine: Engine | None = None
        try:
            self._gate.step(call.request, generation)
            if call.request.cancelled:
                return
            self._session.clear_cancel()
            self._sampler = self._init_sampler(**settings)
            engine = self._begin(
                np.asarray(tokens, dtype=np.int32).reshape(-1), reset, call.options
            )
            yield from Generation(
                self,
                engine,
                self._sampler,
                new_sampler=lambda: self._init_sampler(**settings),
                processor=joint_processor(logits_processor),
                criterion=criterion,
            ).run(call.request, generation)
        except Cancelled:
            call.request.cancelled = True
            self._requires_eval = True
        finally:
            if self._gate.owns(call.request, generation):
                self._end(engine)
            self._gate.pause(call.request)
            if owned:
                self._gate.release(call.request)

    def _begin(self, prompt: npt.NDArray[np.int32], reset: bool, options: CallOptions) -> Engine:
        """Evaluate a prompt, as far as it is not in KV, and choose how to draft behind it."""
        session, planner = self._session, self._planner
        if session is None or planner is None:
            raise UnsupportedModelError(f"this object cannot decode: {self._no_speculation}")
        todo = self._reuse_prefix(prompt, reset=reset)
        if self.n_tokens + len(todo) == 0:
            raise ValueError("the prompt has no tokens; pass at least one")
        self.stats.prompt_tokens = len(todo)
        started = time.perf_counter()
        self._prefill(todo)
        seconds = time.perf_counter() - started
        plan = planner.plan(
            prompt,
            speculative=options.speculative,
            skip_set=options.skip_set,
            wanted=options.wanted,
        )
        engine = Engine(session, self._n_ctx, plan, options.wanted)
        self.stats = engine.stats
        engine.stats.prompt_tokens, engine.stats.prefill_seconds = len(todo), seconds
        return engine

    def _end(self, engine: Engine | None) -> None:
        """Leave state and statistics as plain decoding would have them after the tokens handed out."""
        if self._session is not None:
            self._session.clear_cancel()
        self._sampler = None
        self._sync()
        if engine is not None:
            engine.finish()
            if self._planner is not None and self.n_tokens > engine.n_start:
                self._planner.learn(self._input_ids[engine.n_start :])
        self.totals = self.totals + self.stats
