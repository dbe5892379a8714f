"""Arguments: which exist, which values this version can honour, and what a misspelt one may have meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyssd.config import SpecConfig
from pyssd.errors import OptionError

_PER_CALL = ("speculative", "skip_set")


def reject_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise TypeError for the first name that is not known, naming the nearest one that is."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{where} got the unknown argument {name!r}{hint}")


def per_call_signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of one of llama_cpp.Llama's methods with pyssd's per-call options added."""
    signature = inspect.signature(method)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="object")
        for name in _PER_CALL
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *added])


def bind(
    signature: inspect.Signature, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without self; TypeError for one that does not exist."""
    reject_unknown(kwargs, [name for name in signature.parameters if name != "self"], where)
    bound = signature.bind(None, *args, **kwargs).arguments
    del bound["self"]
    return bound


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse values of Llama's arguments that this version cannot honour.

    Raises:
        OptionError: Such a value; the message says what to pass.
    """
    if given["draft_model"] is not None:
        raise OptionError(
            "draft_model is not supported; pass speculative=... instead, the model drafts for itself"
        )
    if given["profile"] is not None:
        raise OptionError(
            f"profile={given['profile']!r} is not in this version; pass skip_set= instead"
        )
    SpecConfig(coupling=given["coupling"], selector=given["selector"])
    if given["kernels"] not in ("auto", "upstream"):
        raise OptionError(f"kernels is {given['kernels']!r}; use 'auto' or 'upstream'")
    for name, low in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 1)):
        if given[name] < low:
            raise OptionError(f"{name} is {given[name]}; use {low} or more")
