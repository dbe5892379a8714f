"""Random GGUF models of a few megabytes, written with the gguf package: no download, one per residual structure.

The weights are scaled so that every block changes the output noticeably, the logits are neither flat nor one-hot, and
attention looks at single tokens rather than at averages; a bug in any block then shows in the logits. Tokenizers are
minimal but complete: any text can be tokenised and comes back unchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tiny_vocab import Vocab, add_vocab, bpe_vocab, spm_vocab, toy_vocab
from zeroed import zero_blocks

__all__ = ["BLOCK_COUNTS", "FAMILIES", "Shape", "build", "build_lora", "build_toy", "zero_blocks"]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model. head size is n_embd / n_head: 64 by default, which GPU attention kernels support."""

    n_layer: int = 4
    n_embd: int = 128
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 256
    n_vocab: int = 512
    n_ctx: int = 4096
    n_expert: int = 0
    n_expert_used: int = 0
    n_window: int = 0  # sliding window in cells
    window_period: int = 3  # every period-th layer sees the whole context
    logit_std: float = 3.0
    softcap: float = 0.0  # bound of the logits' tanh

    @property
    def n_kv(self) -> int:
        """Width of a layer's K (and V)."""
        return self.n_embd // self.n_head * self.n_head_kv


class TinyWriter:
    """A GGUFWriter that draws its tensors: deterministic per (seed, name), so families share weights where they can."""

    def __init__(self, path: Path, arch: str, shape: Shape, seed: int, weight_type: str) -> None:
        self.gguf = gguf.GGUFWriter(path, arch)
        self.arch = arch
        self.shape = shape
        self.seed = seed
        self.type = gguf.GGMLQuantizationType[weight_type]

    def draw(self, name: str, *dims: int) -> Array:
        """Return standard normal numbers that depend on the seed and the name alone."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return rng.standard_normal(dims, dtype=np.float32)

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0, experts: int = 0) -> None:
        """Add a weight [n_out, n_in] (or one per expert) of the model's weight type, variance-preserving for gain 1."""
        dims = (experts, n_out, n_in) if experts else (n_out, n_in)
        self.weight(f"{name}.weight", self.draw(name, *dims) * np.float32(gain / n_in**0.5))

    def weight(self, name: str, values: Array) -> None:
        """Add a matrix in the model's weight type."""
        if self.type == gguf.GGMLQuantizationType.F32:
            self.gguf.add_tensor(name, values)
        else:
            packed = gguf.quants.quantize(values, self.type)
            self.gguf.add_tensor(name, packed, raw_dtype=self.type)

    def router(self, name: str, n_expert: int) -> None:
        """Add an expert router; llama.cpp keeps these in F32 whatever the file's type."""
        n_embd = self.shape.n_embd
        dims = (n_expert, n_embd) if n_expert else (n_embd,)
        self.gguf.add_tensor(f"{name}.weight", self.draw(name, *dims) / np.float32(n_embd**0.5))

    def norm(self, name: str, size: int, *, gain: float = 1.0, bias: bool = False) -> None:
        """Add the scale (and shift) of a normalisation."""
        self.gguf.add_tensor(f"{name}.weight", np.float32(gain) * (1 + 0.1 * self.draw(name, size)))
        if bias:
            self.bias(name, size)

    def bias(self, name: str, size: int) -> None:
        """Add a bias large enough to be missed when it is forgotten."""
        self.gguf.add_tensor(f"{name}.bias", np.float32(0.2) * self.draw(name + ".bias", size))


