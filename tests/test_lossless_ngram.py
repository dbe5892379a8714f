"""The promise of test_lossless.py, with tokens copied from the context: alone, and together with skip drafts.

Default kernels; the texts repeat themselves, so that most rounds copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_lossless import SETS, SETTINGS, STORY, prompt_of, run

from pyssd import Llama

import llama_cpp

CODE = '''def area(width, height):
    """Return the area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height
'''
EDIT = f"Here is a function:\n{CODE}\nHere is the same function once more:\n{CODE}\nAnd again:\n"
# means of drafting; "always" so that the controller, which goes by the clock, cannot leave any out
MEANS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative": {"proposers": ["ngram"], "always": True}},
    "ngram+skip": {
        "speculative": {"max_draft_len": 5, "min_confidence": 0.0, "max_ngram_len": 7},
        "skip_set": SETS[0],
    },
    "recycle": {"speculative": {"proposers": ["recycle"], "always": True}},
    "auto": {"speculative": "auto"},
}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[Llama]:
    with Llama(str(smollm2), n_ctx=768, verbose=False, speculative="off") as made:
        assert made.exactness.level == 2, made.exactness
        yield made


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampler_gives_the_tokens_of_plain(llm: Llama, means: str, name: str) -> None:
    plain = run(llm, STORY * 3, 48, speculative="off", **SETTINGS[name])
    assert llm.stats.rounds == 0
    assert run(llm, STORY * 3, 48, **MEANS[means], **SETTINGS[name]) == plain
    if means != "auto" and name in ("greedy", "seeded"):
        assert llm.stats.rounds_by["recycle" if means == "recycle" else "ngram"] > 0


@pytest.mark.parametrize("means", ["ngram", "recycle", "ngram+skip"])
@pytest.mark.parametrize("n_prompt", [40, 600])
@pytest.mark.parametrize("max_ngram_len", [1, 63])
def test_context_and_length_do_not_matter(
    llm: Llama, means: str, n_prompt: int, max_ngram_len: int
) -> None:
    prompt = prompt_of(llm, n_prompt)
    options = dict(MEANS[means])
    options["speculative"] = {**options["speculative"], "max_ngram_len": max_ngram_len}
    for name in ("greedy", "seeded"):
        plain = run(llm, prompt, 40, speculative="off", **SETTINGS[name])
        assert run(llm, prompt, 40, keep=True, **options, **SETTINGS[name]) == plain


def test_copied_text_is_accepted_many_tokens_at_a_time(llm: Llama) -> None:
    plain = run(llm, EDIT, 64, speculative="off", temperature=0.0)
    for means, options in MEANS.items():
        assert run(llm, EDIT, 64, **options, temperature=0.0) == plain, means
        stats = llm.stats
        assert stats.mean_acceptance_len > 2.0, means
        copied = stats.accepted_by.get("ngram", 0) + stats.accepted_by.get("recycle", 0)
        assert copied > 32, means
        assert sum(stats.accepted_by.values()) == stats.accepted
        assert sum(stats.rounds_by.values()) >= stats.rounds
        assert "context" in stats.reason or means == "recycle"


def test_short_answer_copies_without_looking_for_a_skip_set(smollm2: Path) -> None:
    with Llama(str(smollm2), n_ctx=512, verbose=False) as llm:
        run(llm, EDIT, 24, temperature=0.0)
        assert llm.stats.skip_set == ""
        assert sum(llm.stats.accepted_by.values()) > 0
        assert "too few to look for" in llm.stats.reason


def test_given_skip_set_drafts_where_nothing_matches(llm: Llama) -> None:
    run(llm, EDIT + "Q: Who was Newton? A:", 48, **MEANS["ngram+skip"], **SETTINGS["seeded"])
    assert set(llm.stats.rounds_by) == {"ngram", "skip"} or set(llm.stats.rounds_by) == {
        "ngram", "skip", "plain",  # the last token has no room for a draft
    }  # fmt: skip


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_grammar(llm: Llama, means: str, name: str) -> None:
    schema = {
        "type": "array", "minItems": 3, "maxItems": 4,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    }  # fmt: skip
    grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
    prompt = 'Three people as JSON:\n[{"name": "Tom", "age": 31}, {"name": "Ann", "age": 31}]\n'
    plain = run(llm, prompt, 90, speculative="off", grammar=grammar, **SETTINGS[name])
    assert run(llm, prompt, 90, **MEANS[means], grammar=grammar, **SETTINGS[name]) == plain


@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("stop", [["."], ["fisherman", " the"], ["zzz", "\n"], [". He", "sea"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_streams(llm: Llama, means: str, stop: list[str], stream: bool) -> None:
    def answer(**options: Any) -> tuple[str, list[int]]:
        llm.reset()
        result = llm.create_completion(
            STORY * 2, max_tokens=60, temperature=0.0, stop=stop, stream=stream, **options
        )
        chunks = list(result) if stream else [result]
        joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return joined, llm.input_ids[: llm.n_tokens].tolist()

    plain = answer(speculative="off")
    assert answer(**MEANS[means]) == plain
    assert not any(word in plain[0] for word in stop)


@pytest.mark.parametrize("means", ["ngram", "recycle", "ngram+skip"])
def test_logits_processor_and_criterion_see_what_plain_shows_them(llm: Llama, means: str) -> None:
    def seen(**options: Any) -> tuple[list[list[int]], list[list[int]]]:
        llm.reset()
        shown: tuple[list[list[int]], list[list[int]]] = ([], [])

        def processor(input_ids: Any, logits: Any) -> Any:
            shown[0].append(input_ids.tolist())
            logits[input_ids[-1]] -= 1.0
            return logits

        def criterion(input_ids: Any, logits: Any) -> bool:
            del logits
            shown[1].append(input_ids.tolist())
            return len(shown[1]) > 30

        llm.create_completion(
            EDIT,
            max_tokens=60,
            temperature=0.0,
            logits_processor=llama_cpp.LogitsProcessorList([processor]),
            stopping_criteria=llama_cpp.StoppingCriteriaList([criterion]),
            **options,
        )
        return shown

    plain = seen(speculative="off")
    assert seen(**MEANS[means]) == plain
    assert sum(llm.stats.accepted_by.values()) > 0


def test_turns_of_a_conversation_share_the_index(llm: Llama) -> None:
    def talk(**options: Any) -> list[Any]:
        llm.reset()
        messages: list[Any] = [{"role": "user", "content": f"Copy this function:\n{CODE}"}]
        said = []
        for question in ("Copy it once more.", "And again."):
            result = llm.create_chat_completion(messages, max_tokens=40, temperature=0.0, **options)
            said.append(result["choices"][0]["message"]["content"])
            messages += [
                {"role": "assistant", "content": said[-1]},
                {"role": "user", "content": question},
            ]
        return said

    assert talk(**MEANS["ngram"]) == talk(speculative="off")


def test_every_family_copies_without_loss(family_model: Path) -> None:
    with Llama(
        str(family_model), n_ctx=512, n_threads=1, exact=True, verbose=False, speculative="off"
    ) as llm:
        for n_prompt in (40, 300):
            prompt = [(7 * i) % 30 + 20 for i in range(n_prompt)]
            for name in ("greedy", "hot"):
                plain = run(llm, prompt, 48, speculative="off", **SETTINGS[name])
                drafted = run(llm, prompt, 48, keep=True, **MEANS["ngram"], **SETTINGS[name])
                assert drafted == plain, (n_prompt, name)


@pytest.mark.model
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_qwen_copies_as_plain(qwen_05b: Path, name: str) -> None:
    with Llama(str(qwen_05b), n_ctx=512, verbose=False) as llm:
        assert llm.exactness.level == 2
        plain = run(llm, EDIT, 48, speculative="off", **SETTINGS[name])
        assert run(llm, EDIT, 48, **MEANS["ngram"], **SETTINGS[name]) == plain
        assert llm.stats.mean_acceptance_len > 2.0
