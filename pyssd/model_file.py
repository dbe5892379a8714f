"""Check a GGUF file before llama.cpp opens it, so that a bad file is one clear sentence instead of a crash.

Only the header is read: keys, and each tensor's type, shape and place in the file. llama.cpp checks most of this as
well, but it reports through its log, maps the file before it knows that the end is missing, and has no word for "this
is a folder".
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from pyssd.errors import UnsupportedModelError

_SCALAR_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SCALAR_FORMAT = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")

# ggml type id: (values a block, bytes a block); a type that is not listed is left to llama.cpp
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the header of a model says.

    Attributes:
        path: The file that was named; the first shard if there are several.
        architecture: `general.architecture`, "" if the file does not say.
        weight_types: Names of the tensor types in use, over all shards ("Q4_K", ...; "type 99" if unknown).
        n_tensors: Tensors over all shards.
        tied: No LM head of its own: the embedding matrix serves as one.
    """

    path: Path
    architecture: str
    weight_types: frozenset[str]
    n_tensors: int
    tied: bool


@dataclass(frozen=True, slots=True)
class _Header:
    architecture: str
    types: frozenset[str]
    n_tensors: int
    n_shards: int
    has_head: bool


def check_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Read the header of a model and of all its shards.

    Raises:
        UnsupportedModelError: The file is missing, a folder, empty, not GGUF, of another version, damaged or cut short, or a
            shard of it is missing.
    """
    first = Path(path)
    header = _read_header(first)
    types, n_tensors, has_head = header.types, header.n_tensors, header.has_head
    for shard in _other_shards(first, header.n_shards):
        if not shard.exists():
            msg = f"{shard} is missing: the model has {header.n_shards} parts; put them all in one folder"
            raise UnsupportedModelError(msg)
        part = _read_header(shard)
        types, n_tensors = types | part.types, n_tensors + part.n_tensors
        has_head = has_head or part.has_head
    return ModelFile(first, header.architecture, types, n_tensors, tied=not has_head)


def model_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return a model's file, or all its shards as far as they are there, told by the name of the first."""
    first = Path(path)
    name = _SHARD_NAME.match(first.name)
    if name is None or int(name["no"]) != 1:
        return [first]
    count = int(name["count"])
    shards = (
        first.with_name(f"{name['stem']}-{no:05d}-of-{count:05d}.gguf")
        for no in range(2, count + 1)
    )
    return [first, *(shard for shard in shards if shard.exists())]


def _other_shards(first: Path, n_shards: int) -> list[Path]:
    if n_shards <= 1:
        return []
    name = _SHARD_NAME.match(first.name)
    if name is None or int(name["no"]) != 1 or int(name["count"]) != n_shards:
        msg = (
            f"{first} is one of {n_shards} parts; name the first part, and keep the names "
            f"NAME-00001-of-{n_shards:05d}.gguf"
        )
        raise UnsupportedModelError(msg)
    return [
        first.with_name(f"{name['stem']}-{no:05d}-of-{n_shards:05d}.gguf")
        for no in range(2, n_shards + 1)
    ]


def _read_header(path: Path) -> _Header:
    if not path.exists():
        msg = f"there is no model file at {path}; check the path"
        raise UnsupportedModelError(msg)
    if path.is_dir():
        msg = f"{path} is a folder; name the .gguf file in it"
        raise UnsupportedModelError(msg)
    try:
        nbytes = path.stat().st_size
        if nbytes == 0:
            msg = f"{path} is empty; download it again"
            raise UnsupportedModelError(msg)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, nbytes).header()
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror or error}); check its permissions"
        raise UnsupportedModelError(msg) from error
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        msg = f"{path} ends or is damaged within its header; download it again"
        raise UnsupportedModelError(msg) from error


