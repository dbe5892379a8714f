"""One request to llama.cpp's own server, started for it and stopped behind it.

So nothing of an earlier answer is left to draft from, as nothing is for pyssd.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyssd.bench.peers import PeerSetting

PROGRAM = "llama-server.exe" if sys.platform == "win32" else "llama-server"
_HOST = "127.0.0.1"
_LOAD_SECONDS = 300.0
_ANSWER_SECONDS = 1800.0
_POLL_SECONDS = 0.05


def run(setting: PeerSetting, tokens: Sequence[int], spec_type: str) -> dict[str, Any]:
    """Run a prompt with one of llama.cpp's types of speculation; a failure is said in "error"."""
    with tempfile.TemporaryFile() as log:
        port = _free_port()
        try:
            process = subprocess.Popen(
                command(setting, spec_type, port), stdout=log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            return {"error": f"it could not be started ({error})"}
        try:
            if not _is_ready(process, port):
                return {"error": f"it did not come up: {_last_line(log)}"}
            status, answer = _post(port, request(setting, tokens))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return {"error": f"it did not answer ({error or type(error).__name__})"}
        finally:
            process.kill()
            process.wait()
    if status != http.client.OK:
        return {"error": f"it answered with status {status}: {str(answer)[:200]}"}
    return read(answer, n_prompt=len(tokens))


def command(setting: PeerSetting, spec_type: str, port: int) -> list[str]:
    """Return the server's command line."""
    threads = str(setting.n_threads)
    options = {
        "-m": str(setting.model),
        "-c": str(setting.n_ctx),
        "-np": "1",
        "-t": threads,
        "-tb": threads,
        "-ngl": str(setting.n_gpu_layers),
        "--host": _HOST,
        "--port": str(port),
        "--spec-type": spec_type,
    }
    if spec_type == "draft-simple":
        options |= {"-md": str(setting.draft_model), "-td": threads, "-tbd": threads}
    program = (setting.folder / PROGRAM).resolve()
    return [str(program), *(word for pair in options.items() for word in pair)]


def request(setting: PeerSetting, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request to /completion."""
    sampling = setting.sampling
    body: dict[str, Any] = {
        "prompt": list(tokens),
        "n_predict": sampling.tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "cache_prompt": False,
    }
    if sampling.temperature <= 0:
        # the least work that is greedy
        return {**body, "samplers": ["top_k"], "top_k": 1}
    return {**body, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def read(answer: Any, *, n_prompt: int) -> dict[str, Any]:
    """Read the figures of an answer; its rate leaves out the first token, as pyssd's does."""
    try:
        times = answer["timings"]
        n_generated, rate = int(times["predicted_n"]), float(times["predicted_per_second"])
        evaluated = int(times["prompt_n"])
    except (KeyError, TypeError, ValueError):
        return {"error": "its answer has no times"}
    return {
        "tokens_per_second": rate if n_generated > 1 and rate > 0 else None,
        "tokens": n_generated,
        "same_prompt": evaluated == n_prompt,
        "drafted": int(times.get("draft_n", 0)),
        "accepted": int(times.get("draft_n_accepted", 0)),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the model is loaded; False if the server has ended or takes too long."""
    deadline = time.monotonic() + _LOAD_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(_HOST, port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return True
        except (OSError, http.client.HTTPException):
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(_POLL_SECONDS)
    return False


def _post(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_ANSWER_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return Path(lines[-1]).name[:200] if lines else "it said nothing"
