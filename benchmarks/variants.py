"""The CPU backend built for other instruction sets than this machine's, for `benchmarks/kernels.py --variant`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pyssd import _loader

# what a build knows when it must not look at the machine; both kinds of kernels are built so
VARIANTS = {"avx2": [], "avx2-vnni": ["-DGGML_AVX_VNNI=ON"]}


def build_variant(name: str) -> Path:
    """Build the CPU backend for another instruction set; returns a folder with it and the installed other libraries."""
    root = Path(__file__).resolve().parent.parent
    build = root / "build" / name
    libs = build / "lib"
    scripts = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    configure = ["cmake", "-S", str(root), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DGGML_NATIVE=OFF", *VARIANTS[name]]
    for command in (configure, ["cmake", "--build", str(build), "--target", "ggml-cpu", "-j2"]):
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    libs.mkdir(exist_ok=True)
    for path in _loader.find_bundle().iterdir():
        if path.is_file():
            shutil.copy2(path, libs)
    built = _loader.find_library("ggml-cpu", build / "bin")
    replaced = _loader.find_library("ggml-cpu", libs)
    if built is None or replaced is None:
        sys.exit(f"no ggml-cpu in {build / 'bin'}")
    shutil.copy2(built, replaced)
    return libs


def measure_variant(name: str, out: Path) -> None:
    """Run this script's own arguments on another build and put its results under `variants`."""
    libs = build_variant(name)
    own = libs.parent / "kernels.json"
    at = sys.argv.index("--variant")
    rest = sys.argv[1:at] + sys.argv[at + 2 :]
    command = [sys.executable, sys.argv[0], *rest, "--out", str(own)]
    subprocess.run(command, env={**os.environ, "PYSSD_LIB_DIR": str(libs)}, check=True)
    results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    results.setdefault("variants", {})[name] = json.loads(own.read_text(encoding="utf-8"))
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
