"""The promise: with speculation on, the output is the output of plain decoding.

Token for token where kernels do not depend on the width of the batch (exact=True); in distribution for every sampler.
Plain is the same object with speculative="off" for the call. Tokens are compared, not texts: after a request
`input_ids[:n_tokens]` holds the prompt and all emitted tokens but the last. Skip drafts here, n-gram drafts in
test_lossless_ngram.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyssd import Llama

import llama_cpp

SETS = ["f:2,5,9,12,15,20", "a:7,11,21", "a:3,12 f:1,3,6,9,12,13,15,18,27"]
STORY = "Once upon a time, in a small village by the sea, there lived a young fisherman named Tom. "
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "hot": {"temperature": 1.5, "seed": 8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {
        "temperature": 0.8, "seed": 9, "repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3,
    },
    "greedy-penalties": {"temperature": 0.0, "repeat_penalty": 1.3},
    "typical": {"temperature": 0.9, "seed": 10, "typical_p": 0.7},
    "mirostat1": {"temperature": 0.9, "seed": 11, "mirostat_mode": 1},
    "mirostat2": {"temperature": 0.9, "seed": 12, "mirostat_mode": 2},
    "bias": {"temperature": 0.9, "seed": 13, "logit_bias": {"260": -8.0, "28": 2.5}},
}  # fmt: skip


def run(
    llm: Any, prompt: Any, n_tokens: int = 40, *, keep: bool = False, **options: Any
) -> tuple[list[int], str, str]:
    """Tokens evaluated, text and finish reason of one request; fresh unless the prompt's cells are to be kept."""
    if not keep:
        llm.reset()
    choice = llm.create_completion(prompt, max_tokens=n_tokens, **options)["choices"][0]
    return llm.input_ids[: llm.n_tokens].tolist(), choice["text"], choice["finish_reason"]


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Iterator[Llama]:
    with Llama(str(smollm2), n_ctx=768, exact=True, verbose=False, speculative="off") as llm:
        assert llm.exactness.level == 2, llm.exactness
        yield llm


@pytest.fixture(scope="module")
def drafting(exact: Llama) -> Callable[..., dict[str, Any]]:
    """Options that make a call draft eagerly, so that tokens are rejected too."""

    def options(skip_set: str = SETS[0], **fields: Any) -> dict[str, Any]:
        return {
            "skip_set": skip_set,
            "speculative": {
                "max_draft_len": 5, "min_confidence": 0.0, "proposers": ["skip"], **fields,
            },
        }  # fmt: skip

    return options


def prompt_of(llm: Llama, n_tokens: int) -> list[int]:
    return (llm.tokenize((STORY * 40).encode()))[:n_tokens]


@pytest.mark.parametrize("n_prompt", [40, 300, 600])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_output_equals_plain_at_every_context(
    exact: Llama, drafting: Callable[..., dict[str, Any]], n_prompt: int, name: str
) -> None:
    prompt = prompt_of(exact, n_prompt)
    plain = run(exact, prompt, speculative="off", **SETTINGS[name])
    assert exact.stats.rounds == 0
    for skip_set in SETS:
        drafted = run(exact, prompt, keep=True, **drafting(skip_set), **SETTINGS[name])
        assert drafted == plain, skip_set
        assert exact.stats.drafted > 0


@pytest.mark.parametrize("n_prompt", [40, 300, 600])
def test_empty_skip_set_accepts_every_draft(
    exact: Llama, drafting: Callable[..., dict[str, Any]], n_prompt: int
) -> None:
    run(exact, prompt_of(exact, n_prompt), **drafting("none"), temperature=0.0)
    assert exact.stats.acceptance_rate == 1.0
    assert exact.stats.mean_acceptance_len > 5.0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampler_gives_the_tokens_of_plain(
    exact: Llama, drafting: Callable[..., dict[str, Any]], name: str
) -> None:
    plain = run(exact, STORY, speculative="off", **SETTINGS[name])
    assert run(exact, STORY, **drafting(), **SETTINGS[name]) == plain
    assert exact.stats.accepted > 0


