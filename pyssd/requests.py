"""One request at a time per object, from whatever threads; per-call options travel with the request.

A request owns the object from its first step to its last. A second thread waits. A stream owns the object while it is
alive between its first and last `next()`, whichever threads advance it, and gives it back when it is exhausted, closed
or collected. A new request from the thread that left a stream suspended takes over instead of waiting for itself for
ever; the old stream then raises BusyError if it is advanced again, and its state is never touched by it.

Inside a request `Gate.call` is set for the running thread: calls that llama_cpp makes back into the object (a chat
handler calls `create_completion`, that calls `generate`) join the request and inherit its options.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pyssd.errors import BusyError, ClosedError

_IDLE_SECONDS = (
    1.0  # a stream left alone this long by a worker thread counts as abandoned by that thread
)
_END = object()


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; None means "as the object or the enclosing call has it".

    Attributes:
        speculative: As Llama's argument.
        skip_set: As Llama's argument.
        wanted: Tokens the caller will take at most; a draft is never longer.
        bias: Checked logit_bias.
    """

    speculative: object = None
    skip_set: object = None
    wanted: int | None = None
    bias: Mapping[int, float] | None = None


class Request:
    """What owns the object; `generation` counts the generations and state changes made under it."""

    __slots__ = ("cancelled", "generation", "paused_at", "stepping", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stepping = False
        self.cancelled = False
        self.generation = 0
        self.paused_at = time.monotonic()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the user (or of a chat handler) within a request."""

    request: Request
    options: CallOptions


class Gate:
    """Hands the object to one request at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: Request | None = None
        self._closed = False
        self._local = threading.local()

    @property
    def call(self) -> Call | None:
        """The call that the running thread is in, None outside of any."""
        return getattr(self._local, "call", None)

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    def join(self, options: CallOptions | None = None) -> tuple[Call, bool]:
        """Return the call to run under, and whether it starts a request of its own."""
        outer = self.call
        if outer is None:
            return Call(Request(), options or CallOptions()), True
        return Call(outer.request, _inherit(options, outer.options)), False

    @contextlib.contextmanager
    def enter(self, call: Call, *, keep: bool = False) -> Iterator[None]:
        """Run a block under a call, waiting for the object if need be.

        Args:
            call: From `join`.
            keep: Leave the request in possession after the block (a stream between two chunks).

        Raises:
            BusyError: The thread is inside a callback of the request's own generation.
            ClosedError: The object is closed.
        """
        acquired = self._acquire(call.request)
        outer, self._local.call = self.call, call
        try:
            yield
        finally:
            self._local.call = outer
            if acquired and not keep:
                self.release(call.request)

    def _acquire(self, request: Request) -> bool:
        me = threading.get_ident()
        with self._changed:
            while True:
                owner = self._owner
                if self._closed:
                    raise ClosedError("the Llama object is closed; make a new one")
                if owner is request:
                    if request.stepping:
                        raise BusyError(
                            "this was called from a callback of a running generation; call it afterwards"
                        )
                    request.thread = me
                    return False
                if owner is None or self._abandoned(owner, me):
                    if owner is not None:
                        owner.generation += 1  # what it had under way is stale from here on
                    self._owner, request.thread = request, me
                    return True
                if owner.stepping and owner.thread == me:
                    raise BusyError(
                        "this was called from a callback of a running generation; call it afterwards"
                    )
                self._changed.wait(_IDLE_SECONDS if owner.thread == me else None)

    @staticmethod
    def _abandoned(owner: Request, me: int) -> bool:
        if owner.stepping or owner.thread != me:
            return False
        # worker threads of a pool advance the streams of many clients in turn: only leave one behind that stands still
        return threading.current_thread() is threading.main_thread() or (
            time.monotonic() - owner.paused_at >= _IDLE_SECONDS
        )

    def release(self, request: Request) -> None:
        """Give the object back; nothing happens if the request no longer owns it."""
        with self._changed:
            if self._owner is request:
                self._owner = None
                self._changed.notify_all()

    def step(self, request: Request, generation: int) -> None:
        """Mark that the request works on the object's state now.

        Raises:
            BusyError: Another request took over, or the request itself started something else.
            ClosedError: The object was closed.
        """
        with self._changed:
            if self._closed:
                raise ClosedError(
                    "the Llama object was closed during this generation; make a new one"
                )
            if self._owner is not request or request.generation != generation:
                raise BusyError(
                    "this generation was ended by a later call on the same object; start it again"
                )
            request.stepping = True
            request.thread = threading.get_ident()

    def pause(self, request: Request) -> None:
        """Mark that the request rests between two steps."""
        with self._changed:
            request.stepping = False
            request.paused_at = time.monotonic()
            self._changed.notify_all()

    def owns(self, request: Request, generation: int) -> bool:
        """Tell whether the state is still what this generation left."""
        return self._owner is request and request.generation == generation and not self._closed

    def cancel(self, interrupt: Callable[[], None]) -> None:
        """Cancel the request that owns the object, if there is one; `interrupt` stops its running pass."""
        with self._changed:
            if self._owner is not None:
                self._owner.cancelled = True
                if self._owner.stepping:
                    interrupt()

    def shut(self, interrupt: Callable[[], None]) -> bool:
        """Let nobody in any more, end the running pass and wait for its end; False if it was shut before."""
        me = threading.get_ident()
        with self._changed:
            if self._closed:
                return False
            if self._owner is not None and self._owner.stepping and self._owner.thread == me:
                raise BusyError(
                    "close() was called from a callback of a running generation; call it afterwards"
                )
            self._closed = True
            while self._owner is not None and self._owner.stepping:
                interrupt()
                self._changed.wait(0.05)
            self._owner = None
            self._changed.notify_all()
            return True


def _inherit(options: CallOptions | None, outer: CallOptions) -> CallOptions:
    if options is None:
        return outer
    return CallOptions(
        speculative=outer.speculative if options.speculative is None else options.speculative,
        skip_set=outer.skip_set if options.skip_set is None else options.skip_set,
        wanted=options.wanted,
        bias=options.bias,
    )


def stream(
    gate: Gate, call: Call, owned: bool, chunks: Iterator[Any], edit: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Pass chunks on, each made under the call; the object is given back at the end, on close and when collected.

    Args:
        gate: The object's gate.
        call: The call the chunks belong to.
        owned: Whether the call started the request (and so ends it).
        chunks: Made lazily.
        edit: Applied to each chunk.
    """
    try:
        while True:
            with gate.enter(call, keep=True):
                chunk = next(chunks, _END)
            if chunk is _END:
                return
            yield edit(chunk)
    finally:
        end = getattr(chunks, "close", None)
        if end is not None:
            end()
        if owned:
            gate.release(call.request)


class Closed:
    """Stands where a closed object's model and context were: any use raises ClosedError instead of crashing."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedError(f"the Llama object is closed ({name} was asked for); make a new one")


CLOSED = Closed()
