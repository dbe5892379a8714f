"""Skip sets: every written form reads back as the same set, a malformed one is a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyssd.errors import PyssdError, SkipSetError
from pyssd.skipset import Block, SkipSet

layers = st.lists(st.integers(0, 99), max_size=12)
skip_sets = st.builds(
    SkipSet, attention=layers, mlp=layers, n_layer=st.none() | st.integers(100, 200)
)


def dense(n_layer: int) -> list[Block]:
    return [Block(i, i // 2, "ffn" if i % 2 else "attn", 10, "CPU") for i in range(2 * n_layer)]


@given(skip_sets)
def test_text_reads_back_as_the_same_set(skip_set: SkipSet) -> None:
    assert SkipSet.parse(str(skip_set)) == skip_set


@given(skip_sets)
def test_json_reads_back_as_the_same_set(skip_set: SkipSet) -> None:
    assert SkipSet.parse(skip_set.to_json()) == skip_set
    assert SkipSet.of(json.loads(skip_set.to_json())) == skip_set


@given(skip_sets, skip_sets)
def test_equal_sets_have_equal_hashes(first: SkipSet, second: SkipSet) -> None:
    assert hash(first) == hash(SkipSet.parse(str(first)))
    assert (first == second) == (str(first) == str(second))


@given(layers, layers)
def test_join_marks_the_blocks_of_both(first: list[int], second: list[int]) -> None:
    blocks = dense(100)
    one, other = SkipSet(attention=first, mlp=second), SkipSet(attention=second, mlp=first)
    assert np.array_equal((one | other).bits(blocks), one.bits(blocks) | other.bits(blocks))
    assert one | one == one


@given(st.text(max_size=40))
def test_any_text_is_a_set_or_a_skip_set_error(text: str) -> None:
    try:
        SkipSet.of(text)
    except SkipSetError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_canonical_text() -> None:
    skip_set = SkipSet.parse(" f:3,1  a: 8,3,5 - 7,5 ")
    assert str(skip_set) == "a:3,5-8 f:1,3"
    assert skip_set.attention == (3, 5, 6, 7, 8)
    assert len(skip_set) == 7
    assert str(SkipSet(mlp=[1], n_layer=28)) == "f:1 n:28"
    assert str(SkipSet.empty()) == "none"
    assert SkipSet.parse("") == SkipSet.empty() == SkipSet.parse("none")
    assert not SkipSet.empty(28)


def test_json_form() -> None:
    assert json.loads(SkipSet([1], [0, 2]).to_json()) == {"attention": [1], "mlp": [0, 2]}
    assert json.loads(SkipSet.empty(4).to_json()) == {"attention": [], "mlp": [], "n_layer": 4}


def test_file_is_loaded_by_path(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text('{"attention": [3], "mlp": [1, 2]}')
    expected = SkipSet([3], [1, 2])
    assert SkipSet.load(path) == SkipSet.of(path) == SkipSet.of(str(path)) == expected


def test_bits_name_all_blocks_of_a_kind_in_a_layer() -> None:
    blocks = [
        Block(0, 0, "attn", 1, "CPU"),
        Block(1, 0, "ffn", 1, "CPU"),
        Block(2, 0, "ffn", 1, "CPU"),
        Block(3, 1, "attn", 1, "CPU"),
    ]
    bits = SkipSet(attention=[1], mlp=[0]).bits(blocks)
    assert bits.dtype == np.uint8
    assert bits.tolist() == [0, 1, 1, 1]


def test_of_fills_in_the_number_of_layers() -> None:
    blocks = dense(4)
    assert SkipSet.of("a:1", blocks) == SkipSet(attention=[1], n_layer=4)
    assert SkipSet.of(None, blocks) == SkipSet.empty(4)
    everything = SkipSet.of({"attention": range(4), "mlp": range(4)}, blocks)
    assert everything.bits(blocks).all()


@pytest.mark.parametrize(
    ("skip_set", "words"),
    [
        (SkipSet(mlp=[1], n_layer=5), "5 layers, this model has 4"),
        (SkipSet(attention=[7]), "names layer 7, the model has 4 layers"),
        (SkipSet(attention=[3]), "recurrent"),
        (SkipSet(mlp=[3]), "FFN of layer 3, which has none"),
    ],
)
def test_set_for_another_model_is_refused(skip_set: SkipSet, words: str) -> None:
    blocks = [*dense(3), Block(6, 3, "mixer", 1, "CPU")]
    with pytest.raises(SkipSetError, match=words):
        skip_set.bits(blocks)
    with pytest.raises(ValueError, match=words):
        SkipSet.of(skip_set, blocks)


@pytest.mark.parametrize(
    "value",
    [
        "b:1",
        "a:",
        "a:8-5",
        "a:1--2",
        "a:1,,2",
        "a:-1",
        "a:99999999999999999999",
        "a:0-99999999",
        "f:1 n:4 n:5",
        "a:5 n:5",
        "{",
        "[1]",
        '{"attention": 3}',
        '{"attention": "12"}',
        '{"attention": [1.5]}',
        '{"attention": [true]}',
        '{"attention": [-1]}',
        '{"ffn": [1]}',
        '{"mlp": [1], "n_layer": "x"}',
        "no/such/file.json",
        "x" * 5000,
        "\0",
        {"mlp": None},
        {1: [2]},
        7,
        [1, 2],
    ],
)
def test_malformed_value_is_a_one_sentence_error(value: object) -> None:
    with pytest.raises(SkipSetError) as caught:
        SkipSet.of(value)  # type: ignore[arg-type]
    assert isinstance(caught.value, PyssdError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_malformed_files_are_errors(tmp_path: Path) -> None:
    hostile = {"empty": b"", "binary": b"\xff\xfe\x00", "list": b"[1]", "deep": b"[" * 100_000}
    for name, content in hostile.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SkipSetError):
            SkipSet.load(tmp_path / name)
    with pytest.raises(SkipSetError):
        SkipSet.load(tmp_path)


def test_sets_of_different_models_cannot_be_joined() -> None:
    with pytest.raises(SkipSetError, match="4 and 5 layers"):
        _ = SkipSet.empty(4) | SkipSet.empty(5)
    assert (SkipSet.empty(4) | SkipSet([1])).n_layer == 4


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SkipSet.empty().mlp = (1,)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        dense(1)[0].layer = 3  # type: ignore[misc]
