"""Session.time_verify and time_draft: they time passes, and leave the user's sequence as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_rounds import NO_DRAFT, Chain, decode_plain, n_cells
from lowlevel import Opened, random_tokens, rpc_devices

import pyssd
from pyssd import errors
from pyssd.measure import measure_costs
from pyssd.skipset import Block

KINDS = ("attn", "ffn", "mixer")


def widths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def blocks_of(opened: Opened) -> list[Block]:
    return [Block(i, layer, KINDS[k], n, dev) for i, layer, k, n, dev in opened.session.blocks()]


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=512, n_ubatch=128) as opened:
        yield opened


@pytest.mark.parametrize("n_past", [0, 70])
@pytest.mark.parametrize("cells", [0, 130])
def test_passes_are_timed_one_by_one(llama: Opened, n_past: int, cells: int) -> None:
    session = llama.session
    session.rewind(0)
    if n_past:
        session.prefill(random_tokens(n_past, llama.n_vocab))
    seconds = session.time_verify(widths(1, 1, 8, 64, 2), cells)
    assert seconds.dtype == np.float64
    assert seconds.shape == (5,)
    assert (seconds > 0).all()
    steps = session.time_draft(llama.bits(mlp=[1]), 256, 4)
    assert steps.dtype == np.float64
    assert steps.shape == (4,)
    assert (steps > 0).all()
    assert session.n_past == n_cells(llama) == n_past
    assert session.time_verify(widths()).shape == (0,)


def test_a_plan_and_a_width_are_built_once(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.time_verify(widths(2))
    before = session.graphs_built()
    session.time_verify(widths(2, 2, 2))
    assert session.graphs_built() == before
    session.time_verify(widths(2, 11, 11, 2, 2, 11))
    assert session.graphs_built()["target"] == before["target"] + 1
    built = session.graphs_built()["draft"]
    session.time_draft(llama.bits(mlp=[1, 2]), 0, 5)
    assert session.graphs_built()["draft"] == built + 1


def test_cells_in_front_are_really_there(llama: Opened) -> None:
    """A pass behind more than 256 cells sees a longer window, which is another graph."""
    session = llama.session
    session.rewind(0)
    session.time_verify(widths(1))
    before = session.graphs_built()["target"]
    session.time_verify(widths(1, 1), 300)
    assert session.graphs_built()["target"] == before + 1


@pytest.mark.parametrize("skip", [None, [1, 2]])
def test_output_afterwards_is_what_it_would_have_been(
    family_model: Path, skip: list[int] | None
) -> None:
    with Opened(family_model, n_ctx=512, n_ubatch=128) as opened, Chain(opened).greedy() as chain:
        session = opened.session
        prompt = random_tokens(40, opened.n_vocab)
        plain = decode_plain(opened, chain, prompt, 24).tokens
        session.rewind(0)
        session.prefill(prompt)
        bits = None if skip is None else opened.bits(mlp=skip)
        session.set_skip(bits)
        tokens = [session.sample(chain.address)]
        drafted = []
        while len(tokens) < 24:
            session.time_verify(widths(1, 8), 100)
            session.time_draft(opened.bits(attention=[1], mlp=[0, 3]), 256, 2)
            assert session.n_past == n_cells(opened)
            draft, _ = session.draft(chain.address, tokens[-1], 3)
            drafted.append(draft.tolist())
            tokens += session.verify(chain.address, tokens[-1], draft).tolist()
        assert tokens[:24] == plain[:24]
        # the plan of set_skip held in every draft
        session.rewind(0)
        session.prefill(prompt)
        session.set_skip(bits)
        tokens, again = [session.sample(chain.address)], []
        while len(tokens) < 24:
            draft, _ = session.draft(chain.address, tokens[-1], 3)
            again.append(draft.tolist())
            tokens += session.verify(chain.address, tokens[-1], draft).tolist()
        assert again == drafted


def test_time_ends_between_passes(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    many = np.full(10_000, 8, np.int32)
    assert 0 < len(session.time_verify(many, 0, 0.02)) < 10_000
    assert 0 < len(session.time_draft(None, 0, 10_000, 0.02)) < 10_000
    assert len(session.time_verify(many, 0, 0.0)) == 0


def test_what_does_not_fit_is_refused(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    for bad in ((widths(0), 0), (widths(1), -1)):
        with pytest.raises(ValueError, match="widths"):
            session.time_verify(*bad)
    for wide in ((widths(65), 0), (widths(8), 505), (widths(1), 512)):
        with pytest.raises(errors.ContextOverflowError):
            session.time_verify(*wide)
    assert len(session.time_verify(widths(8), 504)) == 1
    with pytest.raises(errors.SkipSetError):
        session.time_draft(np.zeros(3, np.uint8), 0, 1)
    with pytest.raises(ValueError, match="head_rows"):
        session.time_draft(None, llama.n_vocab + 1, 1)
    assert session.n_past == n_cells(llama) == 0


def test_logits_of_before_are_gone_and_said_to_be(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.prefill(random_tokens(5, llama.n_vocab))
    session.time_verify(widths(4))
    with pytest.raises(errors.DecodeError, match="no logits"):
        session.logits(0)


def test_a_window_that_forgets_keeps_the_users_cells(tiny_model: Callable[..., Path]) -> None:
    path = str(tiny_model("gemma3", n_window=64))
    options: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 64, "swa_full": False, "verbose": False}
    with pyssd.Llama(path, speculative="off", **options) as llm:
        session = llm._session
        assert session is not None
        session.rewind(0)
        assert (
            len(session.time_verify(widths(1, 8), 400)) == 2
        )  # nothing of the user's is there yet
        texts = []
        for measures in (False, True):
            session.rewind(0)
            session.prefill(random_tokens(150, llm.n_vocab()))
            tokens = [session.sample(0)]
            if measures:
                with pytest.raises(errors.ContextOverflowError):
                    session.time_verify(widths(1), 400)
                assert len(session.time_verify(widths(1, 8, 16))) == 3
            while len(tokens) < 12:
                tokens += session.verify(0, tokens[-1], NO_DRAFT).tolist()
            texts.append(tokens)
        assert texts[0] == texts[1]


def test_cancel_ends_it(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.prefill(random_tokens(20, llama.n_vocab))
    for run in (
        lambda: session.time_verify(np.full(1_000_000, 8, np.int32), 100),
        lambda: session.time_draft(None, 0, 1_000_000),
    ):
        timer = threading.Timer(0.05, session.cancel)
        timer.start()
        with pytest.raises(errors.Cancelled):
            run()
        timer.join()
        session.clear_cancel()
        assert session.n_past == n_cells(llama) == 20
    session.cancel()
    with pytest.raises(errors.Cancelled):
        measure_costs(session, blocks_of(llama), llama.n_vocab, n_ctx=512)
    session.clear_cancel()
    assert len(session.time_verify(widths(1))) == 1


def test_where_speculation_is_refused_nothing_is_timed(mamba_model: Path) -> None:
    with Opened(mamba_model, n_ctx=256, n_ubatch=64) as opened:
        with pytest.raises(errors.UnsupportedModelError):
            opened.session.time_verify(widths(1))
        with pytest.raises(errors.UnsupportedModelError):
            opened.session.time_draft(None, 0, 1)
        assert not measure_costs(opened.session, [], opened.n_vocab, n_ctx=256).measured


def test_every_family_is_measured_in_full(family_model: Path) -> None:
    with Opened(family_model, n_ctx=2048, n_ubatch=128) as opened:
        costs = measure_costs(
            opened.session, blocks_of(opened), opened.n_vocab, n_ctx=2048, seconds=60.0
        )
        rows = costs.rows()
        assert {int(width) for width in rows["verify"]} >= {1, 2, 4, 8, 16}
        assert all(c["measured"] for c in rows["classes"])
        assert costs.knows_cells
        assert rows["head"]
        assert opened.session.n_past == n_cells(opened) == 0


def test_devices_are_classes_of_their_own(tiny_llama: Path, rpc_server: str) -> None:
    with Opened(
        tiny_llama, n_ctx=1024, n_ubatch=128, devices=rpc_devices(rpc_server), n_gpu_layers=3
    ) as opened:
        costs = measure_costs(
            opened.session, blocks_of(opened), opened.n_vocab, n_ctx=1024, seconds=60.0
        )
        found = {(c["kind"], c["device"].startswith("RPC")) for c in costs.rows()["classes"]}
        assert found == {(kind, remote) for kind in ("attn", "ffn") for remote in (True, False)}
        assert costs.measured
