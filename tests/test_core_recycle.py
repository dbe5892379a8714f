"""The recycling table: what verification tells it, and that no entry changes what is emitted.

tests/cpp/test_recycle.cpp has the table alone: its bounds, replacement and chances.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core_rounds import NO_DRAFT, Chain, Run, decode_plain, is_end, n_cells
from lowlevel import Opened, Tokens, api, random_tokens

from pyssd import errors
from pyssd._core import RecycleTable
from pyssd.propose.recycle import RecycleProposer

TEXT = b"The three laws of motion were first stated by Isaac Newton. The first law says that"

CHAINS: dict[str, Callable[[Chain], Chain]] = {
    "greedy": lambda c: c.greedy(),
    "gumbel": lambda c: c.filters(0.9).gumbel(),
    "penalties": lambda c: c.penalties().greedy(),
    "grammar": lambda c: c.grammar().filters(1.0).gumbel(),
    "dist": lambda c: c.filters(0.8).dist(),
}


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=1024, n_ubatch=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Opened]:
    with Opened(smollm2, n_ctx=1024) as opened:
        yield opened


def decode_recycled(
    opened: Opened,
    chain: Chain,
    prompt: Tokens,
    n: int,
    table: RecycleTable,
    *,
    max_len: int = 4,
    by_rows: bool = False,
) -> Run:
    """Rounds whose drafts come from a table, sampled row by row if asked."""
    session = opened.session
    session.rewind(0)
    session.prefill(prompt)
    proposer = RecycleProposer(table, max_len)
    run = Run([session.sample(chain.address)])
    proposer.start(prompt, run.tokens[-1])
    while len(run.tokens) < n and not is_end(opened, run.tokens[-1]):
        last = run.tokens[-1]
        proposed = proposer.draft(n - len(run.tokens))
        draft = NO_DRAFT if proposed is None else proposed.tokens
        if by_rows:
            emitted = sample_rows(opened, chain, last, draft)
            session.recycle(table, proposer.before, np.append(np.int32(last), draft), len(emitted))
            session.verify_end(len(emitted))
        else:
            emitted = session.verify(chain.address, last, draft, table, proposer.before)
        assert n_cells(opened) == session.n_past
        proposer.emitted(emitted)
        run.tokens += emitted.tolist()
        run.drafts.append((draft.tolist(), emitted.tolist()))
    run.tokens = run.tokens[:n]
    return run


def tokenize(opened: Opened, text: bytes) -> Tokens:
    """Tokens of a text."""
    tokens = np.empty(len(text) + 8, np.int32)
    n = api.llama_tokenize(
        api.llama_model_get_vocab(opened.model),
        text,
        len(text),
        tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        len(tokens),
        True,
        True,
    )
    return tokens[:n]


def sample_rows(opened: Opened, chain: Chain, last: int, draft: Tokens) -> Tokens:
    """The sampling of Session.verify in Python; leaves the round open."""
    session = opened.session
    session.verify_begin(last, draft)
    emitted: list[int] = []
    for row in range(len(draft) + 1):
        emitted.append(session.sample(chain.address, row))
        if row == len(draft) or emitted[-1] != draft[row] or is_end(opened, emitted[-1]):
            break
    return ids(*emitted)


def tops(opened: Opened, n: int) -> list[int]:
    """The likeliest id of each row of the last verify."""
    return [int(np.argmax(opened.session.logits(row))) for row in range(n)]


def entry(table: RecycleTable, before: int, last: int) -> int:
    """The id behind two tokens, -1 if none is known."""
    tokens, _ = table.draft(before, last, 1)
    return int(tokens[0]) if len(tokens) else -1


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("by_rows", [False, True])
def test_output_equals_plain_decoding(llama: Opened, kind: str, by_rows: bool) -> None:
    prompt = random_tokens(20, llama.n_vocab)
    table = RecycleTable(llama.n_vocab)
    with CHAINS[kind](Chain(llama)) as chain:
        plain = decode_plain(llama, chain, prompt, 60)
    for _ in range(2):  # cold, then warm
        with CHAINS[kind](Chain(llama)) as chain:
            run = decode_recycled(llama, chain, prompt, 60, table, by_rows=by_rows)
        assert run.tokens == plain.tokens
    assert run.drafted > 0


def test_output_equals_plain_decoding_on_a_real_model(real: Opened) -> None:
    prompt = tokenize(real, TEXT)
    table = RecycleTable(real.n_vocab)
    with Chain(real).greedy() as chain:
        plain = decode_plain(real, chain, prompt, 64)
        cold = decode_recycled(real, chain, prompt, 64, table)
        warm = decode_recycled(real, chain, prompt, 64, table)
    assert cold.tokens == warm.tokens == plain.tokens
    assert len(warm.drafts) < len(cold.drafts) < 63
    assert warm.accepted > len(
        warm.drafts
    )  # it has seen the very text: a mean acceptance length above 2


@pytest.mark.parametrize("kind", ["greedy", "gumbel"])
def test_every_row_teaches_those_of_rejected_tokens_too(llama: Opened, kind: str) -> None:
    session, table = llama.session, RecycleTable(llama.n_vocab)
    prompt = random_tokens(20, llama.n_vocab, seed=1)
    before = int(prompt[-1])
    with CHAINS[kind](Chain(llama)) as chain:
        session.rewind(0)
        session.prefill(prompt)
        last = session.sample(chain.address)
        draft = ids(
            *[token for token in random_tokens(40, llama.n_vocab, seed=2) if token != last][:5]
        )
        assert len(set(draft.tolist())) == 5
        emitted = session.verify(chain.address, last, draft, table, before)
    assert len(emitted) < 5
    stood = [before, last, *draft.tolist()]
    expected = tops(llama, 6)
    assert [entry(table, -1, stood[i + 1]) for i in range(6)] == expected
    # the text before a rejected token is wrong, so it tells nothing of pairs
    other = next(token for token in range(5, llama.n_vocab) if token not in expected)
    for token in stood[1:]:
        table.learn(-1, ids(token), ids(other))
    n = len(emitted)
    assert [entry(table, stood[i], stood[i + 1]) for i in range(6)] == expected[:n] + [other] * (
        6 - n
    )


def test_what_fills_up_a_width_teaches_nothing(llama: Opened) -> None:
    session, table = llama.session, RecycleTable(llama.n_vocab)
    session.rewind(0)
    session.prefill(random_tokens(20, llama.n_vocab, seed=1))
    last = session.sample(0)
    draft = ids(*[token for token in random_tokens(40, llama.n_vocab, seed=2) if token != last][:4])
    emitted = session.verify(0, last, draft, table, 3, drafted=2)
    assert len(emitted) < 3
    assert [entry(table, -1, int(token)) >= 0 for token in (last, *draft)] == [True] * 3 + [
        False
    ] * 2
    session.rewind(20)
    session.prefill(ids(last))
    right = [session.sample(0)]
    while len(right) < 3:
        right += session.verify(0, right[-1], NO_DRAFT).tolist()
    session.rewind(20)
    table.clear()
    assert session.verify(0, last, ids(*right), table, 3, drafted=0).tolist()[:3] == right
    assert entry(table, last, right[0]) == right[1]  # filled up, yet emitted


def test_nothing_is_learnt_behind_the_end_of_a_text(llama: Opened) -> None:
    session, table = llama.session, RecycleTable(llama.n_vocab)
    end = next(token for token in range(llama.n_vocab) if is_end(llama, token))
    session.rewind(0)
    session.prefill(random_tokens(20, llama.n_vocab))
    last = session.sample(0)
    other = next(t for t in range(5, llama.n_vocab) if t != last)
    session.verify(0, last, ids(other, end, other + 1), table, 3)
    assert entry(table, -1, other) >= 0
    assert entry(table, -1, end) == entry(table, -1, other + 1) == -1


def test_entries_follow_the_target(llama: Opened) -> None:
    """An entry is what the target said last, not what it said first."""
    session, table = llama.session, RecycleTable(llama.n_vocab)
    before, last, draft = 3, 40, ids(41, 42)
    stood, said = [before, last, *draft.tolist()], []
    for seed in range(6):
        session.rewind(0)
        session.prefill(random_tokens(20, llama.n_vocab, seed=seed))
        session.verify(0, last, draft, table, before)
        said.append(tops(llama, 3))
        assert [entry(table, stood[i], stood[i + 1]) for i in range(3)] == said[-1]
    assert len({row[0] for row in said}) > 1  # the target did change its mind


def test_rows_of_a_round_and_of_a_prompt(llama: Opened) -> None:
    session = llama.session
    prompt = random_tokens(20, llama.n_vocab, seed=3)
    by_call, by_verify = RecycleTable(llama.n_vocab), RecycleTable(llama.n_vocab)
    session.rewind(0)
    session.prefill(prompt)
    session.recycle(by_call, int(prompt[-2]), prompt[-1:])
    first = entry(by_call, int(prompt[-2]), int(prompt[-1]))
    assert first == int(np.argmax(session.logits())) == session.sample(0)
    draft = ids(50, 51, 52)
    session.verify_begin(first, draft)
    session.recycle(by_call, int(prompt[-1]), np.append(np.int32(first), draft), 1)
    session.verify_end(1)
    session.rewind(20)
    assert len(session.verify(0, first, draft, by_verify, int(prompt[-1]))) == 1
    stood = [int(prompt[-1]), first, *draft.tolist()]
    for i in range(4):
        assert entry(by_call, *stood[i : i + 2]) == entry(by_verify, *stood[i : i + 2]) >= 0
    with pytest.raises(errors.DecodeError, match="no logits"):
        session.recycle(by_call, 3, ids(4, 5, 6, 7, 8))


def test_a_text_stands_for_the_rows_of_a_prompt() -> None:
    table = RecycleTable(100)
    table.begin(ids(1, 2, 3, 1, 4))
    assert table.draft(9, 2, 3)[0].tolist() == [3, 1, 4]
    assert table.draft(2, 3, 8)[0].tolist() == [1, 4]
    _, (fresh,) = table.draft(1, 2, 1)
    table.begin(ids(7, 8))
    _, (old,) = table.draft(1, 2, 1)
    assert old < 0.5 * fresh  # what followed in another text says little


def test_proposer_knows_what_it_stands_behind() -> None:
    table = RecycleTable(100)
    table.learn(5, ids(6), ids(7))
    table.learn(6, ids(9), ids(8))
    proposer = RecycleProposer(table, 2)
    assert proposer.draft(4) is None
    proposer.start(ids(1, 5), 6)
    assert proposer.before == 5
    draft = proposer.draft(4)
    assert draft is not None
    assert (draft.source, draft.tokens.tolist(), len(draft.chances)) == ("recycle", [7], 1)
    proposer.emitted(ids(9))
    assert proposer.before == 6
    draft = proposer.draft(4)
    assert draft is not None
    assert draft.tokens.tolist() == [8]
    proposer.emitted(ids(2, 3, 4))
    assert proposer.before == 3
    proposer.emitted(ids())
    assert proposer.before == 3
    proposer.start(ids(), 6)
    assert proposer.before == -1


def test_copies_and_bounds() -> None:
    table = RecycleTable(1000)
    nbytes = table.nbytes
    table.learn(1, ids(2), ids(3))
    copy = table.copy()
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(0, 1000, 10000).astype(np.int32)
        table.learn(-1, tokens[:-1], tokens[1:])
    assert table.nbytes == nbytes < 2 << 20
    assert entry(copy, 1, 2) == 3
    table.clear()
    assert entry(table, 1, 2) == -1
    assert RecycleTable(262144).nbytes < 4 << 20


def test_wrong_arguments_are_value_errors() -> None:
    for n_vocab in (0, -5):
        with pytest.raises(ValueError, match="vocabulary"):
            RecycleTable(n_vocab)
    table = RecycleTable(8)
    with pytest.raises(ValueError, match="dimensions"):
        table.extend(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="one for each"):
        table.learn(1, ids(2, 3), ids(4))
    table.learn(1, ids(-1, 8, 2), ids(1, 1, 99))
    table.begin(ids(-1, 100, 3))
    for last in (-1, 2, 8, 1 << 30):
        assert entry(table, 1, last) == -1
