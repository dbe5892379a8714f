"""Show a model and what speculation can do with it: blocks, devices, measured costs, libraries in use, refusals with reason.

Costs come from the cost cache; what is not in it yet is measured, which takes up to a second and a half.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyssd.cli import options, output

if TYPE_CHECKING:
    from pyssd._core import Session
    from pyssd.llama import Llama
    from pyssd.skipset import Block

NAME = "info"
HELP = "show a model, the libraries in use and what speculation can do"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    options.add_model(parser, n_ctx=512)
    parser.add_argument(
        "--plan",
        metavar="SET",
        help="count the graph nodes of a draft with this skip set ('none' = empty)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.plan is not None:
        from pyssd.skipset import SkipSet

        SkipSet.of(args.plan)  # a typing error is reported before the model loads
    with options.load(args) as llm:
        facts = {
            **model_facts(llm),
            **library_facts(),
            "speculation": speculation_facts(llm, exact=bool(args.exact)),
            "costs": cost_facts(llm, exact=bool(args.exact)),
        }
        if args.plan is not None:
            facts["plan"] = plan_facts(llm, args.plan)
        blocks = llm.blocks
    if args.json:
        output.write_json(facts)
    else:
        for line in _lines(facts, blocks):
            print(line)
    return 0


def model_facts(llm: Llama) -> dict[str, Any]:
    """Return what the file is."""
    from pyssd.model_file import check_model_file

    metadata = llm.metadata
    architecture = metadata.get("general.architecture", "")
    return {
        "model": str(llm.model_path),
        "name": metadata.get("general.name"),
        "architecture": architecture,
        "n_layer": _number(metadata.get(f"{architecture}.block_count")),
        "n_embd": llm.n_embd(),
        "n_vocab": llm.n_vocab(),
        "n_ctx_train": _number(metadata.get(f"{architecture}.context_length")),
        "chat_template": "tokenizer.chat_template" in metadata,
        "weight_types": sorted(check_model_file(llm.model_path).weight_types),
        "blocks": [
            {
                "index": b.index,
                "layer": b.layer,
                "kind": b.kind,
                "nbytes": b.nbytes,
                "device": b.device,
            }
            for b in llm.blocks
        ],
    }


def session_of(llm: Llama) -> Session:
    """Return the object's session.

    Raises:
        UnsupportedModelError: it has none, because the model cannot generate text.
    """
    from pyssd.errors import UnsupportedModelError

    session: Session | None = llm._session
    if session is None:
        raise UnsupportedModelError("this model does not generate text; use one that does")
    return session


def library_facts() -> dict[str, Any]:
    """Return versions, and the file of every library that was loaded."""
    import pyssd
    from pyssd import _loader

    import llama_cpp

    loaded = _loader.libraries()
    return {
        "pyssd": pyssd.__version__,
        "llama_cpp": llama_cpp.__version__,
        "ggml": loaded.ggml,
        "libraries": {name: str(path) for name, path in loaded.files.items()},
    }


def speculation_facts(llm: Llama, *, exact: bool) -> dict[str, Any]:
    """Return what speculation can do with this model here, and why not more."""
    refusal = llm._no_speculation or None
    skippable = [block for block in llm.blocks if block.kind != "mixer"] if refusal is None else []
    return {
        "possible": refusal is None,
        "reason": refusal or "the model's memory can drop rejected drafts",
        "skippable_blocks": len(skippable),
        "skippable_nbytes": sum(block.nbytes for block in skippable),
        "kernels": kernel_facts(llm, exact=exact),
        "exactness": {"level": llm.exactness.level, "reason": llm.exactness.reason},
    }


def kernel_facts(llm: Llama, *, exact: bool) -> dict[str, Any]:
    """Return which CPU kernels compute the products, and how many bytes of weights of each type lie in which buffer."""
    from pyssd import kernels

    session = llm._session
    weights: dict[str, int] = {}
    for _, weight_type, buffer, nbytes in session.weights() if session is not None else []:
        weights[f"{weight_type} in {buffer}"] = (
            weights.get(f"{weight_type} in {buffer}", 0) + nbytes
        )
    packed = f"pyssd ({kernels.instruction_set()})"
    upstream = "upstream, reference mode" if exact else "upstream"
    return {"cpu": packed if llm._packed else upstream, "weights": weights}


def cost_facts(llm: Llama, *, exact: bool) -> dict[str, Any] | None:
    """Return what passes and blocks cost here (CostModel.rows), in seconds; None where the model cannot speculate."""
    from pyssd.cost_cache import cost_settings, load_costs

    if llm._no_speculation:
        return None
    return load_costs(
        session_of(llm),
        llm.blocks,
        model_path=llm.model_path,
        n_vocab=llm.n_vocab(),
        n_ctx=llm.n_ctx(),
        settings=cost_settings(llm, exact=exact),
    ).rows()


def plan_facts(llm: Llama, text: str) -> dict[str, Any]:
    """Return the size of the draft's graph with a skip set, and that of the target's graph for one token.

    Raises:
        UnsupportedModelError: this model cannot speculate.
        SkipSetError: the set does not fit the model.
    """
    from pyssd.errors import UnsupportedModelError
    from pyssd.skipset import SkipSet

    if llm._no_speculation:
        raise UnsupportedModelError(
            f"--plan needs speculation, which is off here: {llm._no_speculation}"
        )
    skip_set = SkipSet.of(text, llm.blocks)
    bits = skip_set.bits(llm.blocks)
    session = session_of(llm)
    token = np.zeros(1, np.int32)
    session.rewind(0)
    session.prefill(token)
    session.set_skip(bits)
    session.draft(0, 0, 1)
    nodes = session.graph_nodes()
    return {
        "skip_set": str(skip_set),
        "skipped_blocks": int(bits.sum()),
        "draft_nodes": nodes["draft"],
        "target_nodes": nodes["target"],
    }


def _lines(facts: dict[str, Any], blocks: Sequence[Block]) -> list[str]:
    speculation = facts["speculation"]
    kinds = {kind: sum(block.kind == kind for block in blocks) for kind in ("attn", "ffn", "mixer")}
    lines = [
        f"model         {facts['model']}",
        f"name          {facts['name'] or '-'}",
        f"architecture  {facts['architecture']}, {facts['n_layer']} layers, width {facts['n_embd']}, "
        f"vocabulary {facts['n_vocab']}, trained for {facts['n_ctx_train']} tokens",
        f"weights       {', '.join(facts['weight_types'])}",
        f"chat template {'yes' if facts['chat_template'] else 'no'}",
        f"blocks        {len(blocks)}: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count),
    ]
    lines += [f"  {'index':>5} {'layer':>5}  {'kind':<5} {'size':>10}  device"] if blocks else []
    lines += [
        f"  {b.index:>5} {b.layer:>5}  {b.kind:<5} {output.size(b.nbytes):>10}  {b.device}"
        for b in blocks
    ]
    lines.append(
        f"libraries     pyssd {facts['pyssd']}, llama_cpp {facts['llama_cpp']}, ggml {facts['ggml']}"
    )
    lines += [f"  {name:<12} {path}" for name, path in facts["libraries"].items()]
    state = "possible" if speculation["possible"] else "off"
    lines += [
        f"speculation   {state}: {speculation['reason']}",
        f"skippable     {speculation['skippable_blocks']} blocks, {output.size(speculation['skippable_nbytes'])}",
        f"kernels       {speculation['kernels']['cpu']}",
        *(
            f"  {where:<24} {output.size(nbytes)}"
            for where, nbytes in speculation["kernels"]["weights"].items()
        ),
        f"exactness     level {speculation['exactness']['level']}: {speculation['exactness']['reason']}",
    ]
    if facts["costs"] is not None:
        lines += _cost_lines(facts["costs"])
    if plan := facts.get("plan"):
        lines.append(
            f"plan          {plan['skip_set']}: {plan['skipped_blocks']} blocks skipped, draft graph "
            f"{plan['draft_nodes']} nodes, target graph {plan['target_nodes']} nodes"
        )
    return lines


def _cost_lines(costs: dict[str, Any]) -> list[str]:
    if not costs["measured"]:
        return ["costs         could not be measured here"]
    verify = {int(width): seconds for width, seconds in costs["verify"].items()}
    per_cell = {int(width): seconds for width, seconds in costs["verify_per_cell"].items()}
    lines = [
        "costs         a verify pass of each width, all rows with logits; relative to one row",
        *(
            f"  V({width})".ljust(14)
            + f"{1e3 * seconds:>9.3f} ms {seconds / verify[1]:>6.2f}"
            + (f"   + {1e6 * per_cell[width]:.3f} ms per 1000 cells" if width in per_cell else "")
            for width, seconds in verify.items()
        ),
        f"  {'other width':<12}{1e3 * costs['switch']:>9.3f} ms more than a pass of the same width as the last",
        "  a draft step: blocks of",
    ]
    lines += [
        f"    {c['count']:>3} {c['kind']:<5} {output.size(c['nbytes']):>10} {1e3 * c['seconds']:>8.4f} ms each"
        f"{'' if c['measured'] else ' (guessed)'}  {c['device']}"
        for c in costs["classes"]
    ]
    lines += [
        f"    head {int(rows):>15} rows {1e3 * seconds:>8.3f} ms"
        for rows, seconds in costs["head"].items()
    ]
    lines += [
        f"    the rest {1e3 * costs['overhead']:>20.3f} ms",
        f"  per block     c1 = {1e3 * costs['c1']:.4g} ms (FFN), "
        f"c2 = {1e6 * costs['c2']:.4g} us per cell, c3 = {1e3 * costs['c3']:.4g} ms (attention: c2 n + c3)",
    ]
    return lines


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
