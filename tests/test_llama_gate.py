"""Who owns the object: one request at a time, streams, take-over, close."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pyssd.errors import BusyError, ClosedError
from pyssd.requests import CallOptions, Gate, stream


def chunks_of(gate: Gate, n: int = 3) -> Any:
    call, owned = gate.join()
    return stream(gate, call, owned, iter(range(n)), lambda chunk: chunk)


def holds(gate: Gate) -> bool:
    """Whether another thread would have to wait."""
    got: list[bool] = []

    def enter() -> None:
        call, _ = gate.join()
        with gate.enter(call):
            got.append(True)

    worker = threading.Thread(target=enter, daemon=True)
    worker.start()
    worker.join(0.15)
    return not got


@pytest.mark.parametrize("end", ["exhaust", "close", "forget", "cycle"])
def test_stream_gives_the_object_back(end: str) -> None:
    gate = Gate()
    chunks = chunks_of(gate)
    assert not holds(gate)  # nothing is held before the first chunk
    assert next(chunks) == 0
    call, _ = gate.join()
    if end == "exhaust":
        assert list(chunks) == [1, 2]
    elif end == "close":
        chunks.close()
    elif end == "forget":
        del chunks
    else:
        ring: list[Any] = [chunks]
        ring.append(ring)
        del chunks, ring
        gc.collect()
    with gate.enter(call):
        pass
    assert not holds(gate)


def test_second_thread_waits_and_same_thread_takes_over() -> None:
    gate = Gate()
    chunks = chunks_of(gate)
    next(chunks)
    assert holds(gate)
    call, owned = gate.join()
    assert owned
    with gate.enter(call):
        assert gate.join() == (gate.call, False)
    chunks.close()
    assert not holds(gate)


def test_taken_over_generation_cannot_go_on() -> None:
    gate = Gate()
    call, _ = gate.join()
    with gate.enter(call, keep=True):
        call.request.generation += 1
    generation = call.request.generation
    gate.step(call.request, generation)
    gate.pause(call.request)
    other, _ = gate.join()
    with gate.enter(other):
        pass
    assert not gate.owns(call.request, generation)
    with gate.enter(call), pytest.raises(BusyError):  # even if it gets the object back
        gate.step(call.request, generation)


def test_call_from_within_a_step_is_refused() -> None:
    gate = Gate()
    call, _ = gate.join()
    with gate.enter(call, keep=True):
        gate.step(call.request, 0)
        with pytest.raises(BusyError), gate.enter(gate.join()[0]):
            pass
    with pytest.raises(BusyError), gate.enter(gate.join()[0]):
        pass


def test_worker_thread_takes_over_only_what_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyssd.requests._IDLE_SECONDS", 0.2)
    gate = Gate()
    waited: list[float] = []

    def work() -> None:
        chunks = chunks_of(gate)
        next(chunks)
        call, _ = gate.join()
        gate.pause(gate._owner)  # type: ignore[arg-type]
        started = time.monotonic()
        with gate.enter(call):
            waited.append(time.monotonic() - started)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(5.0)
    assert waited
    assert 0.1 < waited[0] < 2.0


def test_options_are_inherited_by_calls_within() -> None:
    gate = Gate()
    outer, _ = gate.join(CallOptions(speculative="off", wanted=9))
    with gate.enter(outer):
        inner, owned = gate.join(CallOptions(skip_set="f:1"))
        assert not owned
        assert inner.options == CallOptions(speculative="off", skip_set="f:1")
        assert gate.join()[0].options == outer.options


def test_shut_waits_for_the_running_step_and_lets_nobody_in() -> None:
    gate = Gate()
    interrupted = threading.Event()

    def work() -> Iterator[None]:
        call, _ = gate.join()
        with gate.enter(call, keep=True):
            gate.step(call.request, 0)
            yield
            interrupted.wait(5.0)
            gate.pause(call.request)
        yield

    steps = work()
    worker = threading.Thread(target=lambda: (next(steps), next(steps)))
    worker.start()
    time.sleep(0.05)
    assert gate.shut(interrupted.set)
    assert not gate.shut(interrupted.set)
    worker.join(5.0)
    with pytest.raises(ClosedError), gate.enter(gate.join()[0]):
        pass
