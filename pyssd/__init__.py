"""Self-speculative decoding for local GGUF models: faster, same text, no second model."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from pyssd import _loader, errors as errors
from pyssd.config import SpecConfig as SpecConfig
from pyssd.skipset import Block as Block, SkipSet as SkipSet
from pyssd.stats import SpecStats as SpecStats

if TYPE_CHECKING:
    from pyssd.llama import Llama as Llama
__version__ = "0.1.0"
# Now, so that a later `import llama_cpp` gets our library; what is missing is reported at first use.
with contextlib.suppress(errors.LibraryNotFoundError):
    _loader.load()


def __getattr__(name: str) -> Any:
    if name != "Llama":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _loader.load()
    return importlib.import_module("pyssd.llama").Llama
