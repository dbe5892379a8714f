"""The near-tie guard: rows that are settled are those of plain decoding, and no others are touched.

On kernels that are not width-invariant: a row of a wide pass differs from plain decoding's, and so does every row behind
cells that a wide pass has written. Logits are compared bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core_rounds import NO_DRAFT, Chain, n_cells
from lowlevel import Logits, Opened, Tokens, random_tokens

from pyssd import errors

HUGE = 1e9
LETTERS = b"root ::= [a-z0-9, ]+"
CHAINS: dict[str, Callable[[Chain], Chain]] = {
    "greedy": lambda c: c.greedy(),
    "greedy penalties": lambda c: c.penalties().greedy(),
    "gumbel": lambda c: c.filters(0.9).gumbel(),
    "gumbel alone": lambda c: c.gumbel(7),
    "penalties": lambda c: c.penalties().filters(0.8).gumbel(),
    "grammar": lambda c: c.penalties().grammar(LETTERS).filters(1.0).gumbel(),
    "bias": lambda c: c.bias(70, 5.0).filters(1.0).gumbel(),
}
N = 24


@pytest.fixture(scope="module")
def noisy(tiny_model: Callable[..., Path]) -> Iterator[Opened]:
    """Upstream's kernels: F32 products of two columns and more go through sgemm, single ones do not."""
    with Opened(tiny_model("llama", weight_type="F32"), n_ctx=512, exact=False) as opened:
        yield opened


def plain(opened: Opened, chain: Chain, prompt: Tokens, n: int = N) -> tuple[list[int], Logits]:
    """Tokens of plain decoding, and the row behind each but the last: float32 [n - 1, n_vocab]."""
    session = opened.session
    session.rewind(0)
    session.prefill(prompt)
    tokens, rows = [session.sample(chain.address)], []
    while len(tokens) < n:
        tokens += session.verify(chain.address, tokens[-1], NO_DRAFT).tolist()
        rows.append(session.logits(0).copy())
    return tokens, np.stack(rows)


def drafts_of(tokens: list[int], start: int, opened: Opened) -> Tokens:
    """What plain decoding emits next, with a wrong token in every third draft."""
    draft = np.array(tokens[start : start + 4], np.int32)
    if start % 3 == 0 and len(draft) > 2:
        draft[2] = (draft[2] + 1) % opened.n_vocab
    return draft


def guarded(
    opened: Opened, chain: Chain, prompt: Tokens, tokens: list[int], margin: float
) -> tuple[list[int], list[Logits]]:
    """The same with drafts; rows as far as plain decoding has them."""
    session = opened.session
    session.rewind(0)
    session.prefill(prompt)
    emitted, rows = [session.sample(chain.address)], []
    while len(emitted) < len(tokens):
        draft = drafts_of(tokens, len(emitted), opened)
        past = session.n_past
        new = session.verify(chain.address, emitted[-1], draft, guard=margin).tolist()
        assert n_cells(opened) == session.n_past == past + len(new)
        rows += [session.logits(row).copy() for row in range(len(new))]
        emitted += new
    return emitted[: len(tokens)], rows[: len(tokens) - 1]


@pytest.mark.parametrize("kind", CHAINS)
def test_every_row_settled_is_plain_decoding(noisy: Opened, kind: str) -> None:
    prompt = random_tokens(20, noisy.n_vocab)
    with CHAINS[kind](Chain(noisy)) as chain:
        tokens, rows = plain(noisy, chain, prompt)
    before = noisy.session.counters()
    with CHAINS[kind](Chain(noisy)) as chain:
        settled, settled_rows = guarded(noisy, chain, prompt, tokens, HUGE)
    assert settled == tokens
    np.testing.assert_array_equal(np.stack(settled_rows), rows)
    after = noisy.session.counters()
    assert after["guard_rows"] - before["guard_rows"] == N - 1
    assert after["guard_passes"] - before["guard_passes"] == N - 1
    assert after["guard_seconds"] > before["guard_seconds"]
    assert after["verify_seconds"] > after["guard_seconds"]


def test_the_kernels_are_noisy(noisy: Opened) -> None:
    """Without this the test above would hold for any guard."""
    prompt = random_tokens(20, noisy.n_vocab)
    with Chain(noisy).greedy() as chain:
        tokens, rows = plain(noisy, chain, prompt)
        unguarded, unguarded_rows = guarded(noisy, chain, prompt, tokens, 0.0)
    assert unguarded == tokens  # near-ties are rare
    assert np.abs(np.stack(unguarded_rows) - rows).max() > 0.0


@pytest.mark.parametrize("rewrite", [True, False])
def test_cells_of_wide_passes_are_written_again(noisy: Opened, rewrite: bool) -> None:
    session = noisy.session
    with Chain(noisy).greedy() as chain:
        tokens, rows = plain(noisy, chain, random_tokens(20, noisy.n_vocab))
        session.rewind(20)
        for start in (0, 5):
            draft = np.array(tokens[start + 1 : start + 5], np.int32)
            assert len(session.verify(chain.address, tokens[start], draft)) == 5
        before = session.counters()["guard_passes"]
        draft = np.array(tokens[11:13], np.int32)
        new = session.verify(chain.address, tokens[10], draft, guard=HUGE, rewrite=rewrite)
        assert new.tolist() == tokens[11:12]
        passes = session.counters()["guard_passes"] - before
        assert passes == (11 if rewrite else 1)
        assert np.array_equal(session.logits(0), rows[10]) == rewrite
        # a wide pass anywhere before is enough to make a single row differ
        session.verify(chain.address, tokens[11], NO_DRAFT)
        assert np.array_equal(session.logits(0), rows[11]) == rewrite


