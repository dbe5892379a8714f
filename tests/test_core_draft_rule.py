"""How far a draft goes by a table of chances and thresholds, and drafting on behind a draft by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_rounds import Chain, decode_plain, n_cells
from lowlevel import Opened, random_tokens

from pyssd.propose.skip import EDGES, DraftRule

N_BINS = len(EDGES) + 1


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=512, n_ubatch=64) as opened:
        opened.session.prefill(random_tokens(20, opened.n_vocab))
        yield opened


def rule(
    chance: float = 0.5, draft_reach: list[float] | None = None, keep_reach: list[float] | None = None
) -> DraftRule:  # fmt: skip
    zeros = [0.0] * 8
    return DraftRule(
        np.array(EDGES, np.float32),
        np.full(N_BINS, chance, np.float32),
        np.array(draft_reach or zeros, np.float32),
        np.array(keep_reach or zeros, np.float32),
    )


def test_draft_goes_on_while_it_is_worth_it(llama: Opened) -> None:
    session = llama.session
    steps = session.draft_steps
    # reach is 0.5, 0.25, 0.125, ...: the fourth token (i = 3) asks for more than it has
    tokens, confidences = session.draft(0, 5, 8, 0.0, rule(0.5, [0, 0, 0, 0.13, 0, 0, 0, 0]))
    assert len(tokens) == len(confidences) == 3
    assert session.draft_steps - steps == 3  # nothing is decoded in vain
    tokens, _ = session.draft(0, 5, 8, 0.0, rule(0.5, [0, 0, 0, 0.12, 0, 0, 0, 0]))
    assert len(tokens) == 8


def test_token_that_is_not_worth_verifying_is_left_out(llama: Opened) -> None:
    session = llama.session
    steps = session.draft_steps
    tokens, _ = session.draft(0, 5, 8, 0.0, rule(0.5, None, [0, 0.3, 0, 0, 0, 0, 0, 0]))
    assert len(tokens) == 1
    assert session.draft_steps - steps == 2
    tokens, _ = session.draft(0, 5, 8, 0.0, rule(0.5, None, [0.6] * 8))
    assert len(tokens) == 0


def test_chance_is_that_of_the_bin_of_the_confidence(llama: Opened) -> None:
    session = llama.session
    _, confidences = session.draft(0, 5, 1)
    place = int(np.searchsorted(np.array(EDGES, np.float32), confidences[0], side="right"))
    for chance, n in ((0.9, 1), (0.1, 0)):
        made = rule(0.5, None, [0.5] * 8)
        made.chances[:] = 1.0 - chance
        made.chances[place] = chance
        assert len(session.draft(0, 5, 1, 0.0, made)[0]) == n


def test_rule_bounds_the_length(llama: Opened) -> None:
    assert len(llama.session.draft(0, 5, 30, 0.0, rule(1.0))[0]) == 8  # as long as its tables


def test_rule_that_does_not_fit_together_is_refused(llama: Opened) -> None:
    wrong = DraftRule(
        np.zeros(3, np.float32), np.zeros(3, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    )  # fmt: skip
    with pytest.raises(ValueError, match="draft rule"):
        llama.session.draft(0, 5, 4, 0.0, wrong)


@pytest.mark.parametrize("n_prefix", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("head_rows", [0, 256])
def test_draft_behind_a_prefix_is_the_draft_behind_its_tokens(
    llama: Opened, n_prefix: int, head_rows: int
) -> None:
    session = llama.session
    session.rewind(20)
    skip = np.zeros(len(session.blocks()), np.uint8)
    session.set_skip(skip, head_rows)
    whole, _ = session.draft(0, 5, n_prefix + 6)
    assert len(whole) == n_prefix + 6
    tokens, confidences = session.draft(0, 5, 6, 0.0, None, whole[:n_prefix])
    assert tokens.tolist() == whole[n_prefix:].tolist()
    assert len(confidences) == 6
    assert n_cells(llama) == session.n_past == 20
    session.set_skip(None, 0)


def test_draft_behind_a_prefix_follows_the_chain(llama: Opened) -> None:
    """Penalties and noise of the prefix's positions count: with an empty set the target accepts all of it."""
    session = llama.session
    prompt = random_tokens(20, llama.n_vocab)
    with Chain(llama).penalties().filters(0.9).gumbel() as chain:
        plain = decode_plain(llama, chain, prompt, 12).tokens
    with Chain(llama).penalties().filters(0.9).gumbel() as chain:
        session.rewind(0)
        session.prefill(prompt)
        first = session.sample(chain.address)
        prefix = np.array(plain[1:4], np.int32)
        session.set_skip(None, 0)
        tokens, _ = session.draft(chain.address, first, 4, 0.0, None, prefix)
        assert tokens.tolist() == plain[4:8]
        emitted = session.verify(chain.address, first, np.append(prefix, tokens))
        assert emitted.tolist() == plain[1:9]
