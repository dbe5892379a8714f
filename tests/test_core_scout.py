"""The scout: fresh passes on scratch cells that leave the user's sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_rounds import Chain, decode_plain, n_cells
from lowlevel import Opened, random_tokens

from pyssd import errors


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=512, n_ubatch=256, outputs_max=256) as opened:
        yield opened


def test_an_empty_set_gives_the_targets_logits(llama: Opened) -> None:
    session = llama.session
    tokens = random_tokens(150, llama.n_vocab)  # more than one batch of the scout
    rows = np.empty((150, llama.n_vocab), np.float32)
    session.rewind(0)
    session.prefill(tokens, rows)
    for skip in (None, np.zeros(len(session.blocks()), np.uint8)):
        logits = session.skip_logits(tokens, skip)
        assert logits.shape == rows.shape
        assert np.allclose(logits, rows, atol=1e-4)
        assert np.array_equal(session.skip_argmax(tokens, skip), rows.argmax(1))


def test_passes_leave_the_users_cells_alone(llama: Opened) -> None:
    session = llama.session
    prompt = random_tokens(40, llama.n_vocab)
    with Chain(llama).greedy() as chain:
        plain = decode_plain(llama, chain, prompt, 20).tokens
        session.rewind(0)
        session.prefill(prompt)
        tokens = [session.sample(chain.address)]
        while len(tokens) < 20:
            session.skip_logits(
                random_tokens(30, llama.n_vocab), np.ones(len(session.blocks()), np.uint8)
            )
            assert n_cells(llama) == session.n_past
            assert n_cells(llama, sequence=1) == 0
            tokens += session.verify(chain.address, tokens[-1], np.empty(0, np.int32)).tolist()
    assert tokens == plain


def test_skipping_changes_logits_and_shortens_the_graph(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    tokens = random_tokens(20, llama.n_vocab)
    whole = session.skip_logits(tokens, None)
    n_whole = session.graph_nodes()["scout"]
    bits = llama.bits(mlp=[1])
    assert bits.sum() == 1
    skipped = session.skip_logits(tokens, bits)
    assert not np.allclose(whole, skipped, atol=1e-2)
    assert session.graph_nodes()["scout"] < n_whole
    assert np.array_equal(session.skip_argmax(tokens, bits), skipped.argmax(1))


def test_trimmed_head_has_no_logits_beyond_its_rows(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    tokens = random_tokens(20, llama.n_vocab)
    whole = session.skip_logits(tokens, None)
    trimmed = session.skip_logits(tokens, None, head_rows=256)
    assert np.allclose(trimmed[:, :256], whole[:, :256], atol=1e-4)
    assert (trimmed[:, 256:] == -np.inf).all()


def test_hidden_states_follow_the_residual_stream(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    n_blocks = len(session.blocks())
    tokens = random_tokens(70, llama.n_vocab)
    states = session.hidden(tokens, np.array([0, 1, n_blocks], np.int32))
    assert states.shape == (3, 70, 128)
    assert np.isfinite(states).all()
    for a, b in ((0, 1), (1, 2)):
        assert not np.allclose(states[a], states[b], atol=1e-3)
    # the stream before the first block is the embedding: equal tokens have equal states wherever they stand
    twice = session.hidden(np.array([9, 8, 9], np.int32), np.array([0], np.int32))
    assert np.array_equal(twice[0, 0], twice[0, 2])


def test_free_scout_keeps_the_count_of_graphs(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.skip_logits(random_tokens(5, llama.n_vocab), None)
    built = session.graphs_built()["scout"]
    assert built > 0
    assert session.context_nbytes()["scout"] > 0
    session.free_scout()
    session.free_scout()
    assert session.context_nbytes()["scout"] == 0
    assert session.graphs_built()["scout"] == built
    session.skip_logits(random_tokens(5, llama.n_vocab), None)
    assert session.graphs_built()["scout"] > built


def test_scratch_cells_need_room(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.prefill(random_tokens(400, llama.n_vocab))
    with pytest.raises(errors.ContextOverflowError):
        session.skip_logits(random_tokens(113, llama.n_vocab), None)
    assert session.skip_logits(random_tokens(112, llama.n_vocab), None).shape[0] == 112
    assert session.n_past == n_cells(llama) == 400


def test_recurrent_models_are_judged_in_a_memory_of_their_own(mamba_model: Path) -> None:
    with Opened(mamba_model, n_ctx=512, n_ubatch=128, outputs_max=128) as opened:
        session = opened.session
        if not session.blocks():
            pytest.skip(f"no blocks: {session.refusal}")
        tokens = random_tokens(70, opened.n_vocab)
        rows = np.empty((70, opened.n_vocab), np.float32)
        session.prefill(tokens, rows)
        assert np.allclose(session.skip_logits(tokens, None), rows, atol=1e-4)
        assert np.allclose(session.skip_logits(tokens[:20], None), rows[:20], atol=1e-4)
        assert session.n_past == n_cells(opened) == 70
        with pytest.raises(errors.SkipSetError):
            session.skip_logits(tokens, np.ones(len(session.blocks()), np.uint8))
