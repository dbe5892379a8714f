"""From the MODEL argument of the command line to a file: a path, a fetched model, or an installed model package."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pyssd.errors import UnsupportedModelError

_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_MAX_LISTED = 12


def cache_dir() -> Path:
    """Return the folder of fetched models: PYSSD_MODELS, else pyssd/models in the user's cache."""
    chosen = os.environ.get("PYSSD_MODELS")
    return Path(chosen).expanduser() if chosen else user_cache_dir() / "models"


def user_cache_dir() -> Path:
    """Return pyssd's folder in the user's cache."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pyssd"


def known_models() -> dict[str, Path]:
    """List models that have a name: fetched ones by file name, installed ones by their package's.

    A package is only looked into, never imported. One with several models gives each the name PACKAGE/FILE.
    """
    return {**_installed(), **_fetched()}


def find_model(name: str) -> Path:
    """Return the file that a MODEL argument means.

    Args:
        name: the path of a file, or the name of a known model. Case, "-", "_" and "." do not count in names, and the
            first part of a name will do where only one model has it: "smollm2-135m".

    Raises:
        UnsupportedModelError: there is no such file or model, or several.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = known_models()
    wanted = _plain(name)
    for matches in (
        [key for key in known if _plain(key) == wanted],
        [key for key in known if wanted and _plain(key).startswith(wanted)],
    ):
        if len({known[key] for key in matches}) == 1:
            return known[matches[0]]
        if matches:
            raise UnsupportedModelError(
                f"model {name!r} may be {_listed(matches)}; write more of the name"
            )
    if name.strip() and path.exists():
        return path  # a folder or a device: the loader says what is wrong with it
    if not known:
        raise UnsupportedModelError(
            f"there is no model {name!r} and none in {cache_dir()}; give the path of a .gguf file"
        )
    raise UnsupportedModelError(
        f"there is no model {name!r}; give the path of a .gguf file, or one of {_listed(list(known))}"
    )


def _fetched() -> dict[str, Path]:
    folder = cache_dir()
    found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return {
        path.stem: path for path in found if path.is_file() and not _LATER_SHARD.search(path.name)
    }


def _installed() -> dict[str, Path]:
    models: dict[str, Path] = {}
    for distribution in importlib.metadata.distributions():
        paths = list(_model_files(distribution))
        name = distribution.metadata["Name"] if paths else ""
        for path in paths:
            # the first distribution of a name is the one that an import would find
            models.setdefault(name if len(paths) == 1 else f"{name}/{path.stem}", path)
    return models


def _model_files(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    for file in distribution.files or ():
        if file.suffix.lower() == ".gguf" and not _LATER_SHARD.search(file.name):
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                yield path


def _plain(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.lower().removesuffix(".gguf"))


def _listed(names: list[str]) -> str:
    text = ", ".join(sorted(names)[:_MAX_LISTED])
    return f"{text} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else text
