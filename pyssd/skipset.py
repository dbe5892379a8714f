"""Blocks and skip sets: which attention and FFN blocks drafting leaves out.

A skip set names layers, not block indices, in the field's file format
``{"attention": [...], "mlp": [...]}``; its short text form is ``a:3,5-8 f:1,3``. Both may carry the
number of layers of the model it was made for: ``"n_layer": 28``, ``n:28``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from pyssd.errors import SkipSetError

BlockKind = Literal["attn", "ffn", "mixer"]

_MAX_LAYER = 65_535  # a typing error such as a:1-99999999 must not fill the memory
_TEXT = re.compile(r"(?:\s*[afn]\s*:\s*[0-9][0-9\s,-]*)+\s*")
_PART = re.compile(r"([afn])\s*:\s*([0-9][0-9\s,-]*)")


@dataclass(frozen=True, slots=True)
class Block:
    """One attention, FFN or mixer sub-layer of a model.

    Attributes:
        index: order along the residual stream, 0-based.
        layer: number in the names of its weights, 0-based.
        kind: "attn" (reads or writes KV), "ffn", or "mixer" (recurrent state; never skippable).
        nbytes: bytes of weights that a pass over it reads.
        device: name of the device that holds the weights.
    """

    index: int
    layer: int
    kind: BlockKind
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Layers whose attention, and layers whose FFN, a draft leaves out.

    Attributes:
        attention: layers without attention, sorted, unique.
        mlp: layers without FFN, sorted, unique.
        n_layer: layers of the model the set was made for; None = unknown, any model is accepted.

    Raises:
        SkipSetError: a layer is no integer, negative, or not below ``n_layer``.
    """

    attention: Sequence[int] = ()
    mlp: Sequence[int] = ()
    n_layer: int | None = None

    def __post_init__(self) -> None:
        n_layer = None if self.n_layer is None else _layer_number(self.n_layer, "n_layer")
        object.__setattr__(self, "n_layer", n_layer)
        for name in ("attention", "mlp"):
            object.__setattr__(self, name, _layers(getattr(self, name), name, n_layer))

    @classmethod
    def empty(cls, n_layer: int | None = None) -> SkipSet:
        """Make the set that skips nothing."""
        return cls((), (), n_layer)

    @classmethod
    def parse(cls, text: str) -> SkipSet:
        """Read ``a:3,5-8 f:1,3`` or JSON text; an empty text or "none" skips nothing.

        Raises:
            SkipSetError: the text is neither.
        """
        stripped = text.strip()
        if stripped.startswith("{"):
            return cls._from_json(stripped, "the text")
        if stripped in ("", "none"):
            return cls.empty()
        if not _TEXT.fullmatch(stripped):
            raise SkipSetError(
                f"skip set {_short(text)} is malformed; write it like 'a:3,5-8 f:1,3'"
            )
        parts: dict[str, list[int]] = {"a": [], "f": [], "n": []}
        for letter, numbers in _PART.findall(stripped):
            parts[letter].extend(_ranges(numbers, text))
        if len(parts["n"]) > 1:
            raise SkipSetError(
                f"skip set {_short(text)} gives the number of layers twice; keep one n:"
            )
        return cls(parts["a"], parts["f"], parts["n"][0] if parts["n"] else None)

    @classmethod
    def load(cls, path: str | Path) -> SkipSet:
        """Read a JSON file ``{"attention": [...], "mlp": [...]}``, "n_layer" optional.

        Raises:
            SkipSetError: the file cannot be read or has another shape.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise SkipSetError(
                f"skip set file {str(path)!r} cannot be read ({error}); check the path"
            ) from error
        return cls._from_json(text, f"file {str(path)!r}")

    @classmethod
    def of(
        cls,
        value: SkipSet | str | Path | Mapping[str, object] | None,
        blocks: Sequence[Block] | None = None,
    ) -> SkipSet:
        """Turn what a user may pass as a skip set into one, checked against a model.

        Args:
            value: a SkipSet, set text, JSON text, the path of a JSON file, such a mapping, or None
                (skips nothing).
            blocks: the model's blocks; the result then carries its number of layers. None: not
                checked.

        Raises:
            SkipSetError: the value is malformed, or the set does not fit the blocks.
        """
        if value is None:
            result = cls.empty()
        elif isinstance(value, SkipSet):
            result = value
        elif isinstance(value, Path):
            result = cls.load(value)
        elif isinstance(value, str):
            result = cls.parse(value) if _looks_like_text(value) else cls._load_named(value)
        elif isinstance(value, Mapping):
            result = cls._from_mapping(value, "the mapping")
        else:
            raise SkipSetError(
                f"skip set {_short(value)} is a {type(value).__name__}; "
                "pass a SkipSet, text, path or dict"
            )
        if blocks is None:
            return result
        result.bits(blocks)
        return cls(result.attention, result.mlp, count_layers(blocks))

    def bits(self, blocks: Sequence[Block]) -> npt.NDArray[np.uint8]:
        """Mark the blocks that the set skips: all blocks of that kind in each named layer.

        Args:
            blocks: the model's blocks, in order.

        Returns:
            uint8 [n_blocks], 1 = skipped.

        Raises:
            SkipSetError: the set was made for a model with another number of layers, or names a
                layer that has no such block, or one with recurrent state.
        """
        n_layer = count_layers(blocks)
        if self.n_layer is not None and self.n_layer != n_layer:
            raise SkipSetError(
                f"skip set is for a model with {self.n_layer} layers, "
                f"this model has {n_layer}; use one made for this model"
            )
        skipped = np.zeros(len(blocks), np.uint8)
        for kind, name, layers in (("attn", "attention", self.attention), ("ffn", "FFN", self.mlp)):
            missing = set(layers)
            for place, block in enumerate(blocks):
                if block.kind == kind and block.layer in layers:
                    skipped[place] = 1
                    missing.discard(block.layer)
            if missing:
                raise SkipSetError(_missing(min(missing), name, blocks))
        return skipped

    def to_json(self) -> str:
        """Write the set as JSON text that ``parse`` and ``load`` read."""
        value: dict[str, object] = {"attention": list(self.attention), "mlp": list(self.mlp)}
        if self.n_layer is not None:
            value["n_layer"] = self.n_layer
        return json.dumps(value)

    def __str__(self) -> str:
        parts = [
            f"{letter}:{_format(layers)}"
            for letter, layers in (("a", self.attention), ("f", self.mlp))
            if layers
        ]
        if self.n_layer is not None:
            parts.append(f"n:{self.n_layer}")
        return " ".join(parts) or "none"

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def __or__(self, other: SkipSet) -> SkipSet:
        if not isinstance(other, SkipSet):
            return NotImplemented
        if None not in (self.n_layer, other.n_layer) and self.n_layer != other.n_layer:
            raise SkipSetError(
                f"skip sets for {self.n_layer} and {other.n_layer} layers cannot be joined; "
                "use sets of one model"
            )
        n_layer = self.n_layer if self.n_layer is not None else other.n_layer
        return SkipSet((*self.attention, *other.attention), (*self.mlp, *other.mlp), n_layer)

    @classmethod
    def _load_named(cls, text: str) -> SkipSet:
        try:
            known = Path(text).is_file()
        except (OSError, ValueError):  # too long, or with a null character: certainly no path
            known = False
        if not known:
            raise SkipSetError(
                f"skip set {_short(text)} is neither like 'a:3,5-8 f:1,3' nor a file; check it"
            )
        return cls.load(text)

    @classmethod
    def _from_json(cls, text: str, source: str) -> SkipSet:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SkipSetError(
                f"skip set in {source} is no JSON ({error}); write {_JSON_FORM}"
            ) from error
        if not isinstance(value, dict):
            raise SkipSetError(
                f"skip set in {source} is a {type(value).__name__}; write {_JSON_FORM}"
            )
        return cls._from_mapping(value, source)

    @classmethod
    def _from_mapping(cls, value: Mapping[str, object], source: str) -> SkipSet:
        unknown = sorted(str(key) for key in value if key not in ("attention", "mlp", "n_layer"))
        if unknown:
            raise SkipSetError(
                f"skip set in {source} has the unknown key {_short(unknown[0])}; write {_JSON_FORM}"
            )
        attention, mlp = (cast("Sequence[int]", value.get(key, ())) for key in ("attention", "mlp"))
        return cls(attention, mlp, cast("int | None", value.get("n_layer")))


_JSON_FORM = '{"attention": [...], "mlp": [...]}'


def count_layers(blocks: Iterable[Block]) -> int:
    """Count layers: one more than the largest layer number."""
    return max((block.layer for block in blocks), default=-1) + 1


def _layers(value: object, name: str, n_layer: int | None) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise SkipSetError(f"skip set has {name}={_short(value)}; pass a list of layer numbers")
    layers = tuple(sorted({_layer_number(item, name) for item in value}))
    if n_layer is not None and layers and layers[-1] >= n_layer:
        raise SkipSetError(
            f"skip set names layer {layers[-1]} in {name}, "
            f"the model has {n_layer}; use 0 to {n_layer - 1}"
        )
    return layers


def _layer_number(value: object, name: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise SkipSetError(f"skip set has {_short(value)} in {name}; layer numbers are integers")
    if not 0 <= value <= _MAX_LAYER:
        raise SkipSetError(f"skip set has {value} in {name}; layer numbers are 0 to {_MAX_LAYER}")
    return int(value)


def _ranges(numbers: str, text: str) -> Iterator[int]:
    for part in numbers.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MAX_LAYER:
            raise SkipSetError(
                f"skip set {_short(text)} has the bad range {part.strip()!r}; write it like 5-8"
            )
        yield from range(first, last + 1)


def _format(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _looks_like_text(value: str) -> bool:
    stripped = value.strip()
    return stripped.startswith("{") or stripped in ("", "none") or bool(_TEXT.fullmatch(stripped))


def _missing(layer: int, name: str, blocks: Sequence[Block]) -> str:
    here = [block.kind for block in blocks if block.layer == layer]
    if not here:
        n_layer = count_layers(blocks)
        return (
            f"skip set names layer {layer}, the model has {n_layer} layers; use a set made for it"
        )
    if name == "attention" and "mixer" in here:
        return f"skip set would skip layer {layer}, whose mixer keeps recurrent state; leave it out"
    return f"skip set names the {name} of layer {layer}, which has none; leave it out"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
