"""Session refuses what llama.cpp would abort on; cancel and close leave a correct state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core_rounds import NO_DRAFT, Chain, decode_plain, n_cells
from lowlevel import Opened, address, api, random_tokens

from pyssd import _core, errors


@pytest.fixture
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=256, n_ubatch=64) as opened:
        yield opened


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_layouts_agree_with_the_library() -> None:
    assert _core.struct_sizes() == _core.library_sizes()


def test_prompt_longer_than_the_context(llama: Opened) -> None:
    session = llama.session
    with pytest.raises(errors.ContextOverflowError, match="exceed the context of 256"):
        session.prefill(random_tokens(257, llama.n_vocab))
    assert session.n_past == n_cells(llama) == 0
    session.prefill(random_tokens(256, llama.n_vocab))
    assert session.max_draft(256) == 0
    with pytest.raises(errors.ContextOverflowError):
        session.verify(0, 5, NO_DRAFT)
    assert session.n_past == n_cells(llama) == 256


def test_drafts_are_clamped_to_the_room_left(llama: Opened) -> None:
    session = llama.session
    session.set_skip(None)
    session.prefill(random_tokens(250, llama.n_vocab))
    assert session.max_draft(256) == 5
    assert session.max_draft(252) == 1
    assert session.max_draft(100) == 0
    draft, _ = session.draft(0, 5, 100)
    assert len(draft) <= 5
    with pytest.raises(errors.ContextOverflowError):
        session.verify(0, 5, ids(*range(10, 16)))
    assert session.n_past == n_cells(llama) == 250
    assert len(session.verify(0, 5, ids(*range(10, 15)))) >= 1


def test_verify_wider_than_the_rows_of_logits(tiny_llama: Path) -> None:
    with Opened(tiny_llama, n_ctx=256, n_ubatch=64, outputs_max=4) as opened:
        assert opened.session.max_draft(256) == 3
        with pytest.raises(errors.ContextOverflowError, match="max_draft"):
            opened.session.verify(0, 5, ids(1, 2, 3, 4))
        rows = np.empty((10, opened.n_vocab), np.float32)
        opened.session.prefill(random_tokens(10, opened.n_vocab), rows)  # in chunks of four rows
        opened.session.rewind(0)
        opened.session.prefill(random_tokens(10, opened.n_vocab))
        assert np.array_equal(opened.session.logits(), rows[-1])


@pytest.mark.parametrize("token", [-1, 512, 2**31 - 1, -(2**31)])
def test_token_ids_out_of_range(llama: Opened, token: int) -> None:
    session = llama.session
    for call in (
        lambda: session.prefill(ids(5, token)),
        lambda: session.draft(0, token, 4),
        lambda: session.verify(0, token, NO_DRAFT),
        lambda: session.verify(0, 5, ids(token)),
        lambda: session.skip_logits(ids(token), None),
    ):
        with pytest.raises(ValueError, match="not in 0"):
            call()
    assert session.n_past == n_cells(llama) == 0


def test_skip_sets_for_another_model(llama: Opened) -> None:
    session = llama.session
    n_blocks = len(session.blocks())
    with pytest.raises(errors.SkipSetError, match=f"the model has {n_blocks}"):
        session.set_skip(np.zeros(n_blocks + 1, np.uint8))
    with pytest.raises(errors.SkipSetError, match="1-D"):
        session.set_skip(np.zeros((2, n_blocks), np.uint8))
    with pytest.raises(errors.SkipSetError):
        session.skip_argmax(ids(5), np.ones(1, np.uint8))
    with pytest.raises(ValueError, match="head_rows"):
        session.set_skip(None, head_rows=-1)
    with pytest.raises(ValueError, match="head_rows"):
        session.set_skip(None, head_rows=llama.n_vocab + 1)
    with pytest.raises(ValueError, match="tap"):
        session.hidden(ids(5), ids(n_blocks + 1))


def test_rows_and_steps_that_do_not_exist(llama: Opened) -> None:
    session = llama.session
    with pytest.raises(errors.DecodeError, match="no logits"):
        session.logits()
    session.prefill(random_tokens(10, llama.n_vocab))
    session.logits(-1)
    session.logits(9)
    for row in (-2, 0, 8, 10, 2**31 - 1):
        with pytest.raises(errors.DecodeError, match="no logits"):
            session.logits(row)
    with pytest.raises(ValueError, match="verify_begin"):
        session.verify_end(1)
    session.verify_begin(5, ids(6))
    for n_emitted in (0, 3):
        with pytest.raises(ValueError, match="round"):
            session.verify_end(n_emitted)
    session.verify_end(2)
    with pytest.raises(ValueError, match="rewind"):
        session.rewind(13)
    with pytest.raises(ValueError, match="rewind"):
        session.rewind(-1)
    assert session.n_past == n_cells(llama) == 12


def test_arguments_of_the_wrong_shape(llama: Opened) -> None:
    session = llama.session
    with pytest.raises(ValueError, match="1-D"):
        session.prefill(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="shape"):
        session.prefill(ids(5, 6), np.empty((3, llama.n_vocab), np.float32))
    with pytest.raises(TypeError):
        session.prefill(
            ids(5), np.empty((1, llama.n_vocab), np.float64)
        )  # a copy would be filled in vain
    with pytest.raises(TypeError):
        session.prefill("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ctx"):
        _core.Session(0)
    session.prefill(NO_DRAFT)
    assert session.n_past == 0


def test_chain_that_selects_nothing(llama: Opened) -> None:
    session = llama.session
    session.prefill(random_tokens(10, llama.n_vocab))
    with Chain(llama).filters(1.0) as chain, pytest.raises(ValueError, match="selects no token"):
        session.sample(chain.address)
    with Chain(llama).grammar(b'root ::= "a"').greedy() as chain:
        assert session.sample(chain.address) >= 0


def test_nothing_left_to_sample(llama: Opened) -> None:
    """llama.cpp aborts when an end of text that the grammar forbids is accepted."""
    session = llama.session
    session.prefill(random_tokens(10, llama.n_vocab))
    session.logits()[:] = -np.inf
    for chain in (
        Chain(llama).greedy(),
        Chain(llama).grammar().filters(1.0).dist(),
        Chain(llama).gumbel(),
    ):
        with chain, pytest.raises(errors.DecodeError, match="no token is left"):
            session.sample(chain.address)
    session.logits()[:] = np.nan
    with Chain(llama).filters(1.0).gumbel() as chain, pytest.raises(errors.DecodeError):
        session.sample(chain.address)
    session.logits()[7] = np.inf
    with Chain(llama).filters(1.0).gumbel() as chain:
        assert session.sample(chain.address) == 7


def test_memory_changed_by_someone_else(llama: Opened) -> None:
    session = llama.session
    session.prefill(random_tokens(10, llama.n_vocab))
    api.llama_memory_clear(api.llama_get_memory(llama.ctx), True)
    with pytest.raises(errors.DecodeError, match="set n_past"):
        session.prefill(ids(5))
    with pytest.raises(ValueError, match="does not match"):
        session.n_past = 10
    session.n_past = 0
    session.prefill(ids(5))
    assert session.n_past == 1


def test_use_after_close(llama: Opened) -> None:
    session = llama.session
    session.set_skip(None)
    session.prefill(random_tokens(10, llama.n_vocab))
    session.draft(0, 5, 2)
    session.close()
    session.close()
    session.cancel()
    for call in (
        lambda: session.prefill(ids(5)),
        lambda: session.sample(0),
        lambda: session.draft(0, 5, 2),
        lambda: session.verify(0, 5, NO_DRAFT),
        session.logits,
        session.blocks,
        lambda: session.refusal,
        lambda: session.skip_logits(ids(5), None),
        session.graphs_built,
        session.counters,
    ):
        with pytest.raises(errors.ClosedError):
            call()


def test_second_thread_is_refused_and_cancel_ends_a_long_prompt(smollm2: Path) -> None:
    with Opened(smollm2, n_ctx=2048, n_ubatch=2048) as opened:
        session = opened.session
        session.prefill(random_tokens(4, opened.n_vocab))
        raised: list[BaseException] = []

        def work() -> None:
            try:
                session.prefill(random_tokens(2000, opened.n_vocab))
            except BaseException as exc:
                raised.append(exc)

        worker = threading.Thread(target=work)
        worker.start()
        time.sleep(0.2)
        with pytest.raises(errors.BusyError):
            session.rewind(0)
        with pytest.raises(errors.BusyError):
            session.close()
        started = time.monotonic()
        session.cancel()
        worker.join(timeout=30)
        assert not worker.is_alive()
        assert time.monotonic() - started < 2.0
        assert isinstance(raised[0], errors.Cancelled)
        assert session.n_past == n_cells(opened) == 4
        with pytest.raises(errors.Cancelled):
            session.verify(0, 5, NO_DRAFT)
        session.clear_cancel()
        session.rewind(0)
        with Chain(opened).greedy() as chain:
            assert (
                len(decode_plain(opened, chain, random_tokens(20, opened.n_vocab), 5).tokens) == 5
            )


@pytest.mark.parametrize("call", ["draft", "verify", "skip_logits"])
def test_cancel_before_a_call(llama: Opened, call: str) -> None:
    session = llama.session
    session.set_skip(None)
    session.prefill(random_tokens(10, llama.n_vocab))
    calls: dict[str, Callable[[], object]] = {
        "draft": lambda: session.draft(0, 5, 4),
        "verify": lambda: session.verify(0, 5, ids(6)),
        "skip_logits": lambda: session.skip_logits(ids(5, 6), None),
    }
    session.cancel()
    with pytest.raises(errors.Cancelled):
        calls[call]()
    assert session.n_past == n_cells(llama) == 10
    assert n_cells(llama, sequence=1) == 0
    session.clear_cancel()
    assert len(session.verify(0, 5, NO_DRAFT)) == 1


def test_core_needs_its_library() -> None:
    with pytest.raises(errors.LibraryNotFoundError):
        _core.attach(0)


def test_seeds_of_any_size() -> None:
    for seed in (0, 2**32 - 1, 2**64, -1, 10**30):
        sampler = _core.gumbel_sampler(seed)
        assert sampler != 0
        assert _core.chain_has(sampler, "gumbel")
        api.llama_sampler_free(api.llama_sampler_p_ctypes.from_buffer_copy(np.uint64(sampler)))
    assert not _core.chain_has(0, "gumbel")


def test_gumbel_samplers_name_is_found_in_a_chain(llama: Opened) -> None:
    with Chain(llama).custom(lambda cur: None).filters(1.0).gumbel() as chain:
        assert _core.chain_has(chain.address, "gumbel")
        assert _core.chain_has(chain.address, "top-k")
        assert not _core.chain_has(chain.address, "mirostat")
        assert address(chain.chain) == chain.address
