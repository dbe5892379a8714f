"""Which CPU kernels a model's weights get: pyssd's own, or upstream's.

pyssd's kernels (cpp/kernels) pack the weights into tiles of 16 rows while they load and read each tile once for up to 16
columns, so that verifying a draft costs little more than one token. Every output is computed in the same order at every
width. The choice is made while a model loads, for the loading thread alone, so that other models in the process keep
what they asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from pyssd import _loader

BUFFER = "CPU_PYSSD"
"""Name of the buffer type that holds packed weights."""

PACKED_TYPES = frozenset(
    ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_NL", "F32", "F16", "BF16")
)
"""Tensor types with a packed layout; the others keep upstream's kernels."""


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_loader.libraries().files["ggml-cpu"]))
    library.pyssd_kernels_offer.argtypes = [ctypes.c_bool, ctypes.c_bool]
    library.pyssd_kernels_offer.restype = None
    library.pyssd_kernels_isa.restype = ctypes.c_char_p
    return library


def instruction_set() -> str:
    """Name of the instruction set that the kernels of this build use."""
    return str(_library().pyssd_kernels_isa().decode())


def are_chosen(kernels: str, *, exact: bool, weight_types: Collection[str]) -> bool:
    """Tell whether a load packs weights.

    Args:
        kernels: The option: "auto" or "upstream".
        exact: Width invariance was asked for: then all weights are packed or none is, as upstream's fast kernels do not
            have it.
        weight_types: Names of the tensor types in the file.
    """
    return kernels == "auto" and (not exact or PACKED_TYPES.issuperset(weight_types))


@contextlib.contextmanager
def offered(chosen: bool, *, tied: bool) -> Iterator[None]:
    """Offer the packed layout to models that this thread loads inside the block.

    Args:
        chosen: Whether to offer it at all.
        tied: The LM head is the embedding matrix: it is packed once and serves both.
    """
    library = _library()
    library.pyssd_kernels_offer(chosen, tied)
    try:
        yield
    finally:
        library.pyssd_kernels_offer(False, False)


def release_file_pages(model_path: str) -> None:
    """Give back the pages of a model file that packing has read: the packed weights are the only copy that is needed.

    The mapping stays, so what is still read through it (norms, an untied embedding) comes back page by page. Does nothing
    where the system does not list its mappings.
    """
    path = Path(model_path).resolve()
    # a split model is mapped shard by shard: name-00001-of-00003.gguf
    stem, shard, suffix = re.fullmatch(r"(.*?)(-\d{5}-of-\d{5})?(\.gguf|)", path.name).groups()  # type: ignore[union-attr]
    number = r"-\d{5}-of-\d{5}" if shard else ""
    wanted = re.compile(re.escape(f"{path.parent}/{stem}") + number + re.escape(suffix))
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not wanted.fullmatch(fields[5]):
            continue
        first, last = (int(address, 16) for address in fields[0].split("-"))
        advise(first, last - first, mmap.MADV_DONTNEED)
