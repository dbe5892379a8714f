"""The cost cache: a measurement is kept for its file and machine, and for no other."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_costs import BLOCKS, N_VOCAB, FakeSession

import pyssd
from pyssd.cost import CostModel
from pyssd.cost_cache import (
    cost_key,
    cost_settings,
    costs_dir,
    fingerprint,
    load_costs,
    read_costs,
    write_costs,
)
from pyssd.measure import measure_costs

SETTINGS: dict[str, object] = {"kernels": "pyssd AVX2", "threads": [2, 2], "kv": [1, 1]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "costs"
    monkeypatch.setenv("PYSSD_COSTS", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 8192)  # 2 MiB
    return path


def load(model: Path, session: FakeSession, **settings: object) -> CostModel:
    return load_costs(
        session,
        BLOCKS,
        model_path=model,
        n_vocab=N_VOCAB,
        n_ctx=session.n_ctx,
        settings={**SETTINGS, **settings},
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pyssd"]


def test_a_second_load_measures_nothing(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pyssd")
    first = FakeSession()
    costs = load(model, first)
    assert first.n_passes > 0
    second = FakeSession()
    again = load(model, second)
    assert second.n_passes == 0
    assert again.as_dict() == costs.as_dict()
    assert again.table(700) == costs.table(700)
    assert again.draft_seconds(None, 700, 4096) == costs.draft_seconds(None, 700, 4096)
    assert len(list(folder.iterdir())) == 1  # and no temporary file
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "changed",
    [{"threads": [1, 1]}, {"kernels": "upstream"}, {"kv": [8, 8]}, {"lora": "adapter.gguf"}],
)
def test_another_setting_is_another_measurement(model: Path, changed: dict[str, object]) -> None:
    load(model, FakeSession())
    other = FakeSession()
    load(model, other, **changed)
    assert other.n_passes > 0
    back = FakeSession()
    load(model, back)
    assert back.n_passes == 0


def test_other_blocks_are_another_measurement(model: Path) -> None:
    here = cost_key(model, BLOCKS, SETTINGS)
    elsewhere = [
        pyssd.Block(b.index, b.layer, b.kind, b.nbytes, "RPC0" if b.layer > 1 else b.device)
        for b in BLOCKS
    ]
    assert cost_key(model, elsewhere, SETTINGS) != here
    assert cost_key(model, BLOCKS, dict(SETTINGS)) == here


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, -1, -(1 << 16)])
def test_a_fingerprint_reads_both_ends(model: Path, place: int) -> None:
    before = fingerprint(model)
    data = bytearray(model.read_bytes())
    data[place] ^= 1
    model.write_bytes(data)
    assert fingerprint(model) != before


def test_a_fingerprint_knows_the_size_and_every_part(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{no:05d}-of-00003.gguf" for no in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"x" * 1000)
    before = fingerprint(parts[0])
    assert before["nbytes"] == [1000, 1000, 1000]
    parts[2].write_bytes(b"x" * 1001)
    assert fingerprint(parts[0]) != before
    small = tmp_path / "small.gguf"
    small.write_bytes(b"abc")
    assert fingerprint(small)["nbytes"] == [3]


CORRUPT: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "bytes": lambda text: b"\xff\xfe\x00" * 100,
    "list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "format": lambda text: text.replace('"format": 2', '"format": 1'),
    "foreign key": lambda text: text.replace('"AVX2', '"pyssd AVX2').replace("AVX2", "NEON"),
    "no costs": lambda text: json.dumps({**json.loads(text), "costs": {}}),
    "costs are no object": lambda text: json.dumps({**json.loads(text), "costs": 3}),
    "negative": lambda text: _with(text, verify={"1": -0.01}),
    "infinite": lambda text: _with(text, verify={"1": float("inf")}),
    "not a number": lambda text: _with(text, verify={"1": float("nan")}),
    "zero": lambda text: _with(text, verify={"1": 0.0}),
    "words": lambda text: _with(text, verify={"one": "fast"}),
    "wide": lambda text: _with(text, verify={"1": 0.1, "999": 0.2}),
    "nothing measured": lambda text: _with(text, verify={}),
    "other blocks": lambda text: _with(text, classes=[]),
    "unhashable": lambda text: _with(text, classes=[{"kind": [], "nbytes": [], "device": {}}]),
}


def _with(text: str, **changed: object) -> str:
    stored = json.loads(text)
    stored["costs"].update(changed)
    return json.dumps(stored)


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_file_that_cannot_be_used_is_measured_anew_with_one_line(
    kind: str, model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = load(model, FakeSession())
    (path,) = folder.iterdir()
    changed = CORRUPT[kind](path.read_text(encoding="utf-8"))
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    caplog.set_level(logging.DEBUG, "pyssd")
    session = FakeSession()
    costs = load(model, session)
    if kind == "other blocks":  # classes that were not measured are no fault
        assert session.n_passes == 0
        return
    assert session.n_passes > 0
    assert costs.as_dict() == good.as_dict()
    assert len(lines(caplog)) == 1
    assert str(path) in lines(caplog)[0]
    # and the file is a good one again
    assert load(model, FakeSession()).as_dict() == good.as_dict()
    assert len(lines(caplog)) == 1


def test_a_folder_in_place_of_the_file_is_no_error(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(model, FakeSession())
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    session = FakeSession()
    assert load(model, session).measured
    assert session.n_passes > 0
    assert len(lines(caplog)) == 1


def test_a_read_only_folder_is_no_error(
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)

    def refuse(**_: object) -> None:  # the system's answer to all but root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    try:
        assert load(model, FakeSession()).measured
        assert list(folder.iterdir()) == []
        assert lines(caplog) == []
    finally:
        folder.chmod(stat.S_IRWXU)


def test_a_folder_that_cannot_be_made_is_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYSSD_COSTS", str(tmp_path / "file" / "costs"))
    assert load(model, FakeSession()).measured
    assert len(lines(caplog)) <= 1


def test_a_failed_write_leaves_the_former_file(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = load(model, FakeSession())
    key = cost_key(model, BLOCKS, SETTINGS)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    write_costs(key, measure_costs(FakeSession(0.5), BLOCKS, N_VOCAB, n_ctx=512))
    assert len(list(folder.iterdir())) == 1
    kept = read_costs(key, BLOCKS)
    assert kept is not None
    assert kept.as_dict() == costs.as_dict()


def test_a_noisy_measurement_and_a_guess_are_not_kept(model: Path, folder: Path) -> None:
    assert load(model, FakeSession(slow_passes=frozenset(range(1, 1000, 3)))).measured
    assert not load(model, FakeSession(refusal="recurrent")).measured
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_longer_context_completes_what_a_short_one_could_not_measure(model: Path) -> None:
    assert not load(model, FakeSession(n_ctx=128)).knows_cells
    short = FakeSession(n_ctx=128)
    load(model, short)
    assert short.n_passes == 0
    assert load(model, FakeSession(n_ctx=4096)).knows_cells
    again = FakeSession(n_ctx=4096)
    assert load(model, again).knows_cells
    assert again.n_passes == 0


def test_a_model_too_slow_for_everything_is_measured_once(model: Path) -> None:
    slow = FakeSession(0.3)
    assert not load_costs(
        slow, BLOCKS, model_path=model, n_vocab=N_VOCAB, n_ctx=4096, settings=SETTINGS,
        seconds=0.0,
    ).knows_cells  # fmt: skip
    again = FakeSession(0.3)
    load(model, again)
    assert again.n_passes == 0


def test_concurrent_writers_leave_one_whole_file(model: Path, folder: Path) -> None:
    key = cost_key(model, BLOCKS, SETTINGS)
    tables = [
        measure_costs(s, BLOCKS, N_VOCAB, n_ctx=4096, clock=s.clock)
        for s in map(FakeSession, (0.01, 0.02, 0.03, 0.04))
    ]
    write_costs(key, tables[0])
    wanted = [table.as_dict() for table in tables]
    stop, failures = threading.Event(), []

    def write(costs: CostModel) -> None:
        for _ in range(40):
            write_costs(key, costs)

    def read() -> None:
        while not stop.is_set():
            found = read_costs(key, BLOCKS)
            if found is None or found.as_dict() not in wanted:
                failures.append(found)

    writers = [threading.Thread(target=write, args=(costs,)) for costs in tables]
    reader = threading.Thread(target=read)
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert failures == []
    assert len(list(folder.iterdir())) == 1


def test_the_folder_does_not_grow_for_ever(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyssd.cost_cache._MAX_FILES", 5)
    for number in range(9):
        load(model, FakeSession(), threads=[number, number])
        for path in folder.iterdir():  # file times may be as coarse as a second
            age = time.time() - path.stat().st_mtime
            os.utime(path, (time.time() - age - 10,) * 2)
    assert len(list(folder.iterdir())) == 5
    latest = FakeSession()
    load(model, latest, threads=[8, 8])
    assert latest.n_passes == 0


def test_the_folder_is_the_users_unless_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSSD_COSTS", "~/elsewhere")
    assert costs_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("PYSSD_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert costs_dir() == tmp_path / "pyssd" / "costs"


def test_settings_of_an_object_tell_what_times_depend_on(tiny_llama: Path) -> None:
    seen = []
    for options in ({}, {"n_threads": 1}, {"kernels": "upstream"}, {"type_k": 8}, {"n_ubatch": 64}):
        with pyssd.Llama(
            str(tiny_llama), n_ctx=256, verbose=False, speculative="off", **options
        ) as llm:  # type: ignore[arg-type]
            seen.append(cost_key(tiny_llama, llm.blocks, cost_settings(llm, exact=False)))
    assert seen[0]["library"]["llama"]
    assert seen[0]["machine"]
    different = [a for a in seen if a != seen[0]]
    assert len(different) >= 3  # one thread may be what the machine has
    assert all(a != seen[0] for a in seen[2:])
