"""third_party/fetch.py: anchored edits, stamps, hashes, and that an unchanged file keeps its modification time."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import edits
import fetch
import pins
import pytest
import sources

CONTEXT = "src/llama-context.cpp"


@dataclass(frozen=True)
class SmallEdit:
    path: str
    anchor: str
    text: str
    where: str = "after"


HOOK = SmallEdit(CONTEXT, "int one;", " // pyssd:")


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A folder that looks like an sdist's vendor/llama.cpp."""
    root = tmp_path / "sdist" / "vendor" / "llama.cpp"
    files = {
        "CMakeLists.txt": "project(llama.cpp)\n",
        "LICENSE": "MIT\n",
        "src/llama.cpp": "int main;\n",
        CONTEXT: "int one;\nint two;\nint two;\n",
        "src/models/old.cpp": "",
        "ggml/src/ggml-cpu/llamafile/sgemm.cpp": "// Copyright Somebody\n//\n// Permission\nint x;\n",
        "common/common.cpp": "int common;\n",
        "docs/build.md": "not needed\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (tmp_path / "sdist" / "LICENSE.md").write_text("MIT of the bindings\n", encoding="utf-8")
    return root


def run(upstream: Path, dest: Path, *changes: SmallEdit, with_tools: bool = False) -> bool:
    return fetch.fetch(dest, source_dir=str(upstream), edits=changes, with_tools=with_tools)


@pytest.mark.parametrize(
    ("where", "expected"), [("after", "ab+c"), ("before", "a+bc"), ("replace", "a+c")]
)
def test_edit_goes_where_it_says(where: str, expected: str) -> None:
    assert fetch.apply_edits("f", "abc", [SmallEdit("f", "b", "+", where)]) == expected


def test_edits_of_one_file_apply_in_order() -> None:
    changes = [SmallEdit("f", "b", "+"), SmallEdit("f", "+", "-")]
    assert fetch.apply_edits("f", "abc", changes) == "ab+-c"


@pytest.mark.parametrize(("anchor", "count"), [("int three;", 0), ("int two;", 2)])
def test_missing_or_ambiguous_anchor_names_file_anchor_and_count(
    upstream: Path, tmp_path: Path, anchor: str, count: int
) -> None:
    with pytest.raises(fetch.FetchError) as caught:
        run(upstream, tmp_path / "out", SmallEdit(CONTEXT, anchor, "x"))
    text = str(caught.value)
    assert CONTEXT in text
    assert repr(anchor) in text
    assert f"occurs {count} times" in text
    assert not (tmp_path / "out" / fetch.STAMP).exists()


def test_edit_of_an_absent_file_is_an_error(upstream: Path, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match=r"src/gone\.cpp"):
        run(upstream, tmp_path / "out", SmallEdit("src/gone.cpp", "x", "y"))


def test_unknown_where_is_an_error() -> None:
    with pytest.raises(fetch.FetchError, match="before, after or replace"):
        fetch.apply_edits("f", "abc", [SmallEdit("f", "b", "+", "beside")])


def test_source_folder_is_copied_and_never_edited(upstream: Path, tmp_path: Path) -> None:
    before = (upstream / CONTEXT).read_text()
    assert run(upstream, tmp_path / "out", HOOK)
    assert "// pyssd:" in (tmp_path / "out" / CONTEXT).read_text()
    assert (upstream / CONTEXT).read_text() == before


def test_only_what_the_build_needs_is_extracted(upstream: Path, tmp_path: Path) -> None:
    run(upstream, tmp_path / "out")
    assert not (tmp_path / "out" / "docs").exists()
    assert not (tmp_path / "out" / "common").exists()
    run(upstream, tmp_path / "tools", with_tools=True)
    assert (tmp_path / "tools" / "common" / "common.cpp").exists()


def test_licences_travel_with_the_sources(upstream: Path, tmp_path: Path) -> None:
    run(upstream, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "MIT\n"
    assert (tmp_path / "out" / sources.BINDINGS_LICENCE).read_text() == "MIT of the bindings\n"
    llamafile = (tmp_path / "out" / fetch.LLAMAFILE_LICENCE).read_text()
    assert llamafile == "Copyright Somebody\n\nPermission\n"


def test_second_run_does_nothing(upstream: Path, tmp_path: Path) -> None:
    assert run(upstream, tmp_path / "out", HOOK)
    assert not run(upstream, tmp_path / "out", HOOK)


def test_changed_edit_touches_only_the_files_it_concerns(upstream: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(upstream, out, HOOK)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert run(upstream, out, SmallEdit(CONTEXT, "int one;", " // pyssd: other"))
    changed = {path for path, then in times.items() if path.stat().st_mtime_ns != then}
    assert {path.name for path in changed} == {"llama-context.cpp", fetch.STAMP}


def test_dropped_edit_restores_the_file(upstream: Path, tmp_path: Path) -> None:
    run(upstream, tmp_path / "out", HOOK)
    run(upstream, tmp_path / "out")
    assert (tmp_path / "out" / CONTEXT).read_text() == (upstream / CONTEXT).read_text()


def test_interrupted_run_is_finished_by_the_next(upstream: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(fetch.FetchError):
        run(upstream, out, SmallEdit("src/gone.cpp", "x", "y"))
    assert run(upstream, out, HOOK)
    assert "// pyssd:" in (out / CONTEXT).read_text()


def test_file_of_an_earlier_version_is_removed(upstream: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(upstream, out)
    (upstream / "src/models/old.cpp").unlink()
    run(upstream, out)
    assert not (out / "src/models/old.cpp").exists()


def test_folder_that_is_no_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match=r"is no llama\.cpp"):
        fetch.fetch(tmp_path / "out", source_dir=str(tmp_path), edits=())


def test_sdist_with_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / pins.SDIST_NAME
    path.write_bytes(b"not the sdist")
    with pytest.raises(fetch.FetchError, match=pins.SDIST_SHA256):
        fetch.fetch(tmp_path / "out", sdist=str(path), edits=())


def test_sdist_is_read_and_unsafe_names_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / pins.SDIST_NAME
    root = f"llama_cpp_python-{pins.LLAMA_CPP_PYTHON_VERSION}/"
    with tarfile.open(path, "w:gz") as archive:
        for name in (
            "vendor/llama.cpp/src/llama.cpp",
            "vendor/llama.cpp/src/../../evil",
            "LICENSE.md",
        ):
            member = tarfile.TarInfo(root + name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    monkeypatch.setattr(pins, "SDIST_SHA256", sources.sha256_of(path))
    out = tmp_path / "a" / "out"
    assert fetch.fetch(out, sdist=str(path), edits=())
    assert (out / "src/llama.cpp").read_bytes() == b"abc"
    assert (out / sources.BINDINGS_LICENCE).read_bytes() == b"abc"
    assert not list(tmp_path.rglob("evil"))
    path.unlink()
    assert not fetch.fetch(out, edits=()), "an up-to-date folder needs no sdist"


def test_sdist_in_the_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources.sys, "platform", "linux")
    cached = sources.cache_dir() / pins.SDIST_NAME
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"sdist")
    monkeypatch.setattr(pins, "SDIST_SHA256", sources.sha256_of(cached))
    monkeypatch.setattr(sources, "download", lambda: pytest.fail("downloaded"))
    found = sources.find_source(None, None, fetch.BUILD_PARTS)
    assert isinstance(found, sources.SdistSource)
    assert found.path == cached


def test_failed_download_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(fetch.FetchError, match="PYSSD_LLAMA_SDIST"):
        sources.download()


def test_command_line_reports_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = fetch.main(["--dest", str(tmp_path / "out"), "--sdist", str(tmp_path / "gone.tar.gz")])
    captured = capsys.readouterr()
    assert status == 1
    assert captured.err.startswith("fetch.py: error: ")
    assert captured.err.count("\n") == 1


def test_our_edits_are_few_and_marked() -> None:
    lines = sum(edit.text.strip().count("\n") + 1 for edit in edits.EDITS)
    assert lines <= 60
    assert all("pyssd" in edit.text for edit in edits.EDITS)
