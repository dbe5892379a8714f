"""What a measurement was made on: processor, load, commit. No paths and no names of people or hosts."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the model of the processor and how many there are."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the platform's word has to do
    return f"{name}, {os.cpu_count()} processors"


def session(command: Sequence[str]) -> dict[str, Any]:
    """Return what is noted about one run: command, time, load of the machine, version and commit."""
    import pyssd
    from pyssd.kernels import instruction_set

    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        "command": shlex.join(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "instructions": instruction_set(),
        "load_at_start": [round(value, 2) for value in load],
        "pyssd": pyssd.__version__,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of the checkout that pyssd runs from, "+" behind it if files differ; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout.strip()