def _attention(w: TinyWriter, blk: str, *, fused: bool = False, bias: bool = False) -> None:
    s = w.shape
    if fused:
        w.matrix(f"{blk}.attn_qkv", s.n_embd + 2 * s.n_kv, s.n_embd, gain=1.5)
        if bias:
            w.bias(f"{blk}.attn_qkv", s.n_embd + 2 * s.n_kv)
    else:
        # q and k above unit variance: scores spread, so that attention picks tokens
        w.matrix(f"{blk}.attn_q", s.n_embd, s.n_embd, gain=1.6)
        w.matrix(f"{blk}.attn_k", s.n_kv, s.n_embd, gain=1.6)
        w.matrix(f"{blk}.attn_v", s.n_kv, s.n_embd)
    w.matrix(f"{blk}.attn_output", s.n_embd, s.n_embd)
    if bias:
        w.bias(f"{blk}.attn_output", s.n_embd)


def _gated_ffn(w: TinyWriter, blk: str, suffix: str = "", experts: int = 0) -> None:
    s = w.shape
    w.matrix(f"{blk}.ffn_gate{suffix}", s.n_ff, s.n_embd, experts=experts)
    w.matrix(f"{blk}.ffn_up{suffix}", s.n_ff, s.n_embd, experts=experts)
    w.matrix(f"{blk}.ffn_down{suffix}", s.n_embd, s.n_ff, gain=1.5, experts=experts)


def _plain_ffn(w: TinyWriter, blk: str, *, bias: bool) -> None:
    s = w.shape
    w.matrix(f"{blk}.ffn_up", s.n_ff, s.n_embd)
    w.matrix(f"{blk}.ffn_down", s.n_embd, s.n_ff, gain=1.5)
    if bias:
        w.bias(f"{blk}.ffn_up", s.n_ff)
        w.bias(f"{blk}.ffn_down", s.n_embd)


def _llama(w: TinyWriter, blk: str) -> None:
    w.norm(f"{blk}.attn_norm", w.shape.n_embd)
    _attention(w, blk)
    w.norm(f"{blk}.ffn_norm", w.shape.n_embd)
    _gated_ffn(w, blk)


