"""The binding of the n-gram index; tests/cpp/test_ngram.cpp has its search."""

from __future__ import annotations

import numpy as np
import pytest

from pyssd._core import NgramIndex


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_draft_is_what_followed_the_longest_match() -> None:
    index = NgramIndex(64)
    assert index.sync(ids(1, 2, 3, 4, 5, 9, 2, 3)) == 0
    tokens, chances, match_len = index.draft(3)
    assert (tokens.dtype, chances.dtype, match_len) == (np.int32, np.float32, 2)
    assert tokens.tolist() == [4, 5, 9]
    assert np.all((chances > 0.0) & (chances < 1.0))
    index.extend(tokens[:1])
    assert index.draft(1)[2] == 3
    assert len(index) == 9


def test_nothing_to_copy() -> None:
    index = NgramIndex(64)
    for tokens in (ids(), ids(1), ids(1, 2), ids(1, 2, 3, 4)):
        index.sync(tokens)
        drafted, chances, match_len = index.draft(8)
        assert (len(drafted), len(chances), match_len) == (0, 0, 0)


def test_sync_keeps_the_shared_prefix() -> None:
    index = NgramIndex(64)
    index.sync(ids(1, 2, 3, 4))
    assert index.sync(ids(1, 2, 7)) == 2
    assert len(index) == 3
    assert index.sync(ids(1, 2, 7, 8)) == 3
    index.rewind(1)
    assert index.sync(ids(1, 2, 7, 8)) == 1


def test_wrong_arguments_are_value_errors() -> None:
    for capacity in (0, -5):
        with pytest.raises(ValueError, match="capacity"):
            NgramIndex(capacity)
    index = NgramIndex(8)
    with pytest.raises(ValueError, match="dimensions"):
        index.extend(np.zeros((2, 2), np.int32))
    for n in (-1, 1):
        with pytest.raises(ValueError, match="cannot be cut"):
            index.rewind(n)
    with pytest.raises(TypeError):
        index.draft("3")  # type: ignore[arg-type]
