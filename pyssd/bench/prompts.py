"""Prompts of a benchmark: JSON lines of the user's, or the set that comes with pyssd."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyssd.errors import OptionError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what it is counted under.

    Attributes:
        id: distinguishes it within its domain.
        domain: the row of the table that it belongs to.
        text: what the user says, without a chat template.
    """

    id: str
    domain: str
    text: str


def choose(
    files: Sequence[Path] = (),
    *,
    domains: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Return the prompts to run, in the order of their files.

    Args:
        files: JSON lines; none = the packaged set.
        domains: only these; None = all there are.
        limit: the most prompts of a domain, the first ones of it; None = all.

    Raises:
        OptionError: a file is malformed, a domain is unknown, or no prompt is left.
        OSError: a file cannot be read.
    """
    prompts = [prompt for path in files for prompt in read_file(path)] if files else _packaged()
    known = list(dict.fromkeys(prompt.domain for prompt in prompts))
    for domain in domains or ():
        if domain not in known:
            raise OptionError(
                f"there are no prompts of the domain {domain!r}; known are {', '.join(known)}"
            )
    seen: set[tuple[str, str]] = set()
    for prompt in prompts:
        key = (prompt.domain, prompt.id)
        if key in seen:
            raise OptionError(
                f"two prompts of {prompt.domain} have the id {prompt.id!r}; give each its own"
            )
        seen.add(key)
    chosen = [
        prompt
        for domain in (known if domains is None else dict.fromkeys(domains))
        for prompt in [p for p in prompts if p.domain == domain][:limit]
    ]
    if not chosen:
        raise OptionError("there are no prompts to run; name a file with at least one")
    return chosen


def read_file(path: Path) -> list[Prompt]:
    """Read JSON lines: objects with "prompt", and "domain" and "id" where they are known.

    Without them the domain is the file's name up to its first point, and the id the number of the line.

    Raises:
        OptionError: a line is not such an object; the message names the line.
        OSError: the file cannot be read.
    """
    default = path.name.split(".")[0] or "prompts"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise OptionError(f"{path} is no UTF-8 text; name a file of JSON lines") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise OptionError(
                f"line {number} of {path} is not JSON; write one object a line"
            ) from None
        prompts.append(_prompt(value, f"line {number} of {path}", default, str(number)))
    return prompts


def _packaged() -> list[Prompt]:
    from pyssd import prompts

    return [
        _prompt(value, f"prompt {number} of {domain}", domain, str(number))
        for domain in prompts.domains()
        for number, value in enumerate(_rows(prompts.load(domain)), 1)
    ]


def _rows(values: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    return [dict(value) for value in values]


def _prompt(value: object, where: str, domain: str, identity: str) -> Prompt:
    if not isinstance(value, dict):
        raise OptionError(f'{where} is no JSON object; write {{"prompt": "..."}}')
    text = value.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f'{where} has no text under "prompt"; write {{"prompt": "..."}}')
    for name, fallback in (("domain", domain), ("id", identity)):
        if not isinstance(value.get(name, fallback), (str, int)) or value.get(name) == "":
            raise OptionError(f'{where} has {value[name]!r} under "{name}"; write a text')
    return Prompt(str(value.get("id", identity)), str(value.get("domain", domain)), text)
