"""Where pristine llama.cpp files come from: the pinned sdist of llama-cpp-python, or an unpatched folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pins

VENDOR = "vendor/llama.cpp/"
BINDINGS_LICENCE = "LICENSE-llama-cpp-python"


class FetchError(Exception):
    """The sources cannot be obtained or edited; the message is one sentence."""


class Source(Protocol):
    """Where pristine files come from."""

    key: str  # identity; the same key means the same files

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield (path relative to llama.cpp, content) of every file, in any order."""


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class SdistSource:
    """The pinned sdist; its sha256 is checked before anything is read."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FetchError(f"sdist {path} does not exist; pass the path of {pins.SDIST_NAME}")
        found = sha256_of(path)
        if found != pins.SDIST_SHA256:
            raise FetchError(
                f"sdist {path} has sha256 {found}, expected {pins.SDIST_SHA256}; "
                f"pass the sdist of llama-cpp-python {pins.LLAMA_CPP_PYTHON_VERSION}"
            )
        self.path = path
        self.key = f"sdist:{pins.SDIST_SHA256}"

    def files(self) -> Iterator[tuple[str, bytes]]:
        with tarfile.open(self.path, "r|gz") as archive:
            for member in archive:
                _, _, name = member.name.partition("/")
                if name == "LICENSE.md":
                    name = VENDOR + BINDINGS_LICENCE
                if not member.isfile() or not name.startswith(VENDOR):
                    continue
                stream = archive.extractfile(member)
                if stream is not None:
                    yield name[len(VENDOR) :], stream.read()


class FolderSource:
    """An unpatched llama.cpp folder, for work on the pin itself."""

    def __init__(self, path: Path, parts: Sequence[str]) -> None:
        if not (path / "src" / "llama.cpp").is_file():
            raise FetchError(
                f"source folder {path} is no llama.cpp; pass a vendor/llama.cpp folder"
            )
        self.path = path.resolve()
        self.parts = parts
        digest = hashlib.sha256()
        for file in self._paths():
            status = file.stat()
            digest.update(f"{file}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        self.key = f"folder:{digest.hexdigest()}"

    def _paths(self) -> list[Path]:
        found: list[Path] = []
        for part in self.parts:
            path = self.path / part
            found += [path] if path.is_file() else path.rglob("*")
        return sorted(path for path in found if path.is_file())

    def files(self) -> Iterator[tuple[str, bytes]]:
        for path in self._paths():
            yield path.relative_to(self.path).as_posix(), path.read_bytes()
        licence = self.path.parent.parent / "LICENSE.md"
        if licence.is_file():
            yield BINDINGS_LICENCE, licence.read_bytes()


def cache_dir() -> Path:
    """Return the user's cache folder for pyssd."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local")))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pyssd" / "sdist"


def download(python: str = sys.executable) -> Path:
    """Download the pinned sdist with pip into the cache folder and return its path.

    Raises:
        FetchError: pip failed; its last lines are part of the message.
    """
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading {pins.SDIST_NAME} with pip (77 MB)")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirement = Path(scratch) / "requirement.txt"
        requirement.write_text(
            f"llama-cpp-python=={pins.LLAMA_CPP_PYTHON_VERSION} --hash=sha256:{pins.SDIST_SHA256}\n",
            encoding="utf-8",
        )
        # Without isolation pip prepares the sdist's metadata with the scikit-build-core that is building us.
        command = [
            python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--no-binary=:all:", "--no-build-isolation", "--require-hashes"]
        command += ["--dest", scratch, "--requirement", str(requirement)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        got = Path(scratch) / pins.SDIST_NAME
        if result.returncode != 0 or not got.is_file():
            tail = " / ".join((result.stderr or result.stdout).strip().splitlines()[-3:])
            raise FetchError(
                f"pip could not download {pins.SDIST_NAME} ({tail}); check pip's index settings or set "
                "PYSSD_LLAMA_SDIST to the path of a copy"
            )
        target = folder / pins.SDIST_NAME
        got.replace(target)
    return target


def find_source(source_dir: str | None, sdist: str | None, parts: Sequence[str]) -> Source:
    """Choose where the sources come from: folder, sdist, cache folder, pip, in this order."""
    if source_dir:
        return FolderSource(Path(source_dir), parts)
    if sdist:
        return SdistSource(Path(sdist))
    cached = cache_dir() / pins.SDIST_NAME
    if cached.is_file() and sha256_of(cached) == pins.SDIST_SHA256:
        return SdistSource(cached)
    return SdistSource(download())


def say(text: str) -> None:
    """Tell the user what is going on."""
    print(f"-- pyssd: {text}", flush=True)
