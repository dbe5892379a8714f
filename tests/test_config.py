"""Speculation settings: what users may pass, and what is refused."""

from __future__ import annotations

import pytest

from pyssd.config import SpecConfig


@pytest.mark.parametrize(
    ("value", "mode", "config"),
    [
        ("auto", "auto", SpecConfig()),
        ("off", "off", SpecConfig()),
        (False, "off", SpecConfig()),
        (True, "on", SpecConfig(always=True)),
        ("on", "on", SpecConfig(always=True)),
        (SpecConfig(max_draft_len=2), "auto", SpecConfig(max_draft_len=2)),
        (SpecConfig(always=True), "on", SpecConfig(always=True)),
        ({"max_draft_len": 8, "always": True}, "on", SpecConfig(max_draft_len=8, always=True)),
        ({}, "auto", SpecConfig()),
    ],
)
def test_accepted_forms(value: object, mode: str, config: SpecConfig) -> None:
    assert SpecConfig.of(value) == (mode, config)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        0.5,
        {"length": 3},
        ["auto"],
        {"always": 1},
        {"guard_margin": True},
        {"guard_margin": "0.4"},
    ],
)
def test_wrong_types_are_type_errors(value: object) -> None:
    with pytest.raises(TypeError):
        SpecConfig.of(value)


@pytest.mark.parametrize(
    "value",
    [
        "fast",
        {"max_draft_len": 0},
        {"max_draft_len": 64},
        {"min_confidence": -0.1},
        {"min_confidence": float("nan")},
        {"proposers": ()},
        {"proposers": ("oracle",)},
        {"max_ngram_len": 0},
        {"max_ngram_len": 64},
        {"selector": "oracle"},
        {"coupling": "none"},
        {"head_rows": -256},
        {"head_rows": 100},
        {"min_confidence": 1.5},
        {"guard_margin": -0.1},
        {"guard_margin": float("nan")},
        {"guard_margin": float("inf")},
    ],
)
def test_values_out_of_range_are_value_errors(value: object) -> None:
    with pytest.raises(ValueError, match=r"; |known are"):
        SpecConfig.of(value)


def test_config_is_a_value() -> None:
    config = SpecConfig(min_confidence=1, proposers=["ngram", "recycle", "skip"])  # type: ignore[arg-type]
    assert hash(config) == hash(SpecConfig(min_confidence=1.0))
    with pytest.raises(AttributeError):
        config.always = True  # type: ignore[misc]
