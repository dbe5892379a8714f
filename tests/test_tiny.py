"""The random models are what the other tests take them for: every block matters, zeroing zeroes, text survives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from lowlevel import random_tokens, stock_logits
from zeroed import output_tensors, zero_bytes_decode_to_zero

TEXT = 'The quick brown fox; the other two. Zürich, 日本\n\t{"a": [1, 2]}  end'
# types that files hold and gguf can decode; the others are refused by zero_blocks
DECODABLE = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ2_XXS IQ3_S IQ1_S IQ1_M MXFP4"


@pytest.mark.parametrize("name", DECODABLE.split())
def test_zero_bytes_are_zeros_in_every_tensor_type(name: str) -> None:
    assert zero_bytes_decode_to_zero(gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("weight_type", ["F32", "Q4_0"])
def test_zero_blocks_changes_the_named_tensors_and_nothing_else(
    tiny_model: Callable[..., Path], tmp_path: Path, weight_type: str
) -> None:
    model = tiny_model("gptneox", weight_type=weight_type)
    names = tiny.zero_blocks(model, tmp_path / "zeroed.gguf", attention=[1], mlp=[0, 3])
    expected = {f"blk.1.attn_output.{part}" for part in ("weight", "bias")}
    expected |= {f"blk.{n}.ffn_down.{part}" for n in (0, 3) for part in ("weight", "bias")}
    assert set(names) == expected
    before, after = (
        gguf.GGUFReader(model).tensors,
        gguf.GGUFReader(tmp_path / "zeroed.gguf").tensors,
    )
    for old, new in zip(before, after, strict=True):
        assert old.name == new.name
        if old.name in expected:
            assert not np.any(gguf.quants.dequantize(new.data, new.tensor_type))
            assert np.any(old.data)
        else:
            assert np.array_equal(old.data, new.data)


def test_zero_blocks_refuses_a_layer_without_such_a_block(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no output tensor"):
        tiny.zero_blocks(tiny_llama, tmp_path / "zeroed.gguf", attention=[4])


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe"])
def test_experts_end_the_ffn_block(tiny_model: Callable[..., Path], name: str) -> None:
    ffn = {s.name.split(".")[2] for s in output_tensors(tiny_model(name)) if s.kind == "ffn"}
    shared = {"ffn_down_shexp"} if name == "qwen2moe" else set()
    assert ffn == {"ffn_down_exps"} | shared


def test_every_block_matters_and_logits_are_not_degenerate(
    family: str, family_model: Path, tmp_path: Path
) -> None:
    tokens = random_tokens(24, 512)
    full = stock_logits(family_model, tokens)
    odds = np.exp(full - full.max(axis=1, keepdims=True))
    top = (1 / odds.sum(axis=1)).mean()
    assert 0.05 < top < 0.9
    for layer in range(tiny.FAMILIES[family].shape.n_layer):
        for skip in ({"attention": [layer]}, {"mlp": [layer]}):
            tiny.zero_blocks(family_model, tmp_path / "zeroed.gguf", **skip)
            changed = stock_logits(tmp_path / "zeroed.gguf", tokens)
            assert np.max(np.abs(changed - full)) > 0.05 * np.max(np.abs(full))


@pytest.mark.parametrize("name", sorted(tiny.FAMILIES))
def test_text_survives_the_tokenizer(tiny_model: Callable[..., Path], name: str) -> None:
    from pyssd import _loader

    _loader.load()
    import llama_cpp

    llm = llama_cpp.Llama(str(tiny_model(name)), vocab_only=True, verbose=False)
    try:
        tokens = llm.tokenize(TEXT.encode())
        # merges are there: fewer tokens than bytes
        assert len(tokens) < len(TEXT.encode())
        assert llm.detokenize(tokens).decode() == TEXT
        assert llm.n_vocab() == 512
    finally:
        llm.close()


def test_seed_and_options_change_the_file(tmp_path: Path) -> None:
    one = tiny.build(tmp_path / "one.gguf", "llama", seed=1).read_bytes()
    assert tiny.build(tmp_path / "again.gguf", "llama", seed=1).read_bytes() == one
    assert tiny.build(tmp_path / "two.gguf", "llama", seed=2).read_bytes() != one
