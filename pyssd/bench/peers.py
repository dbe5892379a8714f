"""Other ways to run the same prompt, each in a process of its own, with llama.cpp as `make peers` builds it: unpatched.

A peer gets the tokens that pyssd's plain run had as its prompt, the same threads and the same sampling, and loads the
model for each run; loading and prompt do not count. Rates are tokens behind the first one by the seconds of decoding them,
as pyssd counts its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyssd.bench import peer_server
from pyssd.bench.runner import PeerRun, Sampling
from pyssd.errors import OptionError

DEFAULT_FOLDER = Path("build/peers/bin")
_WORKER = Path(__file__).with_name("peer_worker.py")
_TIMEOUT = 1800.0
# lengths are the defaults of each peer, except where llama-cpp-python's README advises another one on CPUs
_LOOKUP = {"llama_cpp": 0, "prompt-lookup": 10, "prompt-lookup-2": 2}
_SPEC_TYPES = {"ngram-simple": "ngram-simple", "ngram-mod": "ngram-mod", "draft": "draft-simple"}
NAMES = (*_LOOKUP, *_SPEC_TYPES)


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """What all peers of a run share.

    Attributes:
        folder: the programs and libraries of `make peers`.
        model: the model's file.
        draft_model: the file of a smaller model with the same vocabulary, for the peer "draft".
        sampling: as pyssd's runs have it.
        n_threads: of decoding and of the prompt.
        n_ctx: cells of the context.
        n_gpu_layers: layers on the GPU.
    """

    folder: Path
    model: Path
    draft_model: Path | None
    sampling: Sampling
    n_threads: int
    n_ctx: int
    n_gpu_layers: int = 0


def choose(names: Sequence[str] | None, draft_model: object) -> list[str]:
    """Return the peers to run.

    Args:
        names: as the user gave them; None = no peers, none named = all that can run.
        draft_model: what the peer "draft" needs; None = there is none.

    Raises:
        OptionError: a name is unknown, or "draft" has no draft model.
    """
    if names is None:
        return []
    for name in names:
        if name not in NAMES:
            raise OptionError(f"there is no peer {name!r}; known are {', '.join(NAMES)}")
    if "draft" in names and draft_model is None:
        raise OptionError("the peer 'draft' needs a smaller model; name one after --draft-model")
    chosen = names or [name for name in NAMES if name != "draft" or draft_model is not None]
    return list(dict.fromkeys(chosen))


def check_folder(folder: Path, names: Sequence[str]) -> None:
    """Check that the programs and libraries are there.

    Raises:
        OptionError: one is missing; the message says how to build it.
    """
    wanted = []
    if any(name in _SPEC_TYPES for name in names):
        wanted.append(peer_server.PROGRAM)
    if any(name in _LOOKUP for name in names):
        wanted.append(
            {"win32": "llama.dll", "darwin": "libllama.dylib"}.get(sys.platform, "libllama.so")
        )
    for name in wanted:
        if not (folder / name).is_file():
            raise OptionError(
                f"there is no {name} in {folder}; run make peers, or name its folder after --peers-bin"
            )


def runners(names: Sequence[str], setting: PeerSetting) -> dict[str, PeerRun]:
    """Return what runs each peer on the tokens of a prompt; a peer that fails says so in "error"."""

    def runner(name: str) -> PeerRun:
        if name in _LOOKUP:
            return lambda tokens: _bindings(setting, tokens, _LOOKUP[name])
        return lambda tokens: peer_server.run(setting, tokens, _SPEC_TYPES[name])

    return {name: runner(name) for name in names}


def _bindings(setting: PeerSetting, tokens: list[int], lookup: int) -> dict[str, Any]:
    """Run llama_cpp.Llama; lookup is the draft length of LlamaPromptLookupDecoding, 0 = none."""
    job = {
        "model": str(setting.model.resolve()),
        "tokens": tokens,
        "max_tokens": setting.sampling.tokens,
        "temperature": setting.sampling.temperature,
        "seed": setting.sampling.seed,
        "n_threads": setting.n_threads,
        "n_ctx": setting.n_ctx,
        "n_gpu_layers": setting.n_gpu_layers,
        "lookup": lookup,
    }
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(setting.folder.resolve())}
    # run by its path: importing it as a part of pyssd would load pyssd's libraries
    done = _run([sys.executable, str(_WORKER)], stdin=json.dumps(job), env=env)
    if isinstance(done, str):
        return {"error": done}
    try:
        value = json.loads(done.stdout.splitlines()[-1])
        seconds, n_tokens = float(value["seconds"]), int(value["tokens"])
    except (IndexError, KeyError, ValueError):
        return {"error": "its answer cannot be read"}
    rate = (n_tokens - 1) / seconds if n_tokens > 1 and seconds > 0 else None
    return {"tokens_per_second": rate, "tokens": n_tokens, "same_prompt": True}


def _run(
    command: list[str], *, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | str:
    """Run a peer; returns a word about what went wrong where something did."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT:.0f} s"
    except OSError as error:
        return f"it could not be started ({error})"
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        return f"exit status {done.returncode}: {lines[-1][:200]}"
    return done