@pytest.mark.parametrize("name", ["seeded", "mirostat2", "penalties"])
def test_llama_cpp_coupling_gives_the_tokens_of_plain(
    exact: Llama, drafting: Callable[..., dict[str, Any]], name: str
) -> None:
    plain = run(
        exact, STORY, speculative={"coupling": "llama_cpp", "always": False}, **SETTINGS[name]
    )
    drafted = run(exact, STORY, **drafting(coupling="llama_cpp"), **SETTINGS[name])
    assert drafted == plain


@pytest.mark.parametrize("max_draft_len", [1, 2, 8, 16, 63])
def test_draft_length_does_not_matter(
    exact: Llama, drafting: Callable[..., dict[str, Any]], max_draft_len: int
) -> None:
    plain = run(exact, STORY, 24, speculative="off", temperature=0.0)
    assert (
        run(exact, STORY, 24, keep=True, **drafting(max_draft_len=max_draft_len), temperature=0.0)
        == plain
    )


def test_trimmed_head_gives_the_tokens_of_plain(
    exact: Llama, drafting: Callable[..., dict[str, Any]]
) -> None:
    plain = run(exact, STORY, speculative="off", **SETTINGS["seeded"])
    assert run(exact, STORY, **drafting(head_rows=4096), **SETTINGS["seeded"]) == plain


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_grammar_and_json_schema(
    exact: Llama, drafting: Callable[..., dict[str, Any]], name: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    grammar = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
    prompt = "Tom is 31 years old. As JSON:\n"
    plain = run(exact, prompt, 80, speculative="off", grammar=grammar, **SETTINGS[name])
    assert run(exact, prompt, 80, **drafting(), grammar=grammar, **SETTINGS[name]) == plain
    if plain[2] == "stop":
        assert set(json.loads(plain[1])) == {"name", "age"}


@pytest.mark.parametrize("skip_set", SETS)
def test_streamed_text_is_the_text(
    exact: Llama, drafting: Callable[..., dict[str, Any]], skip_set: str
) -> None:
    prompt = "Write a line with emoji 🙂🎉 and 한국어:"
    settings = {**SETTINGS["hot"], **drafting(skip_set)}
    whole = run(exact, prompt, 40, **settings)
    chunks = list(exact.create_completion(prompt, max_tokens=40, stream=True, **settings))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[1]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole[2]
    assert run(exact, prompt, 40, keep=True, speculative="off", **SETTINGS["hot"]) == whole


@pytest.mark.parametrize("stop", [["."], ["fisherman", " the"], ["zzz", "\n"], [". He", "sea"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(
    exact: Llama, drafting: Callable[..., dict[str, Any]], stop: list[str], stream: bool
) -> None:
    def text(**options: Any) -> tuple[str, list[int]]:
        exact.reset()
        result = exact.create_completion(
            STORY, max_tokens=60, temperature=0.0, stop=stop, stream=stream, **options
        )
        chunks = list(result) if stream else [result]
        joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return joined, exact.input_ids[: exact.n_tokens].tolist()

    plain = text(speculative="off")
    assert text(**drafting()) == plain
    assert not any(word in plain[0] for word in stop)


def test_usage_and_state_after_a_stop_inside_a_round(
    exact: Llama, drafting: Callable[..., dict[str, Any]]
) -> None:
    def twice(**options: Any) -> list[Any]:
        exact.reset()
        exact.set_seed(5)
        results = []
        for _ in range(
            2
        ):  # the second request reuses what the first one left, and its seed follows from it
            result = exact.create_completion(
                STORY, max_tokens=60, temperature=0.9, stop=[" and", "."], **options
            )
            results.append((result["usage"], result["choices"][0]["text"], exact._seed))
            results.append(exact.input_ids[: exact.n_tokens].tolist())
        return results

    assert twice(**drafting()) == twice(speculative="off")


def test_logprobs(smollm2: Path) -> None:
    with Llama(
        str(smollm2), n_ctx=256, exact=True, logits_all=True, verbose=False, speculative="off"
    ) as llm:

        def answer(**options: Any) -> Any:
            llm.reset()
            result = llm.create_completion(
                "The sea is", max_tokens=20, temperature=0.0, logprobs=3, echo=False, **options
            )
            return result["choices"][0]["logprobs"]

        plain = answer(speculative="off")
        drafted = answer(skip_set=SETS[0], speculative={"min_confidence": 0.0, "max_draft_len": 5})
        assert llm.stats.accepted > 0
    assert drafted == plain
    assert len(plain["tokens"]) == 20


def test_lora_changes_the_text_and_not_the_parity(tiny_llama: Path, tiny_lora: Path) -> None:
    def tokens(lora: str | None, **options: Any) -> tuple[list[int], Any]:
        with Llama(
            str(tiny_llama), n_ctx=512, n_threads=1, exact=True, verbose=False, lora_path=lora
        ) as llm:
            run(llm, list(range(10, 60)), 60, temperature=0.0, **options)
            return llm.input_ids[: llm.n_tokens].tolist(), llm.stats

    plain, _ = tokens(str(tiny_lora), speculative="off")
    drafted, stats = tokens(
        str(tiny_lora),
        skip_set="none",
        speculative={"min_confidence": 0.0, "max_draft_len": 4, "proposers": ["skip"]},
    )
    assert drafted == plain != tokens(None, speculative="off")[0]
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "weight_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
)
def test_every_weight_type_of_level_2_is_exact(
    tiny_model: Callable[..., Path], weight_type: str
) -> None:
    _compare_families(tiny_model("llama", weight_type=weight_type))


def test_every_family_is_exact(family_model: Path) -> None:
    _compare_families(family_model)


def _compare_families(path: Path) -> None:
    with Llama(
        str(path), n_ctx=768, n_threads=2, exact=True, verbose=False, speculative="off"
    ) as llm:
        assert llm.exactness.level == 2, llm.exactness
        layers = sorted({block.layer for block in llm.blocks})
        for n_prompt in (40, 300, 600):
            prompt = [(7 * i) % 200 + 20 for i in range(n_prompt)]
            for name in ("greedy", "hot"):
                plain = run(llm, prompt, 48, speculative="off", **SETTINGS[name])
                for skip_set in ("none", f"f:{layers[1]}", f"a:{layers[-2]} f:{layers[-1]}"):
                    speculative = {
                        "max_draft_len": 6, "min_confidence": 0.0, "proposers": ["skip"],
                    }  # fmt: skip
                    drafted = run(
                        llm,
                        prompt,
                        48,
                        keep=True,
                        skip_set=skip_set,
                        speculative=speculative,
                        **SETTINGS[name],
                    )
                    assert drafted == plain, (n_prompt, name, skip_set)
                    assert llm.stats.drafted > 0
                    if skip_set == "none":
                        assert llm.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("model", ["smollm2", "tiny_llama"])
def test_upstream_settings_equal_llama_cpp(model: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(model))
    common: dict[str, Any] = {
        "n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "flash_attn": True, "verbose": False,
    }  # fmt: skip
    stock = llama_cpp.Llama(path, **common)
    ours = Llama(path, kernels="upstream", coupling="llama_cpp", speculative="off", **common)
    prompt = STORY if model == "smollm2" else list(range(20, 120))
    try:
        for name, settings in SETTINGS.items():
            usable = dict(settings)
            if model == "tiny_llama" and "logit_bias" in usable:
                usable["logit_bias"] = {30: 3.0, 40: -2.0}
            elif "logit_bias" in usable:
                usable["logit_bias"] = {int(k): v for k, v in usable["logit_bias"].items()}
            assert run(ours, prompt, 32, **usable) == run(stock, prompt, 32, **usable), name
        # without a seed every call derives the next one from the one before: the sequence is the same too
        for _ in range(3):
            assert run(ours, prompt, 8) == run(stock, prompt, 8)
    finally:
        ours.close()
        stock.close()


@pytest.mark.model
@pytest.mark.parametrize("model", ["qwen_05b", "qwen_15b"])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_qwen_equals_plain(model: str, name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    with Llama(str(path), n_ctx=512, exact=True, verbose=False) as llm:
        assert llm.exactness.level == 2
        for n_prompt in (40, 300):
            prompt = prompt_of(llm, n_prompt)
            plain = run(llm, prompt, 24, speculative="off", **SETTINGS[name])
            drafted = run(
                llm,
                prompt,
                24,
                skip_set="f:3,6,9,12",
                speculative={"min_confidence": 0.0, "max_draft_len": 4},
                **SETTINGS[name],
            )
            assert drafted == plain
            assert llm.stats.drafted > 0
