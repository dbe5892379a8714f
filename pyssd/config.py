"""Settings of speculative decoding, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pyssd.errors import OptionError

Mode = Literal["auto", "on", "off"]

PROPOSERS = ("ngram", "recycle", "skip")
COUPLINGS = ("gumbel", "llama_cpp")
SELECTORS = ("greedy",)

MAX_DRAFT_LEN = 63  # a target pass has logits for 64 rows: the draft and the last token before it
# a multiple of every interleave of repacked weights, so that a trimmed head is a plain view
HEAD_ROWS_STEP = 256


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How to speculate.

    Attributes:
        max_draft_len: the most tokens that the model drafts in a round (gamma), 1 to 63.
        min_confidence: a skip draft ends before a token whose draft probability is below this, 0 to 1, and nowhere
            else; None = it goes on while the next token is worth its measured cost.
        proposers: where drafts come from: "ngram" = copied from the context; "recycle" = what the model ranked highest
            the last time it stood behind the same tokens; "skip" = the same model without some blocks.
        max_ngram_len: the most tokens copied or recycled in a round, 1 to 63.
        selector: what looks for a skip set when none is given; None = "greedy", and only where the measured costs say
            that a set could pay.
        head_rows: rows of the LM head used in drafting, a multiple of 256; 0 = all, None = chosen by measurement.
        coupling: the noise of sampling: "gumbel" (shared by draft and target) or "llama_cpp" (the
            sampler of llama.cpp).
        guard_margin: logits; where rows depend on the width of a pass (`Llama.exactness.level` is 1), a pick that a
            difference of this size could change is settled as plain decoding would settle it (near-tie guard,
            docs/guarantees.md). 0 = not, for it costs most of what drafting gains; `pyssd check` measures the margin.
        always: draft even where plain decoding measures faster.

    Raises:
        TypeError: a value has the wrong type.
        OptionError: a value is out of range.
    """

    max_draft_len: int = 15
    min_confidence: float | None = None
    proposers: tuple[str, ...] = PROPOSERS
    max_ngram_len: int = MAX_DRAFT_LEN
    selector: str | None = None
    head_rows: int | None = None
    coupling: str = "gumbel"
    guard_margin: float = 0.0
    always: bool = False

    def __post_init__(self) -> None:
        _check_int("max_draft_len", self.max_draft_len, 1, MAX_DRAFT_LEN)
        _check_int("max_ngram_len", self.max_ngram_len, 1, MAX_DRAFT_LEN)
        if self.head_rows is not None:
            _check_int("head_rows", self.head_rows, 0, 2**31 - 1)
            if self.head_rows % HEAD_ROWS_STEP:
                raise OptionError(
                    f"head_rows is {self.head_rows}; "
                    f"use a multiple of {HEAD_ROWS_STEP}, 0 for all rows, or None"
                )
        if self.min_confidence is not None:
            object.__setattr__(self, "min_confidence", _fraction(self.min_confidence))
        if not isinstance(self.proposers, (tuple, list)):
            raise TypeError(
                f"proposers is {self.proposers!r}; pass a tuple of names such as ('ngram', 'skip')"
            )
        object.__setattr__(self, "proposers", tuple(self.proposers))
        if not self.proposers:
            raise OptionError("proposers is empty; name one, or use speculative='off'")
        for name in self.proposers:
            _check_name("proposers", name, PROPOSERS)
        if self.selector is not None:
            _check_name("selector", self.selector, SELECTORS)
        _check_name("coupling", self.coupling, COUPLINGS)
        object.__setattr__(self, "guard_margin", _margin(self.guard_margin))
        if not isinstance(self.always, bool):
            raise TypeError(f"always is {self.always!r}; pass True or False")

    @classmethod
    def of(cls, value: object) -> tuple[Mode, SpecConfig]:
        """Read what a user may pass as ``speculative``.

        Args:
            value: "auto" or "off", False (= "off"), True or "on" (draft even where plain measures
                faster), a SpecConfig, or a mapping of its fields.

        Returns:
            The mode and the settings; mode "on" and ``always=True`` always come together.

        Raises:
            TypeError: the value is of another type, or a mapping has an unknown key.
            OptionError: a text or a field's value is unknown or out of range.
        """
        if isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            for key in value:
                if key not in known:
                    raise TypeError(
                        f"speculative has the unknown key {key!r}; known are {', '.join(known)}"
                    )
            settings: dict[str, Any] = dict(value)
            value = cls(**settings)
        if isinstance(value, SpecConfig):
            return ("on" if value.always else "auto"), value
        if isinstance(value, bool):
            return ("on", cls(always=True)) if value else ("off", cls())
        if not isinstance(value, str):
            raise TypeError(
                f"speculative is {value!r}; use 'auto', 'off', True, False, a SpecConfig or a dict"
            )
        if value == "on":
            return "on", cls(always=True)
        if value == "auto":
            return "auto", cls()
        if value == "off":
            return "off", cls()
        raise OptionError(
            f"speculative is {value!r}; use 'auto', 'off', True, False, a SpecConfig or a dict"
        )


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"min_confidence is {value!r}; pass a number from 0 to 1, or None")
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"min_confidence is {value!r}; use a number from 0 to 1, or None")
    return float(value)


def _margin(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"guard_margin is {value!r}; pass a number of logits, 0 for no guard")
    if not 0.0 <= value < math.inf:
        raise OptionError(
            f"guard_margin is {value!r}; use a finite number of logits, 0 for no guard"
        )
    return float(value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; pass an integer from {low} to {high}")
    if not low <= value <= high:
        raise OptionError(f"{name} is {value}; use an integer from {low} to {high}")


def _check_name(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} has {value!r}; pass a name, known are {', '.join(known)}")
    if value not in known:
        raise OptionError(f"{name} has the unknown name {value!r}; known are {', '.join(known)}")
