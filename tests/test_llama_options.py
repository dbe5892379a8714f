"""Loading: arguments, defaults, sizes, bad values, what is freed, what is kept by pickling."""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyssd import Llama, SkipSet, SpecConfig
from pyssd.errors import ClosedError, OptionError, PyssdError, SkipSetError, UnsupportedModelError
from pyssd.exactness import judge_exactness
from pyssd.loading import llama_lib, physical_cores
from pyssd.model_file import check_model_file

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def make(path: Path, **options: Any) -> Llama:
    settings = {"n_ctx": 256, "n_threads": 1, "verbose": False, **options}
    return Llama(str(path), **settings)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Llama]:
    with make(tiny_llama) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "near"),
    [("n_gpu_layer", "n_gpu_layers"), ("spekulative", "speculative"), ("skipset", "skip_set")],
)
def test_unknown_argument_names_the_nearest_one(tiny_llama: Path, name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*{near}"):
        make(tiny_llama, **{name: 1})


def test_unknown_argument_of_a_call_names_the_nearest_one(llm: Llama) -> None:
    with pytest.raises(TypeError, match=r"max_token.*max_tokens"):
        llm("a", max_token=3)
    with pytest.raises(TypeError, match=r"temprature.*temperature"):
        llm.create_chat_completion([], temprature=3)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_model": object()},
        {"profile": "x.json"},
        {"kernels": "fast"},
        {"coupling": "none"},
        {"selector": "bayes"},
        {"speculative": "sometimes"},
        {"n_ctx": -1},
        {"n_batch": 0},
    ],
)
def test_value_that_cannot_be_honoured_is_refused(tiny_llama: Path, options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))) as caught:
        make(tiny_llama, **options)
    assert "\n" not in str(caught.value)


def test_draft_model_says_what_to_use(tiny_llama: Path) -> None:
    with pytest.raises(OptionError, match="speculative"):
        make(tiny_llama, draft_model=object())


def test_skip_set_is_checked_when_loading_and_in_a_call(tiny_llama: Path, llm: Llama) -> None:
    with pytest.raises(SkipSetError):
        make(tiny_llama, skip_set="f:99")
    with pytest.raises(SkipSetError):
        llm("a", skip_set="f:99")
    with pytest.raises(SkipSetError):
        llm("a", skip_set=SkipSet(mlp=[1], n_layer=7), stream=True)
    with pytest.raises(TypeError):
        llm("a", speculative={"max_draft_length": 3})


def test_sizes_follow_the_padded_context(tiny_llama: Path) -> None:
    with make(tiny_llama, n_ctx=64) as llm:
        assert llm.n_ctx() == 256
        assert llm.input_ids.shape == (256,)
        assert llm.scores.shape == (0, llm.n_vocab())
        llm([5] * 80, max_tokens=4)
        assert llm.n_tokens == 83
    with make(tiny_llama, n_ctx=64, logits_all=True) as llm:
        assert llm.scores.shape == (256, llm.n_vocab())


def test_rows_of_logits_are_limited_unless_asked_for(tiny_llama: Path) -> None:
    for options, rows in ((({}), 64), ({"logits_all": True}, 0), ({"n_batch": 32}, 32)):
        with make(tiny_llama, **options) as llm:
            assert llm.context_params.n_outputs_max == rows


def test_flash_attention_is_left_to_llama_cpp_unless_given(tiny_llama: Path) -> None:
    for given, expected in (
        (None, llama_lib.LLAMA_FLASH_ATTN_TYPE_AUTO),
        (True, llama_lib.LLAMA_FLASH_ATTN_TYPE_ENABLED),
        (False, llama_lib.LLAMA_FLASH_ATTN_TYPE_DISABLED),
    ):
        with make(tiny_llama, flash_attn=given, kernels="upstream") as llm:
            assert llm.context_params.flash_attn_type == expected
            assert llm.exactness.level == 2 - (given is False or not _IS_X86)


def test_threads_default_to_the_physical_cores(tiny_llama: Path) -> None:
    cores = physical_cores()
    assert 1 <= cores <= (os.cpu_count() or 1)
    with Llama(str(tiny_llama), n_ctx=256, verbose=False) as llm:
        assert llm.n_threads == llm.n_threads_batch == cores
    with make(tiny_llama, n_threads=1) as llm:
        assert llm.n_threads == llm.n_threads_batch == 1


def test_exactness_level(tiny_llama: Path) -> None:
    for kernels in ("auto", "upstream"):
        with make(tiny_llama, exact=True, kernels=kernels) as llm:
            assert llm.exactness.level == 2
            assert llm.model_params.use_extra_bufts == (kernels == "auto")
        with make(tiny_llama, exact=True, kernels=kernels, flash_attn=False) as llm:
            assert llm.exactness.level == 1
            assert "flash" in llm.exactness.reason
    with make(tiny_llama) as llm:  # pyssd's kernels give it for nothing
        assert llm.exactness.level == 2
    with make(tiny_llama, kernels="upstream") as llm:  # where passes compute their rows singly
        assert (llm.exactness.level == 2) == _IS_X86


@pytest.mark.parametrize(
    ("devices", "types", "word"), [({"CUDA0"}, {"F32"}, "CUDA0"), ({"CPU"}, {"TQ1_0"}, "TQ1_0")]
)
def test_exactness_is_level_1_where_it_is_not_shown(
    devices: set[str], types: set[str], word: str
) -> None:
    judged = judge_exactness(exact=True, flash_attn=True, devices=devices, weight_types=types)
    assert judged.level == 1
    assert word in judged.reason


def test_model_file_tells_architecture_and_types(tiny_llama: Path) -> None:
    header = check_model_file(tiny_llama)
    assert header.architecture == "llama"
    assert header.n_tensors > 8
    assert "F32" in header.weight_types


