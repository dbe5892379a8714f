"""pyssd/_loader.py: which files are loaded, and what happens when they cannot be. Each case is a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pins
import pytest

import pyssd
from pyssd import _loader

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the test knows ELF names only")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYSSD_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**inherited, **environment},
    )


def answer(code: str, **environment: str) -> object:
    """Run code that prints JSON as its last line; fail with its stderr if it cannot."""
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The folder with pyssd's own libraries."""
    return _loader.find_bundle()


@pytest.fixture
def stock(tmp_path: Path, bundle: Path) -> Path:
    """A folder that holds an installed llama_cpp with CPU libraries of its own, to be put first on the path."""
    spec = _loader.importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    package = tmp_path / "site" / "llama_cpp"
    shutil.copytree(
        Path(spec.origin).parent, package, ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    (package / "lib").mkdir()
    for name in (
        "libggml-base.so.0",
        "libggml-cpu.so.0",
        "libggml.so.0",
        "libllama.so",
        "libggml-rpc.so.0",
    ):
        shutil.copy(bundle / name, package / "lib" / name)
    # The stock library lacks pyssd's functions: spoil their names in the copy's symbol table.
    library = package / "lib" / "libllama.so"
    library.write_bytes(
        library.read_bytes().replace(b"\0pyssd_abi_version\0", b"\0stock_abi_version\0")
    )
    return package.parent


def test_version_is_the_pinned_one() -> None:
    assert pins.LLAMA_CPP_PYTHON_VERSION == _loader.LLAMA_CPP_PYTHON_VERSION


def test_all_libraries_are_ours(bundle: Path) -> None:
    found = _loader.libraries()
    assert found.ggml == "bundled"
    assert {"llama", "ggml", "ggml-base", "ggml-cpu", "ggml-rpc"} == set(found.files)
    assert {path.parent for path in found.files.values()} == {bundle}


def test_import_is_silent_and_leaves_the_environment_alone() -> None:
    result = run("""
        import os
        before = dict(os.environ)
        import pyssd, llama_cpp
        assert dict(os.environ) == before
        assert pyssd._loader.libraries()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_variable_of_the_user_survives(bundle: Path) -> None:
    code = "import os, json, pyssd; print(json.dumps(os.environ['LLAMA_CPP_LIB_PATH']))"
    assert answer(code, LLAMA_CPP_LIB_PATH="/somewhere") == "/somewhere"


def test_import_leaves_heavy_packages_alone() -> None:
    code = """
        import json, sys, pyssd
        heavy = ("sklearn", "skopt", "hnswlib", "scipy", "matplotlib")
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """
    assert answer(code) == []


@linux_only
def test_stock_library_imported_first_is_a_conflict_that_shows_the_cure(stock: Path) -> None:
    result = run("import llama_cpp\nimport pyssd", PYTHONPATH=str(stock))
    assert result.returncode == 1
    assert "LibraryConflictError" in result.stderr
    swapped = re.search(r"^ *import pyssd\n *import llama_cpp$", result.stderr, re.MULTILINE)
    assert swapped, result.stderr


@linux_only
def test_one_cpu_backend_is_mapped_beside_a_stock_installation(stock: Path, bundle: Path) -> None:
    code = """
        import json, pyssd, llama_cpp
        mapped = {base: [str(p) for p in pyssd._loader.mapped(base)] for base in ("ggml-cpu", "llama")}
        print(json.dumps([mapped, llama_cpp.__file__]))
    """
    got = answer(code, PYTHONPATH=str(stock))
    assert isinstance(got, list)
    mapped, file = got
    assert Path(file).is_relative_to(stock)
    assert mapped == {
        "ggml-cpu": [str((bundle / "libggml-cpu.so.0").resolve())],
        "llama": [str((bundle / "libllama.so").resolve())],
    }


@linux_only
def test_gpu_installation_gives_ggml_but_not_the_cpu_backend(stock: Path, bundle: Path) -> None:
    folder = stock / "llama_cpp" / "lib"
    shutil.copy(
        folder / "libggml-rpc.so.0", folder / "libggml-vulkan.so.0"
    )  # stands in for a GPU backend
    code = """
        import json, pyssd
        found = pyssd._loader.libraries()
        cpu = [str(p) for p in pyssd._loader.mapped("ggml-cpu")]
        print(json.dumps([found.ggml, {base: str(path) for base, path in found.files.items()}, cpu]))
    """
    got = answer(code, PYTHONPATH=str(stock))
    assert isinstance(got, list)
    origin, files, cpu = got
    assert origin == "llama-cpp-python"
    assert cpu == [str((bundle / "libggml-cpu.so.0").resolve())]
    assert files["ggml-cpu"] == str(bundle / "libggml-cpu.so.0")
    assert files["llama"] == str(bundle / "libllama.so")
    for base in ("ggml", "ggml-base", "ggml-vulkan"):
        assert files[base] == str(folder / f"lib{base}.so.0")


@linux_only
def test_foreign_ggml_in_the_process_is_a_conflict(stock: Path) -> None:
    folder = stock / "llama_cpp" / "lib"
    result = run(f"import ctypes\nctypes.CDLL({str(folder / 'libggml-cpu.so.0')!r})\nimport pyssd")
    assert "LibraryConflictError" in result.stderr
    assert str(folder) in result.stderr


def test_other_version_of_the_bindings_is_a_conflict(stock: Path) -> None:
    metadata = stock / "llama_cpp_python-0.3.35.dist-info"
    metadata.mkdir()
    text = "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.35\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    result = run("import pyssd", PYTHONPATH=str(stock))
    assert "LibraryConflictError" in result.stderr
    assert "0.3.35" in result.stderr
    assert f"llama-cpp-python=={pins.LLAMA_CPP_PYTHON_VERSION}" in result.stderr


def test_other_struct_layout_is_a_conflict(stock: Path) -> None:
    file = stock / "llama_cpp" / "llama_cpp.py"
    text = file.read_text(encoding="utf-8")
    grown = text.replace(
        '        ("n_ctx", ctypes.c_uint32),',
        '        ("n_new", ctypes.c_uint64),\n        ("n_ctx", ctypes.c_uint32),',
    )
    assert grown != text
    file.write_text(grown, encoding="utf-8")
    result = run("import pyssd", PYTHONPATH=str(stock))
    assert "LibraryConflictError" in result.stderr
    assert "llama_context_params" in result.stderr


def test_missing_libraries_are_reported_at_first_use_with_the_folders_searched(
    tmp_path: Path,
) -> None:
    code = """
        import pyssd
        pyssd.SkipSet.empty()
        try:
            pyssd.Llama
        except pyssd.errors.LibraryNotFoundError as exc:
            print(exc)
    """
    result = run(code, PYSSD_LIB_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
    assert "reinstall pyssd" in result.stdout


def test_missing_bindings_are_reported(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["llama_cpp"] = None
        import pyssd
        try:
            pyssd._loader.load()
        except ImportError as exc:
            print(type(exc).__name__, exc)
    """
    result = run(code)
    assert result.stdout.startswith("LibraryNotFoundError"), result.stderr
    assert "pip install llama-cpp-python" in result.stdout


@linux_only
def test_folder_of_the_user_wins(bundle: Path, tmp_path: Path) -> None:
    for file in bundle.iterdir():
        shutil.copy(file, tmp_path / file.name)
    code = """
        import json, pyssd
        print(json.dumps(sorted({str(p.parent) for p in pyssd._loader.libraries().files.values()})))
    """
    assert answer(code, PYSSD_LIB_DIR=str(tmp_path)) == [str(tmp_path)]


def test_logs_go_to_logging_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\xff\xff\xff\xff" + b"\xe9" * 64)
    code = f"""
        import json, logging, os
        import pyssd, llama_cpp
        lines = []
        class Collect(logging.Handler):
            def emit(self, record):
                lines.append((record.levelname, record.getMessage()))
        logging.getLogger("pyssd").addHandler(Collect())
        low = llama_cpp.llama_cpp
        model = low.llama_model_load_from_file({str(tmp_path / "bad.gguf")!r}.encode(), low.llama_model_default_params())
        assert not model
        assert any(level == "ERROR" for level, _ in lines), lines
        assert all("\\n" not in text for _, text in lines)
    """
    result = run(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_loading_twice_gives_the_same_answer() -> None:
    assert _loader.load() is _loader.libraries()


def test_public_names() -> None:
    for name in ("Block", "SkipSet", "SpecConfig", "SpecStats", "errors", "__version__"):
        assert hasattr(pyssd, name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = pyssd.nothing
