"""A model file whose chosen blocks compute nothing: the oracle for skipping.

A block whose output projection (and output bias) is zero adds zero to the residual stream, so the file computes what the
original computes with that block skipped. The bytes are patched in place at the tensors' offsets: that works for every
architecture and every tensor type in which zero bytes decode to zeros, which is checked per type.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

# what a block adds to the stream last: a matrix product and, in some architectures, a bias
ATTENTION_OUTPUT = r"(?:attn_output|attn_output_b|vis_attn_output)"
# experts of old files are numbered tensors (ffn_down.3); dense, routed, shared and chunk experts may stand side by side
FFN_OUTPUT = r"(?:ffn_down|ffn_down\.\d+|ffn_down_exps|ffn_down_shexp|ffn_down_chexps|vis_down)"
_NAME = re.compile(rf"blk\.(\d+)\.(?:({ATTENTION_OUTPUT})|({FFN_OUTPUT}))\.(?:weight|bias)")


@dataclass(frozen=True)
class TensorSpan:
    """One tensor that ends a block."""

    name: str
    layer: int
    kind: str
    offset: int
    nbytes: int
    type: gguf.GGMLQuantizationType


def output_tensors(path: Path) -> tuple[TensorSpan, ...]:
    """List the tensors that end an attention ("attn") or FFN ("ffn") block of the file."""
    status = path.stat()
    return _output_tensors(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _output_tensors(path: Path, _size: int, _mtime: int) -> tuple[TensorSpan, ...]:
    spans = []
    for tensor in gguf.GGUFReader(path).tensors:
        match = _NAME.fullmatch(tensor.name)
        if match:
            kind = "attn" if match[2] else "ffn"
            span = (int(tensor.data_offset), int(tensor.n_bytes), tensor.tensor_type)
            spans.append(TensorSpan(tensor.name, int(match[1]), kind, *span))
    return tuple(spans)


def zero_blocks(
    src: Path, dst: Path, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()
) -> list[str]:
    """Write a copy of src in which the output projections of the named layers' blocks are zero.

    Args:
        src: any GGUF file, quantised or not.
        dst: the file to write; replaced when present.
        attention: layers whose attention is to add nothing.
        mlp: layers whose FFN (all experts included) is to add nothing.
    Returns:
        The names of the tensors that were zeroed.
    Raises:
        ValueError: a named layer has no such block, or zero bytes do not decode to zero in a tensor's type.
    """
    wanted = {("attn", layer) for layer in attention} | {("ffn", layer) for layer in mlp}
    spans = [span for span in output_tensors(src) if (span.kind, span.layer) in wanted]
    missing = wanted - {(span.kind, span.layer) for span in spans}
    if missing:
        raise ValueError(f"{src.name} has no output tensor for {sorted(missing)}")
    for span in spans:
        if not zero_bytes_decode_to_zero(span.type):
            raise ValueError(f"zero bytes do not mean zero in {span.name} ({span.type.name})")
    shutil.copyfile(src, dst)
    with dst.open("r+b") as out:
        for span in spans:
            out.seek(span.offset)
            out.write(bytes(span.nbytes))
    return [span.name for span in spans]


@functools.cache
def zero_bytes_decode_to_zero(kind: gguf.GGMLQuantizationType) -> bool:
    """Tell whether a run of zero bytes is a run of zeros in this tensor type."""
    _, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    values = gguf.quants.dequantize(np.zeros((1, 4 * block_nbytes), np.uint8), kind)
    return not np.any(values)
