"""Finds the native libraries, loads them in the right order and imports llama_cpp on top of the patched libllama.

The CPU backend is always pyssd's own. libggml-base, libggml and GPU backends come from an installed llama-cpp-python of the
same version, but only if it has a GPU backend: libraries of one SONAME are loaded once per process, so whichever libggml
is opened binds to the libggml-cpu that is there already. This is the only module that touches the environment.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pyssd.errors import LibraryConflictError, LibraryNotFoundError

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
ABI_VERSION = 1
GPU_BACKENDS = ("cuda", "metal", "vulkan", "hip", "rocm", "musa", "sycl", "cann", "opencl")
SWAP_IMPORTS = (
    "import pyssd first:\n\n    import pyssd\n    import llama_cpp\n\n"
    "instead of\n\n    import llama_cpp\n    import pyssd\n"
)

# Public structs that cross the border between C and ctypes, by the same name on both sides.
STRUCTS = (
    "llama_model_params",
    "llama_context_params",
    "llama_batch",
    "llama_sampler_i",
    "llama_token_data",
    "llama_token_data_array",
)

logger = logging.getLogger("pyssd")
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Libraries:
    """The library files of this process.

    Attributes:
        files: base name ("llama", "ggml", "ggml-base", "ggml-cpu", "ggml-cuda", ...) -> file.
        ggml: "bundled" or "llama-cpp-python", where libggml comes from.
    """

    files: dict[str, Path]
    ggml: str


_lock = threading.RLock()
_loaded: Libraries | None = None
_keep: list[Any] = []  # handles and callbacks that must outlive every call into the libraries


def find_library(base: str, folder: Path) -> Path | None:
    """Return the file of library `base` in folder, whatever the platform calls it, or None."""
    if sys.platform == "win32":
        names = [f"{base}.dll", f"lib{base}.dll"]
    elif sys.platform == "darwin":
        names = [f"lib{base}.0.dylib", f"lib{base}.dylib", f"lib{base}.so"]
    else:
        names = [f"lib{base}.so.0", f"lib{base}.so"]
    if base == "llama":
        names.reverse()  # llama_cpp opens the plain name: both must be the same file
    return next((folder / name for name in names if (folder / name).is_file()), None)


def core_module() -> ModuleType:
    """Import pyssd._core, which links no llama.cpp library."""
    try:
        return importlib.import_module("pyssd._core")
    except ImportError as exc:
        raise LibraryNotFoundError(
            f"pyssd._core cannot be imported ({exc}); reinstall pyssd, or run pip install -e . in a checkout"
        ) from exc


def search_path() -> list[Path]:
    """Return the folders that may hold pyssd's libraries, best first."""
    if override := os.environ.get("PYSSD_LIB_DIR"):
        return [Path(override)]
    folders = [Path(__file__).parent / "lib"]
    # In an editable install the compiled files lie in site-packages, beside _core.
    spec = importlib.util.find_spec("pyssd._core")
    if spec is not None and spec.origin:
        folders.insert(0, Path(spec.origin).parent / "lib")
    return list(dict.fromkeys(folders))


def find_bundle() -> Path:
    """Return the folder with pyssd's own libraries.

    Raises:
        LibraryNotFoundError: no folder holds them all; the message lists the folders searched.
    """
    searched = search_path()
    for folder in searched:
        if all(find_library(base, folder) for base in ("llama", "ggml", "ggml-base", "ggml-cpu")):
            return folder
    listed = ", ".join(str(folder) for folder in searched)
    raise LibraryNotFoundError(
        f"libllama and its ggml libraries are not in any of: {listed}; "
        "reinstall pyssd, or set PYSSD_LIB_DIR to the folder that holds them"
    )


