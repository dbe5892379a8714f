"""Cost of narrow batches, pyssd's CPU kernels against llama.cpp's, alternating in one run.

V(m) is the time of one pass over m tokens, all rows with logits, over that of one token. For real models, and for one
random model quantised to every weight type (then also GB/s of weights and GMAC/s). The memory bandwidth of the machine,
measured by dot products over large arrays in as many threads, is the limit of one token.

    python benchmarks/kernels.py [--models NAME ...] [--types Q4_K ...] [--cells 40 3000] [--rounds 5] [--out FILE]

Results are added to those in the file, so that a long run can be taken in pieces. `--variant avx2` builds the CPU backend
for lesser machines (under build/) and measures that one, in a process of its own, under its own key.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from variants import VARIANTS, measure_variant

from pyssd import kernels
from pyssd.loading import llama_lib as api, physical_cores
from pyssd.models import find_model

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPT = 512
FTYPES = {
    "Q4_K": api.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    "Q5_K": api.LLAMA_FTYPE_MOSTLY_Q5_K_S,
    "Q6_K": api.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": api.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q5_0": api.LLAMA_FTYPE_MOSTLY_Q5_0,
    "IQ4_NL": api.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "F16": api.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": api.LLAMA_FTYPE_MOSTLY_BF16,
}


class Runner:
    """One model in one context, decoded through llama.cpp's C API."""

    def __init__(self, path: Path, packed: bool, n_ctx: int, threads: int) -> None:
        with kernels.offered(packed, tied=True):
            started = time.perf_counter()
            params = api.llama_model_default_params()
            self.model = api.llama_model_load_from_file(str(path).encode(), params)
            self.load_seconds = time.perf_counter() - started
        context = api.llama_context_default_params()
        context.n_ctx = n_ctx
        context.n_threads = context.n_threads_batch = threads
        context.n_outputs_max = 64
        context.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.ctx = api.llama_init_from_model(self.model, context)
        if packed:
            invariant = api._lib.pyssd_invariant_set
            invariant.argtypes = [api.llama_context_p_ctypes, __import__("ctypes").c_bool]
            invariant(self.ctx, True)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(PROMPT, 0, 1)
        self.memory = api.llama_get_memory(self.ctx)

    def decode(self, n: int, at: int, all_rows: bool = True) -> float:
        """Seconds of a pass over n tokens at a position; the cells are dropped again by the next call."""
        api.llama_memory_seq_rm(self.memory, 0, at, -1)
        for i in range(n):
            self.batch.token[i] = (i * 7919 + 13 + at) % min(self.n_vocab, 30000)
            self.batch.pos[i] = at + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = all_rows or i == n - 1
        self.batch.n_tokens = n
        started = time.perf_counter()
        if api.llama_decode(self.ctx, self.batch) != 0:
            sys.exit("llama_decode failed")
        api.llama_synchronize(self.ctx)
        return time.perf_counter() - started

    def close(self) -> None:
        api.llama_batch_free(self.batch)
        api.llama_free(self.ctx)
        api.llama_model_free(self.model)


@contextmanager
def runners(path: Path, n_ctx: int, threads: int) -> Iterator[dict[str, Runner]]:
    pair = {
        "pyssd": Runner(path, True, n_ctx, threads),
        "upstream": Runner(path, False, n_ctx, threads),
    }
    try:
        yield pair
    finally:
        for runner in pair.values():
            runner.close()


def measure(
    path: Path, cells: int, rounds: int, threads: int, n_weights: int = 0
) -> dict[str, Any]:
    """V(m) of both kinds of kernels after `cells` tokens; medians of alternating passes."""
    with runners(path, max(cells, PROMPT) + 64, threads) as pair:
        for runner in pair.values():
            for at in range(0, cells, PROMPT):
                runner.decode(min(PROMPT, cells - at), at, all_rows=False)
        seconds: dict[str, dict[int, list[float]]] = {
            name: {width: [] for width in WIDTHS} for name in pair
        }
        for _ in range(rounds):
            for width in WIDTHS:
                for name, runner in pair.items():
                    runner.decode(width, cells)  # builds the graph
                    seconds[name][width] += [runner.decode(width, cells) for _ in range(2)]
        prompt: dict[str, list[float]] = {name: [] for name in pair}
        for _ in range(3):
            for name, runner in pair.items():
                prompt[name].append(runner.decode(PROMPT, 0, all_rows=False))
        median = {
            name: {width: statistics.median(values) for width, values in by_width.items()}
            for name, by_width in seconds.items()
        }
        spread = max(
            max(values) / min(values) - 1 for by in seconds.values() for values in by.values()
        )
        nbytes = api.llama_model_size(pair["upstream"].model)
        result: dict[str, Any] = {
            "cells": cells,
            "load_ratio": round(pair["pyssd"].load_seconds / pair["upstream"].load_seconds, 2),
            "ms": {
                name: {str(w): round(1e3 * s, 2) for w, s in by.items()}
                for name, by in median.items()
            },
            "V": {
                name: {str(w): round(s / by[1], 2) for w, s in by.items()}
                for name, by in median.items()
            },
            "one_token_speed": round(median["upstream"][1] / median["pyssd"][1], 3),
            "prompt_512_speed": round(
                statistics.median(prompt["upstream"]) / statistics.median(prompt["pyssd"]), 3
            ),
            "GBps_one_token": {
                name: round(1e-9 * nbytes / by[1], 1) for name, by in median.items()
            },
            "worst_spread": round(spread, 3),
        }
        if n_weights:
            result["GMACps_16"] = {
                name: round(1e-9 * n_weights * 16 / by[16]) for name, by in median.items()
            }
        return result


