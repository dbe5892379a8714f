"""Requests: callbacks, chat, cancellation, threads, statistics."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from completions import EAGER, PROMPT, complete, make

from pyssd import Llama

import llama_cpp


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Llama]:
    with make(tiny_llama) as made:
        yield made


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
