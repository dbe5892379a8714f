"""The skip oracle over every architecture llama.cpp can make a file of: ``make archs``.

`test-llama-archs -o DIR` writes a small random model per architecture variant. For each file, in a process of its own so
that a crash is counted and not fatal, the logits under skip sets are compared with the stock graph on a copy whose output
projections are zero. Every file must hold, or be refused with a reason; the number of blocks must be the one in
tests/arch_blocks.json. Prints a table, writes benchmarks/results/archs.json, exits 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # of the largest |logit|
N_TOKENS = 40  # more than the window of 32 in these files
SEED = 42
MIN_HOLD = 115
CHILD_SECONDS = 300


def measure(path: Path) -> dict[str, Any]:
    """Run the oracle on one file; the result is what the parent process reports."""
    sys.path.insert(0, str(ROOT / "tests"))
    import numpy as np
    from lowlevel import KINDS, Hook, Opened, random_tokens, skip_bits, stock_logits
    from zeroed import output_tensors, zero_blocks

    try:
        opened = Opened(path, n_ctx=256, n_ubatch=64)
    except RuntimeError as error:
        return {"result": "refused", "reason": str(error)}
    with opened:
        tokens = random_tokens(N_TOKENS, opened.n_vocab, seed=SEED)
        try:
            hook = Hook(opened)
        except RuntimeError as error:
            return {"result": "refused", "reason": str(error)}
        with hook:
            try:
                blocks = hook.blocks()
            except RuntimeError as error:
                return {"result": "refused", "reason": str(error)}
            row: dict[str, Any] = {
                "blocks": {kind: sum(b[2] == n for b in blocks) for n, kind in enumerate(KINDS)},
                "rewind": hook.rewind_refusal() or "possible",
                "sets": 0,
                "worst": 0.0,  # distance between skipping and zeroing, in units of the largest |logit|
                "least_effect": None,  # of any skip set on the logits, in the same unit: 0 would test nothing
            }
            hook.plan(None)
            full = hook.logits(tokens)
            n_nodes = hook.n_nodes()
            named = {(span.kind, span.layer) for span in output_tensors(path)}
            found = {
                (KINDS[kind], layer) for _, layer, kind, _, _ in blocks if KINDS[kind] != "mixer"
            }
            if not found <= named:
                return {
                    **row,
                    "result": "failed",
                    "reason": f"blocks without an output tensor: {sorted(found - named)}",
                }
            if not found:
                return {
                    **row,
                    "result": "refused",
                    "reason": "every block keeps recurrent state: none can be skipped",
                }
            for attention, mlp in skip_sets(found):
                with tempfile.TemporaryDirectory(prefix="pyssd-archs-") as scratch:
                    zeroed = Path(scratch) / "zeroed.gguf"
                    zero_blocks(path, zeroed, attention=attention, mlp=mlp)
                    expected = stock_logits(zeroed, tokens, n_ctx=256)
                hook.plan(skip_bits(blocks, attention=attention, mlp=mlp))
                got = hook.logits(tokens)
                largest = float(np.max(np.abs(expected)))
                off = (
                    float(np.max(np.abs(got - expected)) / largest)
                    if largest
                    else float(np.max(np.abs(got)))
                )
                row["sets"] += 1
                # a NaN compares false: it must not pass
                row["worst"] = off if not off <= row["worst"] else row["worst"]
                effect = float(np.max(np.abs(got - full)) / np.max(np.abs(full)))
                row["least_effect"] = min(effect, row["least_effect"] or effect)
                # some random blocks change the logits by 1e-5 only: there the tolerance alone would test nothing
                if not (off <= TOLERANCE and off <= effect / 10 and effect > 0):
                    reason = f"a:{attention} f:{mlp} is off by {off:.1e}, effect {effect:.1e}"
                    return {**row, "result": "failed", "reason": reason}
                if hook.n_nodes() >= n_nodes:
                    return {
                        **row,
                        "result": "failed",
                        "reason": f"a:{attention} f:{mlp} does not shorten the graph",
                    }
    return {**row, "result": "holds"}


def skip_sets(found: set[tuple[str, int]]) -> list[tuple[list[int], list[int]]]:
    """Every single block, all of a kind, everything, and four random sets."""
    import numpy as np

    blocks = sorted(found)
    chosen: list[list[tuple[str, int]]] = [[block] for block in blocks]
    chosen += [[b for b in blocks if b[0] == kind] for kind in ("attn", "ffn")]
    chosen.append(blocks)
    rng = np.random.default_rng(SEED)
    for _ in range(4):
        picks = rng.permutation(len(blocks))[: rng.integers(1, len(blocks) + 1)]
        chosen.append([blocks[int(pick)] for pick in sorted(picks)])
    split = [
        ([n for k, n in c if k == "attn"], [n for k, n in c if k == "ffn"]) for c in chosen if c
    ]
    return list({json.dumps(pair): pair for pair in split}.values())


def in_child(path: Path) -> dict[str, Any]:
    """Measure one file in a subprocess."""
    command = [sys.executable, __file__, "--one", str(path)]
    env = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"result": "crashed", "reason": f"no answer within {CHILD_SECONDS} s"}
    if done.returncode < 0:
        said = (done.stderr.strip().splitlines() or [""])[-1]
        return {
            "result": "crashed",
            "reason": f"{signal.Signals(-done.returncode).name}: {said[:200]}",
        }
    if done.returncode != 0:
        return {
            "result": "failed",
            "reason": (done.stderr.strip().splitlines() or ["no message"])[-1][:200],
        }
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def against_table(name: str, row: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Turn a wrong block count, or an unexpected refusal, into a failure."""
    expected = table.get(name)
    if expected is None:
        return {
            **row,
            "result": "failed",
            "reason": f"not in tests/arch_blocks.json ({row.get('reason', row['result'])})",
        }
    if row["result"] == "refused" and expected != "refused":
        return {
            **row,
            "result": "failed",
            "reason": f"refused, {expected} expected: {row['reason']}",
        }
    if row["result"] == "holds" and row["blocks"] != expected:
        return {**row, "result": "failed", "reason": f"blocks {row['blocks']}, {expected} expected"}
    return row