def test_single_rows_behind_wide_cells_are_settled_too(noisy: Opened) -> None:
    session = noisy.session
    with Chain(noisy).greedy() as chain:
        tokens, rows = plain(noisy, chain, random_tokens(20, noisy.n_vocab))
        session.rewind(20)
        session.verify(chain.address, tokens[0], np.array(tokens[1:3], np.int32))
        session.verify(chain.address, tokens[3], NO_DRAFT, guard=HUGE)
        np.testing.assert_array_equal(session.logits(0), rows[3])
        before = session.counters()["guard_passes"]
        session.verify(chain.address, tokens[4], NO_DRAFT, guard=HUGE)
        assert session.counters()["guard_passes"] == before


def test_margin_decides_by_the_gap_of_the_row(noisy: Opened) -> None:
    session = noisy.session
    with Chain(noisy).greedy() as chain:
        tokens, _ = plain(noisy, chain, random_tokens(20, noisy.n_vocab))
        draft = np.array(tokens[1:4], np.int32)
        session.rewind(20)
        session.verify_begin(tokens[0], draft)
        gaps = []
        for row in range(4):
            second, first = np.partition(session.logits(row), -2)[-2:]
            gaps.append(float(first - second))
        smallest = int(np.argmin(gaps))
        for factor in (0.99, 1.01):
            session.rewind(20)
            before = session.counters()["guard_rows"]
            margin = gaps[smallest] * factor
            emitted = session.verify(chain.address, tokens[0], draft, guard=margin)
            is_settled = factor > 1.0
            assert session.counters()["guard_rows"] - before == is_settled
            assert len(emitted) == (smallest + 1 if is_settled else 4)
            assert emitted.tolist() == tokens[1 : 1 + len(emitted)]


@pytest.mark.parametrize("kind", CHAINS)
def test_no_noise_within_the_margin_changes_a_row_that_is_not_settled(
    noisy: Opened, kind: str
) -> None:
    margin, rng = 0.2, np.random.default_rng(3)
    session = noisy.session
    text = random_tokens(60, noisy.n_vocab, 5)
    session.rewind(0)
    session.prefill(text[:10])
    settled = 0
    for i in range(10, 58):
        before = session.counters()["guard_rows"]
        with CHAINS[kind](Chain(noisy)) as chain:
            emitted = session.verify(chain.address, text[i], text[i + 1 : i + 2], guard=margin)
        session.rewind(i)
        if session.counters()["guard_rows"] > before:
            settled += 1
        else:
            session.verify_begin(text[i], text[i + 1 : i + 2])
            row = session.logits(0)
            base = row.copy()
            for _ in range(10):
                row[:] = base + rng.uniform(-margin / 2, margin / 2, len(base)).astype(np.float32)
                with CHAINS[kind](Chain(noisy)) as chain:
                    assert session.sample(chain.address, 0) == emitted[0]
            row[:] = base
            session.rewind(i)
        session.prefill(text[i : i + 1])
    assert 0 < settled < 48


def test_draws_from_hidden_state_are_left_alone(noisy: Opened) -> None:
    """A gap says nothing about dist: settling would cost passes and prevent nothing."""
    session = noisy.session
    before = session.counters()["guard_passes"]
    with Chain(noisy).filters(0.8).dist() as chain:
        tokens, _ = plain(noisy, chain, random_tokens(20, noisy.n_vocab))
    with Chain(noisy).filters(0.8).dist() as chain:
        assert guarded(noisy, chain, random_tokens(20, noisy.n_vocab), tokens, HUGE)[0] == tokens
    assert session.counters()["guard_passes"] == before


def test_rows_of_a_settled_round_can_be_read(noisy: Opened) -> None:
    session = noisy.session
    with Chain(noisy).greedy() as chain:
        tokens, rows = plain(noisy, chain, random_tokens(20, noisy.n_vocab))
        session.rewind(20)
        session.verify(chain.address, tokens[0], np.array(tokens[1:4], np.int32), guard=HUGE)
    np.testing.assert_array_equal(session.logits(0), rows[0])
    np.testing.assert_array_equal(session.logits(-1), rows[0])
    with pytest.raises(errors.DecodeError):
        session.logits(1)
    session.rewind(20)
    with pytest.raises(errors.DecodeError):
        session.logits(0)


def test_a_cancelled_settling_leaves_the_cells_in_place(noisy: Opened) -> None:
    session = noisy.session
    prompt = random_tokens(20, noisy.n_vocab)
    with Chain(noisy).greedy() as chain:
        tokens, _ = plain(noisy, chain, prompt, 80)
        cancelled = 0
        for attempt in range(30):
            session.rewind(20)
            for start in range(0, 60, 5):
                session.verify(
                    chain.address, tokens[start], np.array(tokens[start + 1 : start + 5], np.int32)
                )
            timer = threading.Timer(0.0003 * (attempt % 10 + 1), session.cancel)
            timer.start()
            try:
                session.verify(chain.address, tokens[60], NO_DRAFT, guard=HUGE)
            except errors.Cancelled:
                cancelled += 1
                assert session.n_past == 80
            timer.join()
            session.clear_cancel()
            assert n_cells(noisy) == session.n_past
            last = tokens[session.n_past - 20]
            following = session.verify(chain.address, last, NO_DRAFT).tolist()
            assert following == [tokens[session.n_past - 20]]
    assert cancelled > 0
