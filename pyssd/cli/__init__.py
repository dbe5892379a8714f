"""The command line: ``pyssd run | chat | info | check | bench``, one module per command.

Nothing here imports llama_cpp before a command really runs, so that ``--help`` and mistakes in options are answered at once.
Exit status: 0, 1 (a check failed or the reader of the output went away), 2 (an error, one sentence on stderr), 130 (Ctrl-C).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pyssd.cli import bench, chat, check, info, run
from pyssd.cli.output import write_json
from pyssd.errors import PyssdError

_COMMANDS = (run, chat, info, check, bench)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        argv: arguments without the program's name; None = those of the process.
    """
    args = _parser().parse_args(argv)
    try:
        status = int(args.run(args))
        sys.stdout.flush()  # here, where a reader that went away is handled
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it something that is still open
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PyssdError, OSError, ValueError, MemoryError) as error:
        if args.verbose:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        if args.json:
            write_json({"error": message, "type": type(error).__name__})
        print(f"pyssd: error: {message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pyssd",
        description="Run local GGUF models faster, with the same text: self-speculative decoding.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.NAME, help=command.HELP, description=command.__doc__, allow_abbrev=False
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