class _Reader:
    """A cursor over a mapped GGUF file; running off its end raises struct.error or IndexError."""

    def __init__(self, path: Path, data: mmap.mmap, nbytes: int) -> None:
        self._path = path
        self._data = data
        self._nbytes = nbytes
        self._at = 0

    def header(self) -> _Header:
        self._check_magic()
        n_tensors, n_keys = self._scalar(11), self._scalar(11)
        if not (0 <= n_tensors <= self._nbytes and 0 <= n_keys <= self._nbytes):
            raise IndexError
        wanted: dict[str, object] = {}
        for _ in range(n_keys):
            key = self._string()
            value = self._value(self._scalar(4))
            if key in {"general.architecture", "general.alignment", "split.count"}:
                wanted[key] = value
        architecture = wanted.get("general.architecture", "")
        n_shards = wanted.get("split.count", 1)
        alignment = wanted.get("general.alignment", 32)
        if not (
            isinstance(architecture, str)
            and isinstance(n_shards, int)
            and isinstance(alignment, int)
        ):
            raise IndexError
        if alignment <= 0:
            raise IndexError
        types, end, has_head = self._tensors(n_tensors, alignment)
        if end > self._nbytes:
            msg = f"{self._path} is cut short: {self._nbytes} bytes of {end}; download it again"
            raise UnsupportedModelError(msg)
        return _Header(architecture, types, n_tensors, n_shards, has_head)

    def _check_magic(self) -> None:
        if self._data[:4] != b"GGUF":
            msg = f"{self._path} is not a GGUF file; convert the model to GGUF"
            raise UnsupportedModelError(msg)
        self._at = 4
        version = self._scalar(4)
        if version not in {2, 3}:
            msg = f"{self._path} has GGUF version {version}, only 2 and 3 can be read; convert the model again"
            raise UnsupportedModelError(msg)

    def _tensors(self, n_tensors: int, alignment: int) -> tuple[frozenset[str], int, bool]:
        types: set[str] = set()
        end = 0
        has_head = False
        for _ in range(n_tensors):
            has_head = self._string() == "output.weight" or has_head
            n_dims = self._scalar(4)
            if n_dims > _MAX_DIMS:
                raise IndexError
            n_values = 1
            for _ in range(n_dims):
                n_values *= max(self._scalar(11), 0)
            type_id, offset = self._scalar(4), self._scalar(10)
            name, block, block_nbytes = TENSOR_TYPES.get(type_id, (f"type {type_id}", 1, 0))
            types.add(name)
            end = max(end, offset + n_values // block * block_nbytes)
        data_at = -(-self._at // alignment) * alignment
        return frozenset(types), data_at + end if n_tensors else self._at, has_head

    def _scalar(self, kind: int) -> int:
        (value,) = struct.unpack_from("<" + _SCALAR_FORMAT[kind], self._data, self._at)
        self._at += _SCALAR_NBYTES[kind]
        return int(value)

    def _string(self) -> str:
        length = self._scalar(10)
        if length > self._nbytes - self._at:
            raise IndexError
        text = self._data[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8")

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            length = self._scalar(10)
            if length > self._nbytes - self._at:
                raise IndexError
            # a value may be any bytes (tokens of some vocabularies are); only its length matters here
            text = self._data[self._at : self._at + length].decode("utf-8", errors="replace")
            self._at += length
            return text
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _SCALAR_NBYTES:
            raise IndexError
        if kind in {6, 12}:
            self._at += _SCALAR_NBYTES[kind]
            return None
        return self._scalar(kind)

    def _skip_array(self) -> None:
        kind, n_items = self._scalar(4), self._scalar(10)
        if n_items > self._nbytes:
            raise IndexError
        if kind == _STRING:
            unpack, data, at, nbytes = (
                struct.Struct("<Q").unpack_from,
                self._data,
                self._at,
                self._nbytes,
            )
            for _ in range(n_items):
                at += 8 + unpack(data, at)[0]
                if at > nbytes:
                    raise IndexError
            self._at = at
        elif kind in _SCALAR_NBYTES:
            self._at += n_items * _SCALAR_NBYTES[kind]
        else:
            raise IndexError
