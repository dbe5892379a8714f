"""Obtain the llama.cpp sources that pyssd builds: ``python third_party/fetch.py --dest FOLDER``.

CMake calls this at configure time. The sources come from the sdist of llama-cpp-python pinned in pins.py, looked for in
this order: ``--source-dir`` (an unpatched vendor/llama.cpp, copied and never edited in place), ``--sdist``, the user's cache
folder, and ``pip download`` with the pinned hash, so that pip's own mirror and offline settings apply. Only what the build
needs is extracted; the edits of edits.py are applied; a stamp makes the next run do nothing. A file whose content stays the
same keeps its modification time, so a changed edit rebuilds only what depends on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import edits as our_edits
import pins
from sources import BINDINGS_LICENCE, FetchError, find_source, say, sha256_of

HERE = Path(__file__).resolve().parent
STAMP = ".pyssd-stamp.json"
PINS_CMAKE = "pyssd-pins.cmake"
# The licence of llamafile's matrix product is the comment at the head of its source.
LLAMAFILE = "ggml/src/ggml-cpu/llamafile/sgemm.cpp"
LLAMAFILE_LICENCE = "LICENSE-llamafile"

BUILD_PARTS = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/",
    "ggml/",
    "include/",
    "licenses/",
    "src/",
    "tools/rpc/",
    "vendor/",
)
TOOL_PARTS = (
    "app/",
    "common/",
    "examples/",
    "pocs/",
    "scripts/ui-assets.cmake",  # the server's build runs it, also to leave its pages out
    "tests/",
    "tools/",
)


class EditLike(Protocol):
    """What the applier needs of edits.Edit."""

    path: str
    anchor: str
    text: str
    where: str


def apply_edits(path: str, text: str, edits: Iterable[EditLike]) -> str:
    """Return text with the edits of one file applied, in order.

    Raises:
        FetchError: an anchor does not occur exactly once, or where is unknown.
    """
    for edit in edits:
        count = text.count(edit.anchor)
        if count != 1:
            raise FetchError(
                f"anchor {edit.anchor!r} occurs {count} times in {path}, expected once; "
                "adapt third_party/edits.py to this version of llama.cpp"
            )
        replacement = {
            "before": edit.text + edit.anchor,
            "after": edit.anchor + edit.text,
            "replace": edit.text,
        }.get(edit.where)
        if replacement is None:
            raise FetchError(
                f"edit of {path} has where={edit.where!r}; use before, after or replace"
            )
        text = text.replace(edit.anchor, replacement)
    return text


def wanted(path: str, parts: Sequence[str]) -> bool:
    """Tell whether a file belongs to the parts that are extracted."""
    if ".." in PurePosixPath(path).parts or PurePosixPath(path).is_absolute():
        return False
    return path == BINDINGS_LICENCE or any(
        path.startswith(part) if part.endswith("/") else path == part for part in parts
    )


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file unless it holds the content already, so that its modification time stays."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def llamafile_licence(source: bytes) -> bytes:
    """Return the leading comment of llamafile's source, without the comment signs."""
    lines = []
    for line in source.decode("utf-8").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].strip())
    return ("\n".join(lines).strip() + "\n").encode()


def read_stamp(dest: Path) -> dict[str, object]:
    """Return the stamp of an earlier run, empty if there is none."""
    try:
        stamp = json.loads((dest / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def fetch(
    dest: Path,
    *,
    source_dir: str | None = None,
    sdist: str | None = None,
    with_tools: bool = False,
    edits: Sequence[EditLike] | None = None,
) -> bool:
    """Bring dest up to date; return whether anything had to be done.

    Args:
        dest: folder that becomes the llama.cpp source folder.
        with_tools: extract common, tools, examples and tests as well.
        edits: edits to apply; None = those of edits.py.

    Raises:
        FetchError: sources unavailable, wrong hash, or an anchor that does not occur exactly once.
    """
    if edits is None:
        edits = our_edits.EDITS
    by_path: dict[str, list[EditLike]] = {}
    for edit in edits:
        by_path.setdefault(edit.path, []).append(edit)
    edits_key = hashlib.sha256(
        repr([(e.path, e.anchor, e.text, e.where) for e in edits]).encode()
    ).hexdigest()
    parts = BUILD_PARTS + (TOOL_PARTS if with_tools else ())
    tools = [sha256_of(HERE / name) for name in ("fetch.py", "sources.py")]
    base = {"parts": list(parts), "fetch": tools, "pin": pins.SDIST_SHA256}
    stamp = read_stamp(dest)
    known = all(stamp.get(name) == value for name, value in base.items())
    # The key of an sdist is its pin, so an up-to-date folder needs no sdist at all.
    pinned = stamp.get("source") == f"sdist:{pins.SDIST_SHA256}" and not source_dir
    if known and pinned and stamp.get("edits") == edits_key:
        return False
    source = find_source(source_dir, sdist, parts)
    same_source = known and stamp.get("source") == source.key
    if same_source and stamp.get("edits") == edits_key:
        return False

    earlier = stamp.get("edited") if same_source else None
    only = set(by_path) | set(map(str, earlier)) if isinstance(earlier, list) else None
    say(f"extracting llama.cpp to {dest}" if only is None else "applying changed edits")
    dest.mkdir(parents=True, exist_ok=True)
    (dest / STAMP).unlink(missing_ok=True)  # an interrupted run must not look complete
    seen: set[str] = set()
    for path, content in source.files():
        if not wanted(path, parts) or (only is not None and path not in only):
            continue
        seen.add(path)
        if path == LLAMAFILE and only is None:
            seen.add(LLAMAFILE_LICENCE)
            write_if_changed(dest / LLAMAFILE_LICENCE, llamafile_licence(content))
        text = (
            apply_edits(path, content.decode("utf-8"), by_path[path]) if path in by_path else None
        )
        write_if_changed(dest / path, content if text is None else text.encode("utf-8"))
    if missing := sorted(set(by_path) - seen):
        raise FetchError(
            f"file {missing[0]} to edit is not in llama.cpp; adapt third_party/edits.py"
        )
    write_if_changed(
        dest / PINS_CMAKE,
        f'set(LLAMA_BUILD_COMMIT "{pins.LLAMA_CPP_COMMIT}")\nset(LLAMA_BUILD_NUMBER 0)\n'.encode(),
    )
    if only is None:
        remove_others(dest, seen | {PINS_CMAKE})
    new = {**base, "source": source.key, "edits": edits_key, "edited": sorted(by_path)}
    (dest / STAMP).write_text(json.dumps(new, indent=1), encoding="utf-8")
    return True


def remove_others(dest: Path, keep: set[str]) -> None:
    """Delete files of an earlier version: upstream's build globs its model sources."""
    for path in sorted(dest.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(dest).as_posix() not in keep:
            path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Obtain and edit the llama.cpp sources.")
    parser.add_argument("--dest", required=True, help="folder that becomes the source folder")
    parser.add_argument("--source-dir", default=os.environ.get("PYSSD_LLAMA_SOURCE_DIR"))
    parser.add_argument("--sdist", default=os.environ.get("PYSSD_LLAMA_SDIST"))
    parser.add_argument("--with-tools", action="store_true", help="extract tools and tests as well")
    parser.add_argument("--no-edits", action="store_true", help="leave the sources as they are")
    args = parser.parse_args(argv)
    try:
        fetch(
            Path(args.dest),
            source_dir=args.source_dir or None,
            sdist=args.sdist or None,
            with_tools=args.with_tools,
            edits=() if args.no_edits else None,
        )
    except (FetchError, OSError, tarfile.TarError) as exc:
        print(f"fetch.py: error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
