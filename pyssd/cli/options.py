"""Options that several commands share, and the Llama object they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyssd.llama import Llama

DEFAULT_N_CTX = 4096
DEFAULT_MAX_TOKENS = 512


def add_model(
    parser: argparse.ArgumentParser, *, n_ctx: int = DEFAULT_N_CTX, json_line: bool = True
) -> None:
    """Add MODEL and the options of loading it.

    Args:
        parser: the command's parser.
        n_ctx: default of --n-ctx.
        json_line: add --json, one object on stdout.
    """
    parser.add_argument(
        "model", metavar="MODEL", help="a .gguf file, or the name of a fetched or installed model"
    )
    group = parser.add_argument_group("loading")
    group.add_argument(
        "--n-ctx",
        type=positive,
        default=n_ctx,
        metavar="N",
        help="context in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: physical cores)"
    )
    group.add_argument(
        "--gpu-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers on the GPU, -1 = all (default: 0)",
    )
    group.add_argument("--lora", metavar="FILE", help="a LoRA adapter")
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="kernels that give the same text with and without speculation, token for token",
    )
    if json_line:
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else"
        )
    parser.add_argument(
        "--verbose", action="store_true", help="show llama.cpp's log, and errors in full"
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling and of speculation."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n", "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N",
        help="most tokens of an answer, -1 = until the context is full (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--temp",
        type=float,
        default=0.8,
        metavar="T",
        help="temperature, 0 = greedy (default: %(default)s)",
    )
    group.add_argument("--top-k", type=int, default=40, metavar="K", help="(default: %(default)s)")
    group.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="(default: %(default)s)"
    )
    group.add_argument(
        "--min-p", type=float, default=0.05, metavar="P", help="(default: %(default)s)"
    )
    group.add_argument(
        "--repeat-penalty", type=float, default=1.0, metavar="R", help="(default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="-1 = a new one each time (default: a constant)"
    )
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative", choices=("auto", "on", "off"), default="auto",
        help="auto = where it measures faster (default)",
    )  # fmt: skip
    group.add_argument(
        "--skip-set",
        metavar="SET",
        help="draft with these blocks left out: 'a:3,5-8 f:1,3', or a JSON file",
    )
    group.add_argument("--draft-len", type=int, metavar="N", help="most tokens of a draft")
    group.add_argument(
        "--min-confidence", type=float, metavar="P", help="a draft ends below this confidence"
    )


def load(args: argparse.Namespace) -> Llama:
    """Make the Llama object that the options describe.

    Raises:
        PyssdError: the model or the libraries cannot be used.
        ValueError: an option is out of range.
    """
    from pyssd.models import find_model

    path = find_model(args.model)
    settings = _speculation(args)
    if args.lora is not None and not Path(args.lora).is_file():
        raise FileNotFoundError(f"there is no LoRA file {args.lora}; check the path")

    from pyssd.llama import Llama

    optional = {"n_threads": args.threads, "lora_path": args.lora, "exact": args.exact}
    optional["kernels"] = getattr(args, "kernels", None)
    settings |= {name: value for name, value in optional.items() if value is not None}
    return Llama(
        str(path), n_ctx=args.n_ctx, n_gpu_layers=args.gpu_layers, verbose=args.verbose, **settings
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the per-call arguments that the options describe."""
    return {
        "max_tokens": args.max_tokens if args.max_tokens >= 0 else None,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
    }


def _speculation(args: argparse.Namespace) -> dict[str, Any]:
    if not hasattr(args, "speculative"):
        return {"speculative": "off"}
    from pyssd.config import SpecConfig
    from pyssd.skipset import SkipSet

    settings: dict[str, Any] = {"speculative": args.speculative}
    changed = {"max_draft_len": args.draft_len, "min_confidence": args.min_confidence}
    changed = {name: value for name, value in changed.items() if value is not None}
    if changed and args.speculative != "off":
        settings["speculative"] = SpecConfig(always=args.speculative == "on", **changed)
    if args.skip_set is not None:
        settings["skip_set"] = SkipSet.of(
            args.skip_set
        )  # a typing error is reported before the model loads
    if args.seed is not None:
        settings["seed"] = args.seed & 0xFFFFFFFF
    return settings


def positive(text: str) -> int:
    """Read a number above 0 from the command line."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