def generate(program: Path, folder: Path) -> None:
    """Let test-llama-archs write its models."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [str(program), "-s", str(SEED), "-o", str(folder)], check=True, stdout=subprocess.DEVNULL
    )


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="The skip oracle over all architectures.")
    parser.add_argument("--generator", type=Path, default=ROOT / "build/peers/bin/test-llama-archs")
    parser.add_argument(
        "--files", type=Path, help="folder of files that the generator wrote before"
    )
    parser.add_argument("--only", default="", help="run only files whose name contains this")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/archs.json")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options.one)) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="pyssd-archs-") as scratch:
        folder = options.files or Path(scratch)
        if not options.files:
            if not options.generator.is_file():
                sys.stderr.write(
                    f"error: {options.generator} is not there; run `make peers` first\n"
                )
                return 2
            generate(options.generator, folder)
        paths = sorted(path for path in folder.glob("*.gguf") if options.only in path.stem)
        table = json.loads((ROOT / "tests/arch_blocks.json").read_text(encoding="utf-8"))
        rows: dict[str, Any] = {}
        for path in paths:
            row = rows[path.stem] = against_table(path.stem, in_child(path), table)
            counts = "/".join(
                str(row.get("blocks", {}).get(kind, "-")) for kind in ("attn", "ffn", "mixer")
            )
            note = (
                row.get("reason")
                or f"{row['sets']} sets, worst {row['worst']:.0e}; rewind {row['rewind']}"
            )
            sys.stdout.write(f"{path.stem:28} {row['result']:8} {counts:8} {note}\n")
            sys.stdout.flush()
    tally = Counter(row["result"] for row in rows.values())
    missing = [] if options.only else sorted(set(table) - set(rows))
    summary = {key: tally.get(key, 0) for key in ("holds", "refused", "failed", "crashed")}
    sys.stdout.write(
        f"{len(rows)} files: " + ", ".join(f"{n} {key}" for key, n in summary.items()) + "\n"
    )
    if missing:
        sys.stdout.write(f"in the table, but not written by the generator: {', '.join(missing)}\n")
    if options.only:
        return 1 if summary["failed"] or summary["crashed"] else 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"summary": summary, "files": rows}, indent=1) + "\n", encoding="utf-8"
    )
    return (
        0
        if summary["holds"] >= MIN_HOLD and not (summary["failed"] or summary["crashed"] or missing)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