def find_user_ggml() -> Path | None:
    """Return the library folder of the installed llama-cpp-python if it has a GPU backend.

    Raises:
        LibraryNotFoundError: llama-cpp-python is not installed.
        LibraryConflictError: it is another version.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise LibraryNotFoundError(
            f"llama_cpp is not installed; run pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        )
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = LLAMA_CPP_PYTHON_VERSION  # frozen without metadata: checked after the import
    check_version(version)
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    if any(find_library(f"ggml-{backend}", folder) for backend in GPU_BACKENDS):
        return folder
    return None


def check_version(version: str) -> None:
    """Raise LibraryConflictError unless this is the version that pyssd was built from."""
    if version != LLAMA_CPP_PYTHON_VERSION:
        raise LibraryConflictError(
            f"llama-cpp-python {version} is installed but pyssd needs {LLAMA_CPP_PYTHON_VERSION}; "
            f"run pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
        )


def open_library(path: Path) -> ctypes.CDLL:
    """Open one library for the life of the process."""
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as exc:
        raise LibraryNotFoundError(f"{path} cannot be loaded ({exc}); reinstall pyssd") from exc
    _keep.append(handle)
    return handle


def plan_files(bundle: Path, user: Path | None) -> dict[str, Path]:
    """Return base name -> file of the libraries to open, dependencies first."""
    source = user or bundle
    plan: list[tuple[str, Path]] = [("ggml-base", source), ("ggml-cpu", bundle)]
    if user is not None:
        plan += [(f"ggml-{backend}", user) for backend in (*GPU_BACKENDS, "blas")]
    plan += [("ggml-rpc", source), ("ggml", source)]
    found = {base: find_library(base, folder) for base, folder in plan}
    for base in ("ggml-base", "ggml"):
        if found[base] is None:
            raise LibraryNotFoundError(f"lib{base} is not in {source}; reinstall llama-cpp-python")
    found["llama"] = find_library("llama", bundle)
    return {base: path for base, path in found.items() if path is not None}


@contextmanager
def library_path(folder: Path) -> Iterator[None]:
    """Point llama_cpp to folder while it is imported, and no longer: child processes must not inherit it."""
    before = os.environ.get("LLAMA_CPP_LIB_PATH")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LLAMA_CPP_LIB_PATH"]
        else:
            os.environ["LLAMA_CPP_LIB_PATH"] = before


def check_identity(llama_cpp: ModuleType) -> None:
    """Check that llama_cpp runs on the patched library with the layouts that we were compiled for.

    Raises:
        LibraryConflictError: another library, version, ABI or struct layout.
    """
    check_version(str(llama_cpp.__version__))
    low_level = llama_cpp.llama_cpp
    library = low_level._lib
    try:
        abi_version = library.pyssd_abi_version
        size_of = library.pyssd_sizeof
    except AttributeError:
        raise LibraryConflictError(
            f"llama_cpp was imported before pyssd and uses {library._name}, which lacks pyssd's additions; {SWAP_IMPORTS}"
        ) from None
    abi_version.restype = ctypes.c_uint32
    if (found := abi_version()) != ABI_VERSION:
        raise LibraryConflictError(
            f"{library._name} has pyssd ABI {found} but this pyssd needs {ABI_VERSION}; reinstall pyssd"
        )
    size_of.restype, size_of.argtypes = ctypes.c_size_t, [ctypes.c_char_p]
    for struct in STRUCTS:
        c_size, python_size = size_of(struct.encode()), ctypes.sizeof(getattr(low_level, struct))
        if c_size != python_size:
            raise LibraryConflictError(
                f"{struct} has {c_size} bytes in {library._name} but {python_size} in llama_cpp; "
                f"reinstall llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION} and pyssd"
            )


def mapped(base: str) -> list[Path]:
    """Return the files of library `base` that this process has mapped; empty where that cannot be told."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/lib{base}.so" in line}
    return sorted(Path(path.removesuffix(" (deleted)")) for path in paths)


def check_single(base: str, expected: Path) -> None:
    """Raise LibraryConflictError if a file of library `base` other than the expected one is mapped."""
    others = [path for path in mapped(base) if path.resolve() != expected.resolve()]
    if others:
        raise LibraryConflictError(
            f"lib{base} is loaded from {others[0]}, so {expected} cannot be used; {SWAP_IMPORTS}"
        )


def _log_callback() -> Callable[[int, bytes, int | None], None]:
    """Make the function that hands llama.cpp's log lines to logging."""
    levels = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
    last = logging.DEBUG

    def log(level: int, text: bytes | None, _user_data: int | None) -> None:
        nonlocal last
        last = levels.get(level, last)  # level 5 continues the line before
        line = (text or b"").decode("utf-8", "replace").rstrip()
        if line.strip("."):  # dots are a progress bar
            logger.log(last, "%s", line)

    return log


def route_logs(llama_cpp: ModuleType) -> None:
    """Send the logs of llama.cpp and ggml to logging.getLogger("pyssd"); nothing reaches stdout or stderr."""
    importlib.import_module(
        "llama_cpp._logger"
    )  # sets its own callback at import: ours must come later
    callback = llama_cpp.llama_cpp.llama_log_callback(_log_callback())
    _keep.append(callback)
    llama_cpp.llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))  # sets ggml's as well


def load() -> Libraries:
    """Load everything once and return the files in use. Thread safe; later calls cost nothing.

    Raises:
        LibraryNotFoundError: a library or llama-cpp-python is missing.
        LibraryConflictError: another libllama, ggml or version is in this process.
    """
    global _loaded  # noqa: PLW0603 - the libraries themselves are process-wide
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> Libraries:
    core = core_module()
    bundle = find_bundle()
    if (imported := sys.modules.get("llama_cpp")) is not None:
        check_identity(imported)
    user = None if os.environ.get("PYSSD_LIB_DIR") else find_user_ggml()
    files = plan_files(bundle, user)
    for base, path in files.items():
        check_single(base, path)  # before anything is opened, so that a conflict changes nothing
    for path in files.values():
        open_library(path)
    with library_path(bundle):
        try:
            llama_cpp = importlib.import_module("llama_cpp")
        except (OSError, RuntimeError, AttributeError, ImportError) as exc:
            raise LibraryNotFoundError(
                f"llama_cpp cannot be imported with the libraries in {bundle} ({exc}); "
                f"run pip install llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
            ) from exc
    check_identity(llama_cpp)
    for base, path in files.items():
        check_single(base, path)
    route_logs(llama_cpp)
    core.attach(llama_cpp.llama_cpp._lib._handle)
    origin = "bundled" if user is None else "llama-cpp-python"
    return Libraries(files, origin)


def libraries() -> Libraries:
    """Return which file of each library is loaded, loading them if need be."""
    return load()