def random_model(folder: Path) -> tuple[Path, int]:
    """Write a random F16 llama whose matrices are as wide as a 1.5B's; returns it and the number of its weights."""
    n_embd, n_ff, n_layer, n_head, n_vocab = 1536, 8960, 4, 12, 4096
    rng = np.random.default_rng(0)
    path = folder / "random.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_rope_dimension_count(n_embd // n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(n_vocab)])
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types([gguf.TokenType.NORMAL] * n_vocab)

    n_weights = 0

    def matrix(name: str, rows: int, cols: int) -> None:
        nonlocal n_weights
        n_weights += rows * cols
        block = rng.standard_normal((rows, cols), np.float32) / np.sqrt(cols)
        writer.add_tensor(name, block.astype(np.float16))

    matrix("token_embd.weight", n_vocab, n_embd)
    matrix("output.weight", n_vocab, n_embd)
    n_weights -= n_vocab * n_embd  # the embedding is looked up, not multiplied
    writer.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    for i in range(n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(n_embd, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{name}.weight", n_embd, n_embd)
        matrix(f"blk.{i}.ffn_gate.weight", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_up.weight", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_down.weight", n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, n_weights


def quantize(source: Path, weight_type: str) -> Path:
    """Requantise a file so that all its matrices have one type."""
    out = source.with_name(f"{source.stem}-{weight_type}.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype = FTYPES[weight_type]
    params.pure = True
    params.nthread = physical_cores()
    params.allow_requantize = True
    if api.llama_model_quantize(str(source).encode(), str(out).encode(), params) != 0:
        sys.exit(f"quantising to {weight_type} failed")
    return out


def bandwidth(threads: int) -> float:
    """GB/s of reading memory with this many threads: the best of several sums over 1 GiB."""
    part = np.ones(2**30 // 8 // threads, np.float64)
    arrays = [part.copy() for _ in range(threads)]
    best = 0.0
    for _ in range(5):
        workers = [threading.Thread(target=np.dot, args=(array, array)) for array in arrays]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - started
        best = max(best, 1e-9 * part.nbytes * threads / seconds)
    return best


def add_results(path: Path, new: dict[str, Any]) -> None:
    """Write results into a file, beside those of other models, cells and types that it holds."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    models = old.get("models", {})
    for model, runs in new["models"].items():
        measured = {run["cells"] for run in runs}
        others = [run for run in models.get(model, []) if run["cells"] not in measured]
        models[model] = sorted(others + runs, key=lambda run: run["cells"])
    types = {**old.get("types", {}), **new["types"]}
    commands = old.get("commands", [])
    if new["commands"][0] not in commands:
        commands = [*commands, *new["commands"]]
    merged = {**old, **new, "commands": commands, "models": models, "types": types}
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name}, {result['cells']} cells: one token {result['one_token_speed']} x, "
        f"prompt {result['prompt_512_speed']} x, load {result['load_ratio']} x, "
        f"spread {result['worst_spread']}"
    )
    for kind in ("pyssd", "upstream"):
        row = " ".join(f"V({w})={v}" for w, v in result["V"][kind].items() if w != "1")
        rates = f"{result['GBps_one_token'][kind]} GB/s"
        if "GMACps_16" in result:
            rates += f", {result['GMACps_16'][kind]} GMAC/s at 16"
        print(f"  {kind:<9}{result['ms'][kind]['1']:8.2f} ms  {row}  {rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--models", nargs="*", default=["qwen2.5-coder-1.5b", "smollm2-135m", "gemma3-270m"]
    )
    parser.add_argument(
        "--requantize", nargs="*", default=[], help="types to requantise the first model to"
    )
    parser.add_argument("--types", nargs="*", default=list(FTYPES))
    parser.add_argument("--cells", nargs="*", type=int, default=[40, 3000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.json"))
    parser.add_argument("--variant", choices=tuple(VARIANTS), help="another instruction set")
    args = parser.parse_args()
    if args.variant:
        measure_variant(args.variant, args.out)
        return
    results: dict[str, Any] = {
        "commands": [" ".join(["python", *sys.argv])],
        "instruction_set": kernels.instruction_set(),
        "threads": args.threads,
        "memory_GBps": round(bandwidth(args.threads), 1),
        "models": {},
        "types": {},
    }
    print(
        f"{results['instruction_set']}, {args.threads} threads, memory {results['memory_GBps']} GB/s"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {model: find_model(model) for model in args.models}
        for weight_type in args.requantize:
            source = paths[args.models[0]]
            (folder / source.name).symlink_to(source)
            paths[f"{args.models[0]} {weight_type}"] = quantize(folder / source.name, weight_type)
        for model, path in paths.items():
            for cells in args.cells:
                result = measure(path, cells, args.rounds, args.threads)
                results["models"].setdefault(model, []).append(result)
                add_results(args.out, results)
                show(model, result)
        if args.types:
            source, n_weights = random_model(folder)
            for weight_type in args.types:
                path = source if weight_type == "F16" else quantize(source, weight_type)
                result = measure(path, 40, args.rounds, args.threads, n_weights)
                results["types"][weight_type] = result
                add_results(args.out, results)
                show(weight_type, result)
                if path != source:
                    path.unlink()


if __name__ == "__main__":
    main()
