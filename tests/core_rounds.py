"""Sampler chains and decoding loops on the C++ core alone, for the tests of Session."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lowlevel import Opened, Tokens, address, api

from pyssd import _core

NO_DRAFT = np.empty(0, np.int32)
WORDS_GRAMMAR = b'root ::= "[" word ("," word)* "]"\nword ::= [a-z0-9]+'


class Chain:
    """A sampler chain built step by step; `address` goes to the core. Closed on exit."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.vocab = api.llama_model_get_vocab(opened.model)
        self.chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        self.customs: list[int] = []
        self._keep: list[object] = []

    @property
    def address(self) -> int:
        return address(self.chain)

    def add(self, sampler: Any) -> Chain:
        api.llama_sampler_chain_add(self.chain, sampler)
        return self

    def penalties(self) -> Chain:
        return self.add(api.llama_sampler_init_penalties(self.opened.n_vocab, 32, 1.2, 0.1, 0.1))

    def grammar(self, text: bytes = WORDS_GRAMMAR) -> Chain:
        return self.add(api.llama_sampler_init_grammar(self.vocab, text, b"root"))

    def bias(self, token: int, value: float) -> Chain:
        entry = (api.llama_logit_bias * 1)(api.llama_logit_bias(token, value))
        return self.add(api.llama_sampler_init_logit_bias(self.opened.n_vocab, 1, entry))

    def filters(self, temp: float, top_k: int = 40, top_p: float = 0.95) -> Chain:
        self.add(api.llama_sampler_init_top_k(top_k))
        self.add(api.llama_sampler_init_top_p(top_p, 1))
        return self.add(api.llama_sampler_init_temp(temp))

    def custom(self, apply: Callable[[Any], None]) -> Chain:
        """A sampler in Python, as llama_cpp makes one for logits processors: no name, no clone."""
        wrapped = api.llama_sampler_i_apply(lambda _, cur: apply(cur))
        interface = api.llama_sampler_i()
        interface.apply = wrapped
        for name, kind in (
            ("name", api.llama_sampler_i_name),
            ("clone", api.llama_sampler_i_clone),
        ):
            setattr(interface, name, kind(0))
        sampler = api.llama_sampler()
        sampler.iface = ctypes.pointer(interface)
        sampler.ctx = None
        self._keep += [wrapped, interface, sampler]
        self.customs.append(api.llama_sampler_chain_n(self.chain))
        return self.add(ctypes.pointer(sampler))

    def greedy(self) -> Chain:
        return self.add(api.llama_sampler_init_greedy())

    def gumbel(self, seed: int = 42) -> Chain:
        return self.add(ctypes.cast(_core.gumbel_sampler(seed), api.llama_sampler_p_ctypes))

    def set_pos(self, pos: int) -> None:
        """Tell the Gumbel sampler the position, where it is not the Session that samples."""
        _core.gumbel_set_pos(self.address, pos)

    def dist(self, seed: int = 42) -> Chain:
        return self.add(api.llama_sampler_init_dist(seed))

    def close(self) -> None:
        for index in reversed(self.customs):  # llama.cpp would free what Python owns
            api.llama_sampler_chain_remove(self.chain, index)
        api.llama_sampler_free(self.chain)

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Run:
    """What a decoding loop emitted, and how its drafts fared."""

    tokens: list[int]
    drafts: list[tuple[list[int], list[int]]] = field(
        default_factory=list
    )  # (draft, emitted) of each round

    @property
    def drafted(self) -> int:
        return sum(len(draft) for draft, _ in self.drafts)

    @property
    def accepted(self) -> int:
        return sum(
            next(
                (
                    i
                    for i, pair in enumerate(zip(draft, emitted, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(draft), len(emitted)),
            )
            for draft, emitted in self.drafts
        )


def n_cells(opened: Opened, sequence: int = 0) -> int:
    """Cells of a sequence, counted by its last position."""
    return int(api.llama_memory_seq_pos_max(api.llama_get_memory(opened.ctx), sequence)) + 1


def decode_plain(opened: Opened, chain: Chain, prompt: Tokens, n: int) -> Run:
    """One token a pass."""
    session = opened.session
    session.rewind(0)
    session.prefill(prompt)
    tokens = [session.sample(chain.address)]
    while len(tokens) < n and not is_end(opened, tokens[-1]):
        tokens += session.verify(chain.address, tokens[-1], NO_DRAFT).tolist()
    return Run(tokens)


def decode_drafted(
    opened: Opened,
    chain: Chain,
    prompt: Tokens,
    n: int,
    *,
    max_len: int = 4,
    min_confidence: float = 0.0,
) -> Run:
    """Rounds of draft and verify; checks after every call that KV holds the target's cells and nothing else."""
    session = opened.session
    session.rewind(0)
    session.prefill(prompt)
    run = Run([session.sample(chain.address)])
    while len(run.tokens) < n and not is_end(opened, run.tokens[-1]):
        last = run.tokens[-1]
        n_past = session.n_past
        draft, confidences = session.draft(
            chain.address, last, min(max_len, n - len(run.tokens)), min_confidence
        )
        assert (confidences >= min_confidence).all()
        assert n_cells(opened) == session.n_past == n_past
        emitted = session.verify(chain.address, last, draft).tolist()
        assert n_cells(opened) == session.n_past == n_past + len(emitted)
        run.tokens += emitted
        run.drafts.append((draft.tolist(), emitted))
    run.tokens = run.tokens[:n]
    return run


def is_end(opened: Opened, token: int) -> bool:
    """Whether the token ends generation."""
    return bool(api.llama_vocab_is_eog(api.llama_model_get_vocab(opened.model), token))


@contextmanager
def context_params(**fields: object) -> Iterator[None]:
    """Contexts opened inside get these fields of llama_context_params."""
    stock = api.llama_context_default_params

    def defaults() -> Any:
        params = stock()
        for name, value in fields.items():
            setattr(params, name, value)
        return params

    api.llama_context_default_params = defaults
    try:
        yield
    finally:
        api.llama_context_default_params = stock
