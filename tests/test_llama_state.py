"""Tokens, cells and logits stay in line: prefix reuse, saved states, callbacks, sent tokens, low-level calls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyssd import Llama
from pyssd.errors import BusyError, ContextOverflowError, DecodeError

import llama_cpp

EAGER: dict[str, Any] = {
    "skip_set": "f:1,2",
    "speculative": {"max_draft_len": 5, "min_confidence": 0.0},
}
PROMPT = [(11 * i) % 300 + 20 for i in range(60)]


def make(path: Path, **options: Any) -> Llama:
    settings = {
        "n_ctx": 512,
        "n_threads": 1,
        "verbose": False,
        "exact": True,
        "speculative": "off",
        **options,
    }
    return Llama(str(path), **settings)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Llama]:
    with make(tiny_llama) as made:
        yield made


def complete(llm: Any, prompt: Any = None, n: int = 24, **options: Any) -> list[int]:
    """Emitted tokens of a completion, the last one left out (it is not evaluated)."""
    prompt = PROMPT if prompt is None else prompt
    llm.create_completion(prompt, **{"max_tokens": n, "temperature": 0.0, **options})
    return llm.input_ids[len(prompt) : llm.n_tokens].tolist()


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


# callbacks ------------------------------------------------------------------------------------------------------------


class Recorder:
    """A logits processor or stopping criterion that notes how it is called."""

    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[tuple[int, int, float]] = []
        self.stop_at = stop_at

    def note(self, input_ids: Any, logits: Any) -> None:
        self.calls.append((len(input_ids), int(input_ids[-1]), float(logits[17])))


class Processor(Recorder):
    def __call__(self, input_ids: Any, logits: Any) -> Any:
        self.note(input_ids, logits)
        logits[len(input_ids) % 50 + 20] += 4.0
        return logits


class Criterion(Recorder):
    def __call__(self, input_ids: Any, logits: Any) -> bool:
        self.note(input_ids, logits)
        return len(self.calls) == self.stop_at


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_and_criteria_are_called_as_by_plain_decoding(
    llm: Llama, temperature: float
) -> None:
    def run(**options: Any) -> tuple[Any, ...]:
        llm.reset()
        processor, criterion = Processor(), Criterion(stop_at=15)
        tokens = complete(
            llm,
            n=40,
            temperature=temperature,
            seed=3,
            logits_processor=llama_cpp.LogitsProcessorList([processor]),
            stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]),
            **options,
        )
        return tokens, processor.calls, criterion.calls

    plain = run(speculative="off")
    assert run(**EAGER) == plain
    assert llm.stats.accepted > 0
    assert llm.stats.drafted > llm.stats.accepted
    assert [call[0] for call in plain[1]] == list(range(60, 75))


def test_criterion_alone_sees_real_logits_once_a_token(llm: Llama) -> None:
    def run(**options: Any) -> tuple[Any, ...]:
        llm.reset()
        criterion = Criterion(stop_at=11)
        result = llm.create_completion(
            PROMPT, max_tokens=40, temperature=0.0, stopping_criteria=criterion, **options
        )
        return result["choices"][0], criterion.calls

    plain = run(speculative="off")
    assert run(**EAGER) == plain
    assert plain[0]["finish_reason"] == "stop" or len(plain[1]) > 11
    logits = llm.skip_logits(PROMPT, None)[-1]
    assert plain[1][0] == (60, PROMPT[-1], pytest.approx(float(logits[17]), abs=1e-4))


def test_processors_together_with_bias(llm: Llama) -> None:
    """llama_cpp loses both: list.extend returns None."""
    processor = Processor()
    tokens = complete(
        llm,
        n=12,
        logits_processor=llama_cpp.LogitsProcessorList([processor]),
        logit_bias={"77": 100.0},
        **EAGER,
    )
    assert tokens == [77] * 11
    assert len(processor.calls) == 12
    assert complete(llm, n=12, logit_bias={77: 100.0}, **EAGER) == [77] * 11


def test_bias_of_a_token_that_does_not_exist_is_refused(llm: Llama) -> None:
    for token in (-1, 10**6):
        with pytest.raises(ValueError, match="logit_bias"):
            llm(PROMPT, logit_bias={token: 1.0})


@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_processor_that_fails_leaves_a_usable_object(llm: Llama, options: dict[str, Any]) -> None:
    llm.reset()
    expected = complete(llm, **options)

    def fail(input_ids: Any, logits: Any) -> Any:
        if len(input_ids) > 66:
            raise KeyError("on purpose")
        return logits

    with pytest.raises(KeyError):
        complete(llm, logits_processor=[fail], **options)
    with pytest.raises(ValueError, match="shape"):
        complete(llm, logits_processor=[lambda ids, logits: logits[:5]], **options)
    assert complete(llm, **options) == expected


def test_broken_grammar_is_a_value_error(llm: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= missing", verbose=False)
    with pytest.raises(ValueError, match="grammar"):
        complete(llm, grammar=grammar)


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
        tokens = llm.input_ids[: llm.n_tokens]
        expected = llm.skip_logits(tokens.tolist(), None)
        assert np.allclose(llm.scores[: llm.n_tokens], expected, atol=1e-3)
        assert llm._scores.shape == (llm.n_tokens, llm.n_vocab())
        assert len(llm.eval_logits) == llm.n_tokens


def test_later_generation_ends_an_earlier_one(llm: Llama) -> None:
    llm.reset()
    first = llm.generate(PROMPT, temp=0.0)
    next(first)
    expected = complete(llm)
    with pytest.raises(BusyError):
        next(first)
    first.close()
    assert complete(llm) == expected


# requests -------------------------------------------------------------------------------------------------------------


def test_chat_inherits_options_and_streams(llm: Llama) -> None:
    messages = [{"role": "user", "content": "hello there"}]

    def text(**options: Any) -> str:
        llm.reset()
        settings = {"max_tokens": 24, "temperature": 0.0, "seed": 1, **options}
        answer = llm.create_chat_completion(messages, **settings)
        return str(answer["choices"][0]["message"]["content"])

    plain = text(speculative="off")
    assert llm.stats.rounds == 0
    assert text(**EAGER) == plain
    assert llm.stats.rounds > 0
    llm.reset()
    chunks = list(
        llm.create_chat_completion(messages, max_tokens=24, temperature=0.0, stream=True, **EAGER)
    )
    assert llm.stats.rounds > 0
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == plain
    llm(PROMPT, max_tokens=4)
    assert llm.stats.rounds == 0  # the options held for those calls only


def test_chat_with_a_json_schema(llm: Llama) -> None:
    answer = llm.create_chat_completion(
        [{"role": "user", "content": "x"}],
        max_tokens=60,
        temperature=0.0,
        response_format={"type": "json_object", "schema": {"type": "integer", "maximum": 99}},
        **EAGER,
    )
    assert int(answer["choices"][0]["message"]["content"]) <= 99


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("options", [{"speculative": "off"}, EAGER])
def test_cancel_ends_a_request_with_its_text_so_far(
    tiny_model: Callable[..., Path], stream: bool, chat: bool, options: dict[str, Any]
) -> None:
    with make(tiny_model("llama", n_ctx=8192), n_ctx=4096) as llm:
        expected = complete(llm, **options)
        timer = threading.Timer(0.15, llm.cancel)
        timer.start()
        settings: dict[str, Any] = {
            "max_tokens": None, "temperature": 0.0, "stream": stream, "logit_bias": {"2": -100.0}, **options,
        }  # fmt: skip
        started = time.monotonic()
        if chat:
            result = llm.create_chat_completion([{"role": "user", "content": "x"}], **settings)
        else:
            result = llm.create_completion(PROMPT, **settings)
        last = list(result)[-1] if stream else result
        assert time.monotonic() - started < 5.0
        timer.join()
        assert last["choices"][0]["finish_reason"] == "cancelled"
        if not stream:
            choice = last["choices"][0]
            assert choice["message"]["content"] if chat else choice["text"]
        llm.cancel()  # nothing runs: the next request is not affected
        assert complete(llm, **options) == expected
        assert llm.stats.emitted == 24


def test_second_thread_waits_for_a_stream(llm: Llama) -> None:
    llm.reset()
    expected = complete(llm, [5, 6, 7])
    stream = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0, stream=True)
    next(stream)
    results: list[list[int]] = []
    worker = threading.Thread(target=lambda: results.append(complete(llm, [5, 6, 7])))
    worker.start()
    time.sleep(0.1)
    assert not results
    list(stream)
    worker.join(5.0)
    assert results == [expected]


def test_stream_may_be_advanced_by_several_threads(llm: Llama) -> None:
    whole = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0, **EAGER)
    llm.reset()
    stream = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0, stream=True, **EAGER)
    texts: list[str] = []

    def step() -> None:
        for chunk in itertools.islice(stream, 1):
            texts.append(chunk["choices"][0]["text"])

    while True:
        before = len(texts)
        worker = threading.Thread(target=step)
        worker.start()
        worker.join()
        if len(texts) == before:
            break
    assert "".join(texts) == whole["choices"][0]["text"]
    assert complete(llm, n=4, speculative="off")  # the object was given back


def test_stats_and_totals(llm: Llama) -> None:
    before = llm.totals.emitted
    complete(llm, n=24, **EAGER)
    stats = llm.stats
    assert stats.emitted == 24
    assert llm.totals.emitted == before + 24
    assert stats.rounds > 0
    assert stats.drafted >= stats.accepted > 0
    assert sum(stats.accepted_per_pos) == stats.accepted
    assert stats.accepted_by == {"skip": stats.accepted}
    assert 0.0 < stats.draft_seconds + stats.verify_seconds <= stats.decode_seconds * 1.01
    assert stats.skip_set == "f:1-2 n:4"
    assert "given skip set" in stats.reason
    complete(llm, n=24, speculative="off")
    assert llm.stats.acceptance_rate is None
    assert llm.stats.reason == "plain decoding: speculative is off"
