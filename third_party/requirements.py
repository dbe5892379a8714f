"""Print what pyproject.toml requires, for the Makefile: ``requirements.py test lint``, ``requirements.py --build-dir``.

llama-cpp-python is left out, because the Makefile installs it in a command of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def read_project() -> dict[str, Any]:
    """Return the parsed pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        # the standard library of Python 3.10 has no parser
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(extras: Sequence[str]) -> list[str]:
    """Return the dependencies with those of the extras, without llama-cpp-python."""
    project = read_project()["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [line for line in wanted if not line.startswith("llama-cpp-python")]


def build_dir() -> Path:
    """Return the folder of the newest build in this checkout."""
    caches = sorted(
        (ROOT / "build").glob("cp*/CMakeCache.txt"), key=lambda path: path.stat().st_mtime
    )
    if not caches:
        raise SystemExit("requirements.py: nothing has been built yet; run make test")
    return caches[-1].parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Print what pyproject.toml requires.")
    parser.add_argument("extras", nargs="*", help="names of optional dependencies to include")
    parser.add_argument("--build-dir", action="store_true", help="print the build folder instead")
    args = parser.parse_args(argv)
    print(build_dir() if args.build_dir else "\n".join(requirements(args.extras)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
