"""docs/options.md says what the signatures say: names, defaults, order; nothing undocumented, nothing made up."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pyssd

import llama_cpp  # isort: skip  (pyssd decides which library it opens)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
ROW = re.compile(r"^\| `(\w+)` \| `(.+?)` \| .+ \| \d+\.\d+ \|$")


def documented(title: str) -> dict[str, str]:
    """Names and defaults of the table under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    found = [ROW.match(line) for line in rows]
    assert all(found), [line for line, match in zip(rows, found, strict=True) if not match]
    return {match[1]: match[2] for match in found if match}


def added(ours: Callable[..., Any], theirs: Callable[..., Any]) -> dict[str, str]:
    """Names and defaults of the keywords that pyssd's method has and llama_cpp's lacks."""
    known = inspect.signature(theirs).parameters
    return {
        name: repr(parameter.default)
        for name, parameter in inspect.signature(ours).parameters.items()
        if name not in known and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def test_table_of_the_constructor() -> None:
    assert documented("Of `pyssd.Llama`") == added(pyssd.Llama.__init__, llama_cpp.Llama.__init__)


@pytest.mark.parametrize("name", ["create_completion", "__call__", "create_chat_completion"])
def test_table_of_a_call(name: str) -> None:
    ours, theirs = getattr(pyssd.Llama, name), getattr(llama_cpp.Llama, name)
    assert documented("Of a call") == added(ours, theirs)


def test_table_of_spec_config() -> None:
    fields = {field.name: repr(field.default) for field in dataclasses.fields(pyssd.SpecConfig)}
    assert documented("Of `SpecConfig`") == fields


def test_every_argument_of_llama_cpp_is_taken() -> None:
    ours = inspect.signature(pyssd.Llama.__init__).parameters
    theirs = [
        name for name in inspect.signature(llama_cpp.Llama.__init__).parameters if name != "kwargs"
    ]
    assert [name for name in theirs if name not in ours] == []
