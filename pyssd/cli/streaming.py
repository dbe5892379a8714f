"""Stream an answer so that Ctrl-C ends it within one pass.

Python runs its signal handlers between bytecodes of the main thread, so a pass over a long prompt there would keep Ctrl-C
waiting. Here a thread generates; the main thread only waits, and cancels the request when it is interrupted.
"""

from __future__ import annotations

import argparse
import queue
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from pyssd.cli import options

if TYPE_CHECKING:
    from pyssd.llama import Llama

Piece = tuple[str, "str | None"]  # text, finish reason

_POLL_SECONDS = 0.1  # Windows delivers Ctrl-C only to a wait with a timeout


def answer(
    llm: Llama, messages: list[dict[str, Any]], args: argparse.Namespace
) -> Generator[Piece, None, None]:
    """Stream the next message of a chat; closing the generator cancels the request."""
    chunks = llm.create_chat_completion(messages=messages, stream=True, **options.sampling(args))
    return _interruptible(llm, (_chat_piece(chunk["choices"][0]) for chunk in chunks))


def complete(llm: Llama, prompt: str, args: argparse.Namespace) -> Generator[Piece, None, None]:
    """Stream the continuation of a text; closing the generator cancels the request."""
    chunks = llm.create_completion(prompt, stream=True, **options.sampling(args))
    choices = (chunk["choices"][0] for chunk in chunks)
    return _interruptible(llm, ((choice["text"], choice["finish_reason"]) for choice in choices))


def _chat_piece(choice: dict[str, Any]) -> Piece:
    return choice["delta"].get("content") or "", choice["finish_reason"]


def _interruptible(llm: Llama, pieces: Iterator[Piece]) -> Generator[Piece, None, None]:
    done: queue.Queue[Piece | BaseException | None] = queue.Queue()

    def work() -> None:
        try:
            for piece in pieces:
                done.put(piece)
            done.put(None)
        except BaseException as error:  # raised again where the caller is
            done.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        # again and again: the first may come before the request has begun
        while thread.is_alive():
            llm.cancel()
            thread.join(0.01)
