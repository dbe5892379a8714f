"""A small set of prompts for measurements, by domain. All were written for pyssd; none is from a public test set.

Each line of DOMAIN.jsonl is an object with the keys id, domain and prompt: the text of a user, without a chat template.
"""

from __future__ import annotations

import json
from importlib.resources import files

from pyssd.errors import OptionError

_DOMAINS = ("chat", "code", "code_edit", "summarize", "translate", "maths", "sql")


def domains() -> tuple[str, ...]:
    """Return the names of the domains."""
    return _DOMAINS


def load(domain: str) -> list[dict[str, str]]:
    """Read the prompts of a domain.

    Args:
        domain: A name that domains() lists.

    Returns:
        One dict for each prompt, with the keys id, domain and prompt; the order is that of the ids.

    Raises:
        OptionError: There is no such domain.
    """
    if domain not in _DOMAINS:
        raise OptionError(
            f"there are no prompts of the domain {domain!r}; known are {', '.join(_DOMAINS)}"
        )
    text = files(__name__).joinpath(f"{domain}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