def test_missing_shard_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    import gguf

    first = tmp_path / "model-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(first, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_uint16("split.no", 0)
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"00002-of-00002.*missing"):
        make(first)


def test_load_error_is_a_value_error_with_the_reason(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        make(tiny_llama, lora_path=str(tiny_llama))
    assert isinstance(caught.value, ValueError)


def test_quantised_v_without_flash_attention_is_an_error(tiny_llama: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="type_v"):
        make(tiny_llama, type_v=8, flash_attn=False)
    with make(tiny_llama, type_k=8, type_v=8) as llm:
        assert llm("abc", max_tokens=3, skip_set="f:1")["usage"]["completion_tokens"] == 3


def test_progress_is_reported(tiny_llama: Path) -> None:
    seen: list[float] = []

    def note(progress: float) -> bool:
        seen.append(progress)
        return True

    make(tiny_llama, progress_callback=note).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_error_in_the_progress_callback_comes_through(tiny_llama: Path) -> None:
    def fail(progress: float) -> bool:
        raise KeyError(progress)

    with pytest.raises(KeyError):
        make(tiny_llama, progress_callback=fail)


def test_pickling_keeps_options_and_tokenizer(tiny_llama: Path) -> None:
    config = SpecConfig(max_draft_len=3, coupling="llama_cpp")
    with make(tiny_llama, speculative=config, skip_set="f:1", exact=True) as llm:
        state = pickle.dumps(llm)
        text = llm("abc", max_tokens=12, temperature=0.0)["choices"][0]["text"]
        again = pickle.loads(state)
    with again:
        assert again._own_options["speculative"] == config
        assert again.coupling == "llama_cpp"
        assert again.context_params.flash_attn_type == llm.context_params.flash_attn_type
        assert again("abc", max_tokens=12, temperature=0.0)["choices"][0]["text"] == text
        assert again.stats.skip_set.startswith("f:1")


def test_custom_tokenizer_survives_pickling(tiny_llama: Path) -> None:
    with make(tiny_llama, tokenizer=Reversed()) as llm:
        state = pickle.dumps(llm)
    with pickle.loads(state) as again:
        assert again.tokenize(b"abc") == [99, 98, 97]


class Reversed:
    """A tokenizer that can be pickled."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return list(reversed(text))

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        return bytes(reversed(tokens))


def test_tokenizer_held_after_close_raises(tiny_llama: Path) -> None:
    llm = make(tiny_llama)
    tokenizer = llm.tokenizer()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        tokenizer.encode("abc")
    with pytest.raises(ClosedError):
        pickle.dumps(llm)
    assert repr(llm) == "Llama(closed)"


def test_vocab_only_tokenises_and_refuses_to_decode(tiny_llama: Path) -> None:
    with make(tiny_llama, vocab_only=True) as llm:
        assert llm.tokenize(b"abc")
        with pytest.raises(UnsupportedModelError, match="vocab_only"):
            llm("abc")


def test_embedding_object_embeds_and_decodes_plainly(tiny_llama: Path) -> None:
    with make(tiny_llama, embedding=True) as llm:
        one = llm.embed("abc")
        two = llm.create_embedding(["abc", "abd"])
        assert len(two["data"]) == 2
        assert np.allclose(one, two["data"][0]["embedding"], atol=1e-4)
        assert llm.exactness.level == 1
        assert "embedding" in repr(llm)


def test_recurrent_model_decodes_plainly_with_a_reason(mamba_model: Path) -> None:
    with make(mamba_model, speculative=True) as llm:
        first = llm([5, 6, 7, 8, 9], max_tokens=12, temperature=0.0)["choices"][0]["text"]
        assert llm.stats.drafted == 0
        assert llm.stats.reason.startswith("plain decoding: ")
        assert len(llm.stats.reason) > 20
        # a second prompt that shares a prefix: the memory cannot drop its last cells, so it is evaluated anew
        llm([5, 6, 7, 1, 2], max_tokens=12, temperature=0.0)
        assert llm([5, 6, 7, 8, 9], max_tokens=12, temperature=0.0)["choices"][0]["text"] == first


def test_score_and_skip_logits_leave_the_state_alone(tiny_llama: Path) -> None:
    with make(tiny_llama, exact=True) as llm:
        tokens = list(range(20, 60))
        before = llm("abc", max_tokens=6, temperature=0.0)["choices"][0]["text"]
        state = (llm.n_tokens, llm.input_ids.tolist())
        agreement = llm.score(tokens, "f:1")
        logits = llm.skip_logits(tokens, None)
        assert agreement.dtype == np.float32
        assert agreement.shape == (40,)
        assert set(agreement.tolist()) <= {0.0, 1.0}
        assert logits.shape == (40, llm.n_vocab())
        assert np.array_equal(llm.score(tokens, "none"), np.ones(40, np.float32))
        skipped = llm.skip_logits(tokens, "f:1")
        assert np.array_equal(skipped.argmax(1) == logits.argmax(1), agreement == 1.0)
        assert np.isneginf(llm.skip_logits(tokens, None, head_rows=256)[:, 256:]).all()
        assert (llm.n_tokens, llm.input_ids.tolist()) == state
        assert llm("abc", max_tokens=6, temperature=0.0)["choices"][0]["text"] == before
        for wrong in ([], [5] * 300, [-1], [10**6]):
            with pytest.raises((PyssdError, ValueError)):
                llm.skip_logits(wrong, None)


def test_blocks_are_listed(llm: Llama) -> None:
    assert [block.index for block in llm.blocks] == list(range(8))
    assert {block.kind for block in llm.blocks} == {"attn", "ffn"}
    assert all(block.nbytes > 0 and block.device for block in llm.blocks)
