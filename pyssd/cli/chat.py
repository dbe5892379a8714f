"""Chat in the terminal: /reset starts over, /exit leaves, Ctrl-C ends an answer; one line of statistics after each."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyssd.cli import options, output
from pyssd.cli.run import has_chat_template
from pyssd.cli.streaming import answer
from pyssd.errors import ContextOverflowError

if TYPE_CHECKING:
    from pyssd.llama import Llama

NAME = "chat"
HELP = "chat with a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    options.add_generation(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    with options.load(args) as llm:
        if not has_chat_template(llm):
            output.note(
                "this model has no chat template, its answers may be poor; see pyssd run --raw"
            )
        chat = _Chat(llm, args)
        for line in _lines(quiet=args.json):
            if line == "/exit":
                break
            if line == "/reset":
                chat.reset()
            elif line.startswith("/"):
                output.note(f"there is no command {line.split()[0]}; use /reset or /exit")
            elif line:
                chat.turn(line)
        if args.json:
            output.write_json(
                {"model": str(llm.model_path), "turns": chat.turns, "totals": llm.totals.as_dict()}
            )
    return 0


@dataclass
class _Chat:
    """The messages so far, and a record of every turn for --json."""

    llm: Llama
    args: argparse.Namespace
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        system = self.args.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def turn(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        reply, finish_reason = "", None
        stream = answer(self.llm, self.messages, self.args)
        try:
            for piece, reason in stream:
                finish_reason = reason or finish_reason
                reply += piece
                if not self.args.json:
                    output.write_text(piece)
        except KeyboardInterrupt:
            stream.close()
            finish_reason = "cancelled"
        except ContextOverflowError as error:
            self.messages.pop()
            self.turns.append({"user": text, "error": str(error)})
            output.note(f"{error}; /reset starts a new chat")
            return
        self.messages.append({"role": "assistant", "content": reply})
        record = {"user": text, "assistant": reply, "finish_reason": finish_reason}
        self.turns.append({**record, "stats": self.llm.stats.as_dict()})
        if not self.args.json:
            output.write_text("\n")
            output.note(output.summary(self.llm.stats))


def _lines(*, quiet: bool) -> Iterator[str]:
    """Read what the user types, up to the end of stdin; asks for it only at a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):  # absent on Windows, whose console edits lines itself
        import readline  # noqa: F401  (gives input() editing keys and a history)
    while True:
        if not quiet:
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            yield input().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            output.note("\n/exit or Ctrl-D leaves")