def _qwen3moe(w: TinyWriter, blk: str) -> None:
    s = w.shape
    w.norm(f"{blk}.attn_norm", s.n_embd)
    _attention(w, blk)
    for part in "qk":
        w.norm(f"{blk}.attn_{part}_norm", s.n_embd // s.n_head, gain=1.5)
    w.norm(f"{blk}.ffn_norm", s.n_embd)
    w.router(f"{blk}.ffn_gate_inp", s.n_expert)
    _gated_ffn(w, blk, "_exps", s.n_expert)


def _qwen2moe(w: TinyWriter, blk: str) -> None:
    s = w.shape
    w.norm(f"{blk}.attn_norm", s.n_embd)
    _attention(w, blk)
    w.norm(f"{blk}.ffn_norm", s.n_embd)
    w.router(f"{blk}.ffn_gate_inp", s.n_expert)
    w.router(f"{blk}.ffn_gate_inp_shexp", 0)
    _gated_ffn(w, blk, "_exps", s.n_expert)
    _gated_ffn(w, blk, "_shexp")


def _gemma3(w: TinyWriter, blk: str) -> None:
    s = w.shape
    w.norm(f"{blk}.attn_norm", s.n_embd)
    _attention(w, blk)
    for part in "qk":
        w.norm(f"{blk}.attn_{part}_norm", s.n_embd // s.n_head, gain=1.5)
    w.norm(f"{blk}.post_attention_norm", s.n_embd, gain=0.5)
    w.norm(f"{blk}.ffn_norm", s.n_embd)
    _gated_ffn(w, blk)
    w.norm(f"{blk}.post_ffw_norm", s.n_embd, gain=0.5)


def _olmo2(w: TinyWriter, blk: str) -> None:
    s = w.shape
    _attention(w, blk)
    w.norm(f"{blk}.attn_q_norm", s.n_embd, gain=1.5)
    w.norm(f"{blk}.attn_k_norm", s.n_kv, gain=1.5)
    w.norm(f"{blk}.post_attention_norm", s.n_embd, gain=0.5)
    _gated_ffn(w, blk)
    w.norm(f"{blk}.post_ffw_norm", s.n_embd, gain=0.5)


def _gptneox(w: TinyWriter, blk: str) -> None:
    w.norm(f"{blk}.attn_norm", w.shape.n_embd, bias=True)
    _attention(w, blk, fused=True, bias=True)
    w.norm(f"{blk}.ffn_norm", w.shape.n_embd, bias=True)
    _plain_ffn(w, blk, bias=True)


def _falcon(w: TinyWriter, blk: str) -> None:
    w.norm(f"{blk}.attn_norm", w.shape.n_embd, bias=True)
    _attention(w, blk, fused=True)
    _plain_ffn(w, blk, bias=False)


def _mamba(w: TinyWriter, blk: str) -> None:
    n_embd, n_inner, n_state, n_rank = w.shape.n_embd, 2 * w.shape.n_embd, 16, 8
    w.norm(f"{blk}.attn_norm", n_embd)
    w.matrix(f"{blk}.ssm_in", 2 * n_inner, n_embd)
    w.gguf.add_tensor(f"{blk}.ssm_conv1d.weight", w.draw(f"{blk}.ssm_conv1d", n_inner, 4) / 2)
    w.bias(f"{blk}.ssm_conv1d", n_inner)
    w.matrix(f"{blk}.ssm_x", n_rank + 2 * n_state, n_inner)
    w.matrix(f"{blk}.ssm_dt", n_inner, n_rank)
    w.bias(f"{blk}.ssm_dt", n_inner)
    w.gguf.add_tensor(f"{blk}.ssm_a", -np.abs(w.draw(f"{blk}.ssm_a", n_inner, n_state)))
    w.gguf.add_tensor(f"{blk}.ssm_d", w.draw(f"{blk}.ssm_d", n_inner))
    w.matrix(f"{blk}.ssm_out", n_embd, n_inner)


@dataclass(frozen=True)
class Family:
    """How one architecture's file is written."""

    layer: Callable[[TinyWriter, str], None]
    shape: Shape = Shape()
    tokenizer: str = "gpt2"  # or "llama" (SentencePiece with byte tokens)
    layer_norm: bool = False  # LayerNorm with bias instead of RMS
    blocks: tuple[str, ...] = ("attn", "ffn")  # of one layer


_MOE = Shape(n_expert=4, n_expert_used=2, n_ff=128)
FAMILIES = {
    "llama": Family(_llama, tokenizer="llama"),
    "qwen3moe": Family(_qwen3moe, _MOE),
    "gemma3": Family(_gemma3, Shape(n_layer=6, n_window=32), tokenizer="llama"),
    "gptneox": Family(_gptneox, Shape(n_head_kv=2), layer_norm=True),
    "olmo2": Family(_olmo2),
    "falcon": Family(_falcon, layer_norm=True),
    "qwen2moe": Family(_qwen2moe, _MOE),
    "mamba": Family(_mamba, blocks=("mixer",)),
}
BLOCK_COUNTS = {name: f.shape.n_layer * len(f.blocks) for name, f in FAMILIES.items()}


def build(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    weight_type: str = "F32",
    tied: bool = False,
    **sizes: float,
) -> Path:
    """Write a random model and return its path.

    Args:
        path: the file to write.
        family: a key of FAMILIES.
        seed: another seed gives other weights.
        weight_type: type of the matrices, as gguf names it: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, ...
        tied: leave the output matrix out, so that llama.cpp uses the token embeddings.
        sizes: fields of Shape to change.
    """
    spec = FAMILIES[family]
    shape = replace(spec.shape, **sizes)  # type: ignore[arg-type]
    tokens = spm_vocab(shape.n_vocab) if spec.tokenizer == "llama" else bpe_vocab(shape.n_vocab)
    return _write(path, family, spec, shape, seed, weight_type, tied, tokens)


def build_toy(path: Path, *, seed: int = 0, n_vocab: int = 24, logit_std: float = 1.5) -> Path:
    """Write a llama with a vocabulary of n_vocab (16 to 32) tokens: every token is seen often, so statistics are sharp.

    Token 0 ends the text; the others are single characters, with which a grammar can spell lists and small objects.
    """
    shape = Shape(n_vocab=n_vocab, logit_std=logit_std, n_layer=4, n_embd=64, n_head=2, n_ff=128)
    return _write(path, "llama", FAMILIES["llama"], shape, seed, "F32", False, toy_vocab(n_vocab))


def build_lora(path: Path, model: Path, *, seed: int = 0, rank: int = 4, gain: float = 0.3) -> Path:
    """Write a random LoRA adapter for the attention and FFN matrices of a model made by build."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in reader.tensors:
        if (
            tensor.name.startswith("blk.")
            and len(tensor.shape) == 2
            and "gate_inp" not in tensor.name
        ):
            n_in, n_out = (int(size) for size in tensor.shape)
            rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
            a = rng.standard_normal((rank, n_in), dtype=np.float32) / np.float32(n_in**0.5)
            b = rng.standard_normal((n_out, rank), dtype=np.float32) * np.float32(gain / rank**0.5)
            writer.add_tensor(f"{tensor.name}.lora_a", a)
            writer.add_tensor(f"{tensor.name}.lora_b", b)
    _finish(writer)
    return path


def _write(
    path: Path,
    arch: str,
    spec: Family,
    shape: Shape,
    seed: int,
    weight_type: str,
    tied: bool,
    vocab: Vocab,
) -> Path:
    w = TinyWriter(path, arch, shape, seed, weight_type)
    g, n_head = w.gguf, 0 if spec.blocks == ("mixer",) else shape.n_head
    g.add_name(f"random {arch}")
    g.add_context_length(shape.n_ctx)
    g.add_embedding_length(shape.n_embd)
    g.add_block_count(shape.n_layer)
    g.add_feed_forward_length(shape.n_ff if n_head else 0)
    g.add_head_count(n_head)
    g.add_head_count_kv(shape.n_head_kv if n_head else 0)
    g.add_layer_norm_eps(1e-5) if spec.layer_norm else g.add_layer_norm_rms_eps(1e-5)
    if arch == "gptneox":
        g.add_parallel_residual(True)
        g.add_rope_dimension_count(shape.n_embd // shape.n_head // 2)
    if shape.n_window:
        g.add_sliding_window(shape.n_window)
        g.add_uint32(f"{arch}.attention.sliding_window_pattern", shape.window_period)
    if shape.n_expert:
        g.add_expert_count(shape.n_expert)
        g.add_expert_used_count(shape.n_expert_used)
        g.add_expert_feed_forward_length(shape.n_ff)
        g.add_expert_shared_feed_forward_length(shape.n_ff)
    if shape.softcap:
        g.add_final_logit_softcapping(shape.softcap)
    if not n_head:
        g.add_ssm_conv_kernel(4)
        g.add_ssm_inner_size(2 * shape.n_embd)
        g.add_ssm_state_size(16)
        g.add_ssm_time_step_rank(8)
    add_vocab(g, vocab)

    embedding = w.draw("token_embd", shape.n_vocab, shape.n_embd)
    scale = shape.n_embd**-0.5 if arch == "gemma3" or tied else 1.0  # gemma multiplies by the root
    scale *= shape.logit_std if tied else 1.0
    w.weight("token_embd.weight", embedding * np.float32(scale))
    w.norm("output_norm", shape.n_embd, bias=spec.layer_norm)
    if not tied:
        head = w.draw("output", shape.n_vocab, shape.n_embd) * np.float32(
            shape.logit_std / shape.n_embd**0.5
        )
        # control tokens stay unlikely, so that a text does not end after a few tokens
        head[: vocab.n_control] = 0
        w.weight("output.weight", head)
    for layer in range(shape.n_layer):
        spec.layer(w, f"blk.{layer}")
    _finish(g)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
