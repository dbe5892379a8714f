"""Tokens, cells and logits stay in line: prefix reuse, saved states, sent tokens, low-level calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from completions import EAGER, PROMPT, complete, make

from pyssd import Llama
from pyssd.errors import BusyError, ContextOverflowError, DecodeError

import llama_cpp


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Llama]:
    with make(tiny_llama) as made:
        yield made


# prefix reuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_second_turn_evaluates_only_what_is_new(llm: Llama, options: dict[str, Any]) -> None:
    llm.reset()
    answer = complete(llm, **options)
    assert llm.stats.prompt_tokens == len(PROMPT)
    turn = PROMPT + answer + [33, 44, 55]
    complete(llm, turn, **options)
    assert llm.stats.prompt_tokens == 3
    complete(
        llm, turn, **options
    )  # the prompt is a prefix of what is evaluated: its last token alone is done again
    assert llm.stats.prompt_tokens == 1
    complete(llm, [*turn[:20], 99], **options)
    assert llm.stats.prompt_tokens == 1
    complete(llm, [99, *turn], **options)
    assert llm.stats.prompt_tokens == len(turn) + 1


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_streamed_answer_left_early_is_reused(llm: Llama, options: dict[str, Any]) -> None:
    llm.reset()
    stream = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0, stream=True, **options)
    for _ in itertools.islice(stream, 7):
        pass
    stream.close()
    known = llm.input_ids[: llm.n_tokens].tolist()
    complete(llm, [*known, 42], **options)
    assert llm.stats.prompt_tokens == 1


def test_exact_prompt_with_live_logits_is_not_evaluated_again(llm: Llama) -> None:
    llm.reset()
    llm.eval(PROMPT)
    expected = complete(llm)
    assert llm.stats.prompt_tokens == 0
    llm.reset()
    assert complete(llm) == expected


def test_reset_false_goes_on_behind_what_is_evaluated(llm: Llama) -> None:
    llm.reset()
    llm.eval(PROMPT[:40])
    tokens = list(itertools.islice(llm.generate(PROMPT[40:], temp=0.0, reset=False), 8))
    assert llm.n_tokens == len(PROMPT) + 7
    llm.reset()
    assert list(itertools.islice(llm.generate(PROMPT, temp=0.0), 8)) == tokens


# saved states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_state_goes_on_where_it_was_saved(llm: Llama, options: dict[str, Any]) -> None:
    llm.reset()
    answer = complete(llm, n=9, **options)
    state = llm.save_state()
    assert state.scores.size == 0
    assert state.n_tokens == len(PROMPT) + len(answer)
    expected = complete(llm, PROMPT + answer, **options)
    complete(llm, [7, 8, 9])
    llm.load_state(state)
    assert llm.input_ids[: llm.n_tokens].tolist() == PROMPT + answer
    assert complete(llm, PROMPT + answer, **options) == expected
    assert llm.stats.prompt_tokens == 1


def test_state_saved_in_the_middle_of_a_generation_is_what_plain_would_save(
    tiny_llama: Path,
) -> None:
    def saved(**options: Any) -> tuple[int, list[int], int]:
        with make(tiny_llama, **options) as llm:
            generator = llm.generate(PROMPT, temp=0.0)
            list(itertools.islice(generator, 6))
            state = llm.save_state()
            with pytest.raises(BusyError):  # saving took the object over
                next(generator)
            tokens = state.input_ids[: state.n_tokens].tolist()
            return state.n_tokens, tokens, state.llama_state_size

    assert saved(**EAGER) == saved(speculative="off")


def test_stream_resumed_after_another_request_is_refused(llm: Llama) -> None:
    settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "logit_bias": {2: -100.0}}
    stream = llm.create_completion([30, 31, 32], stream=True, **settings, **EAGER)
    next(stream)
    assert llm.n_tokens < 100
    expected = complete(llm)
    with pytest.raises(BusyError):
        list(stream)
    assert complete(llm) == expected


def test_state_of_stock_llama_cpp_can_be_loaded(llm: Llama, tiny_llama: Path) -> None:
    stock = llama_cpp.Llama(str(tiny_llama), n_ctx=512, n_threads=1, verbose=False, flash_attn=True)
    stock.eval(PROMPT)
    llm.load_state(stock.save_state())
    stock.close()
    assert llm.n_tokens == len(PROMPT)
    assert len(complete(llm, n=4)) == 3


def test_state_that_does_not_fit_is_refused_and_harmless(
    llm: Llama, tiny_model: Callable[..., Path]
) -> None:
    llm.reset()
    expected = complete(llm)
    with make(tiny_model("gemma3")) as other:
        other.eval(PROMPT)
        foreign = other.save_state()
    with make(tiny_model("llama"), n_ctx=1024) as larger:
        larger.eval(PROMPT * 10)
        long_state = larger.save_state()
    with pytest.raises(DecodeError):
        llm.load_state(foreign)
    with pytest.raises(ContextOverflowError):
        llm.load_state(long_state)
    assert complete(llm) == expected


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_ram_cache_brings_a_prompt_back(llm: Llama, options: dict[str, Any]) -> None:
    llm.reset()
    llm.set_cache(llama_cpp.LlamaRAMCache())
    try:
        expected = complete(llm, **options)
        complete(llm, [9, 9, 9], **options)
        assert complete(llm, **options) == expected
        assert llm.stats.prompt_tokens == 1
    finally:
        llm.set_cache(None)


# generate() and the low-level calls -----------------------------------------------------------------------------------


def test_sent_tokens_are_evaluated_and_sampling_goes_on(tiny_llama: Path) -> None:
    def run(**options: Any) -> tuple[list[int], list[int]]:
        with make(tiny_llama, **options) as llm:
            generator = llm.generate(PROMPT, temp=0.0)
            emitted = [next(generator) for _ in range(4)]
            emitted.append(generator.send([50, 51, 52]))
            emitted += itertools.islice(generator, 5)
            generator.close()
            return emitted, llm.input_ids[: llm.n_tokens].tolist()

    emitted, tokens = run(speculative="off")
    assert tokens == PROMPT + emitted[:4] + [50, 51, 52] + emitted[4:-1]
    assert run(**EAGER) == (emitted, tokens)


def test_eval_and_sample_by_hand(llm: Llama) -> None:
    llm.reset()
    expected = list(itertools.islice(llm.generate(PROMPT, temp=0.0), 6))
    llm.reset()
    llm.eval(PROMPT)
    tokens = []
    for _ in range(6):
        tokens.append(llm.sample(temp=0.0))
        llm.eval([tokens[-1]])
    assert tokens == expected
    llm.reset()
    with pytest.raises(DecodeError, match="evaluate"):
        llm.sample(temp=0.0)


def test_generation_ends_with_the_context(tiny_llama: Path) -> None:
    def run(**options: Any) -> list[int]:
        with make(tiny_llama, n_ctx=256, **options) as llm:
            tokens = list(llm.generate(list(PROMPT) * 4, temp=0.0))
            assert llm.n_tokens == 256
            with pytest.raises(ContextOverflowError):
                llm.eval([5])
            return tokens

    plain = run(speculative="off")
    assert len(plain) == 256 - 240 + 1
    assert run(**EAGER) == plain


def test_tokens_rewritten_from_outside_are_respected(llm: Llama) -> None:
    llm.reset()
    expected = complete(llm, PROMPT[:30])
    complete(llm)
    llm.n_tokens = 30  # chat handlers do this
    assert complete(llm, PROMPT[:30]) == expected


def test_wrong_tokens_are_refused(llm: Llama) -> None:
    for tokens in ([-1], [10**6]):
        with pytest.raises(ValueError, match="vocabulary"):
            llm.eval(tokens)
    llm.reset()
    with pytest.raises(ValueError, match="no tokens"):
        next(llm.generate([]))


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_scores_hold_the_targets_rows(tiny_llama: Path, options: dict[str, Any]) -> None:
    with make(tiny_llama, logits_all=True) as llm:
        complete(llm, **options)
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        scores = llm.scores[: llm.n_tokens].copy()
        assert llm._scores.shape == (llm.n_tokens, llm.n_vocab())
        assert len(llm.eval_logits) == llm.n_tokens
        # Attention sums in chunks of cells, and the pass below takes the first free ones: free those of the text.
        llm.reset()
        assert np.array_equal(scores, llm.skip_logits(tokens, None))
        assert not np.array_equal(scores, llm.skip_logits(tokens, "f:1,2"))


def test_a_scout_pass_leaves_the_targets_cells(tiny_llama: Path) -> None:
    with make(tiny_llama, logits_all=True) as llm:
        complete(llm, n=60)
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        expected = llm.scores[: llm.n_tokens].copy()
        for n in (1, 50, 63, 64, 90):
            llm.reset()
            llm.eval(tokens[:n])
            llm.skip_logits(tokens, None)
            llm.eval(tokens[n:])
            assert np.array_equal(llm.scores[: llm.n_tokens], expected), n


def test_later_generation_ends_an_earlier_one(llm: Llama) -> None:
    llm.reset()
    first = llm.generate(PROMPT, temp=0.0)
    next(first)
    expected = complete(llm)
    with pytest.raises(BusyError):
        next(first)
    first.close()
    assert complete(llm) == expected
