"""Answer one prompt: the text goes to stdout as it is made, one line of statistics to stderr."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pyssd.cli import options, output
from pyssd.cli.streaming import answer, complete

if TYPE_CHECKING:
    from pyssd.llama import Llama

NAME = "run"
HELP = "answer one prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    options.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--raw",
        "--no-chat",
        action="store_true",
        help="continue the prompt as it is, without the chat template",
    )
    options.add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.raw and args.system is not None:
        raise ValueError("--system needs the chat template; leave out --raw or --system")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with options.load(args) as llm:
        raw = args.raw or not has_chat_template(llm)
        text, finish_reason = "", None
        interrupted = False
        stream = complete(llm, prompt, args) if raw else answer(llm, _messages(prompt, args), args)
        try:
            for piece, reason in stream:
                finish_reason = reason or finish_reason
                text += piece
                if not args.json:
                    output.write_text(piece)
        except KeyboardInterrupt:
            interrupted = True
            stream.close()
        if args.json:
            output.write_json(
                {
                    "model": str(llm.model_path),
                    "text": text,
                    "finish_reason": "cancelled" if interrupted else finish_reason,
                    "chat": not raw,
                    "stats": llm.stats.as_dict(),
                    "share": output.share_by_means(llm.stats),
                }
            )
        else:
            output.write_text("" if text.endswith("\n") else "\n")
            output.note(output.summary(llm.stats))
    return 130 if interrupted else 0


def has_chat_template(llm: Llama) -> bool:
    """Tell whether the file says how a chat is written."""
    return "tokenizer.chat_template" in llm.metadata


def _messages(prompt: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]
