"""Fixtures: random models made once per session, real models where they have been fetched, a ggml-rpc server."""

from __future__ import annotations

import os

# before any OpenMP library is loaded: spinning worker threads of one test would slow the next one on a small machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent
SERVER_SECONDS = 20.0


@pytest.fixture(scope="session", autouse=True)
def costs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured costs are kept for the run, away from the user's: also those of programs that tests start."""
    folder = tmp_path_factory.mktemp("costs")
    os.environ["PYSSD_COSTS"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model("gemma3", weight_type="Q8_0"): the path of a random model; equal arguments share one file."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[tuple[object, ...], Path] = {}

    def get(family: str = "llama", **options: object) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            path = folder / f"{family}-{len(made)}.gguf"
            made[key] = tiny.build(path, family, **options)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture(
    scope="session", params=["llama", "qwen3moe", "gemma3", "gptneox", "olmo2", "falcon"]
)
def family(request: pytest.FixtureRequest) -> str:
    """The six residual structures that every guarantee is tested on."""
    return str(request.param)


@pytest.fixture(scope="session")
def family_model(family: str, tiny_model: Callable[..., Path]) -> Path:
    """A random model of each of the six families."""
    return tiny_model(family)


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[..., Path]) -> Path:
    """The random llama."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with 24 tokens, for statistics."""
    return tiny.build_toy(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="session")
def tiny_lora(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A random LoRA adapter for tiny_llama."""
    return tiny.build_lora(tmp_path_factory.mktemp("lora") / "lora.gguf", tiny_llama)


@pytest.fixture(scope="session")
def mamba_model(tiny_model: Callable[..., Path]) -> Path:
    """A random recurrent model: its memory cannot drop the last tokens, so speculation is refused."""
    return tiny_model("mamba")


def fetch_module() -> ModuleType:
    """third_party/models.py, which is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location(
        "fetch_models", ROOT / "third_party" / "models.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def real_model(name: str) -> Path:
    """Path of a fetched real model; skips the test with the command that fetches it when it is absent."""
    fetch = fetch_module()
    path: Path = fetch.cache_dir() / next(
        model.filename for model in fetch.MODELS if model.name == name
    )
    if not path.is_file():
        pytest.skip(
            f"{path.name} is not in {path.parent}; run: python third_party/models.py {name}"
        )
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, the small real model of the default tests."""
    return real_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma3-270M Q4_K_M; mark tests that use it with `model`."""
    return real_model("gemma3-270m")


@pytest.fixture(scope="session")
def qwen_05b() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct Q4_K_M; mark tests that use it with `model`."""
    return real_model("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen_15b() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct Q4_K_M; mark tests that use it with `model`."""
    return real_model("qwen2.5-coder-1.5b")


def _server_program() -> Path:
    named = os.environ.get("PYSSD_RPC_SERVER")
    if named:
        return Path(named)
    # beside the libraries, wherever this pyssd is installed
    core = importlib.util.find_spec("pyssd._core")
    if core is not None and core.origin:
        for found in sorted((Path(core.origin).parent / "lib").glob("ggml-rpc-server*")):
            return found
    pytest.skip("the ggml-rpc-server program has not been built; run: make test")


@pytest.fixture(scope="session")
def rpc_server() -> Iterator[str]:
    """host:port of a ggml-rpc server on loopback, stopped after the tests."""
    program = _server_program()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                said = server.communicate()[0].decode(errors="replace")
                pytest.fail(f"{program.name} did not come up on port {port}: {said[-500:]}")
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", port)) == 0
