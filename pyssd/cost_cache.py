"""The cost cache: what was measured for a file on this machine, so that it is measured once.

One JSON file for each combination of model file, library, kernels, devices, threads and KV memory. A file that cannot be
used is measured anew; a folder that cannot be written is no error. What was observed after the measurement is not kept:
it belongs to the moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyssd.config import SpecConfig
from pyssd.cost import CostModel
from pyssd.measure import MIN_CELLS, Timed, measure_costs
from pyssd.model_file import model_files
from pyssd.models import user_cache_dir
from pyssd.skipset import Block

_FORMAT = 2
_HEAD, _TAIL = 1 << 20, 1 << 16  # bytes of a file that its fingerprint reads
_MAX_FILES = 256
_LOG = logging.getLogger("pyssd")


def costs_dir() -> Path:
    """Return the folder of the cost cache: PYSSD_COSTS, else pyssd/costs in the user's cache."""
    chosen = os.environ.get("PYSSD_COSTS")
    return Path(chosen).expanduser() if chosen else user_cache_dir() / "costs"


def costs_of(llm: Any, session: Timed, speculative: object, *, exact: bool) -> CostModel:
    """Return the costs of a pyssd.Llama that has just been loaded; where nothing drafts, measuring is not worth the time.

    Args:
        llm: The object, its context open.
        session: Its session.
        speculative: Its option.
        exact: Its reference mode is on.
    """
    if SpecConfig.of(speculative)[0] == "off":
        return CostModel(None, llm._blocks)
    return load_costs(
        session,
        llm._blocks,
        model_path=llm.model_path,
        n_vocab=llm._n_vocab,
        n_ctx=llm._n_ctx,
        settings=cost_settings(llm, exact=exact),
    )


def load_costs(
    session: Timed,
    blocks: Sequence[Block],
    *,
    model_path: str | os.PathLike[str],
    n_vocab: int,
    n_ctx: int,
    settings: Mapping[str, object],
    seconds: float = 1.5,
) -> CostModel:
    """Return the costs of a model from the cache, else measure and keep them.

    Measuring overwrites the logits of the last pass: call it before a prompt is evaluated.

    Args:
        session: The model's session.
        blocks: Its blocks.
        model_path: The file, the first part of a split model.
        n_vocab: Rows of the LM head.
        n_ctx: Cells of the context.
        settings: What else the times depend on, see cost_settings.
        seconds: Wall time that measuring may take.

    Raises:
        Cancelled: cancel() was called.
    """
    if session.refusal is not None:
        return CostModel(None, blocks)
    key = cost_key(model_path, blocks, settings)
    costs = read_costs(key, blocks)
    if costs is not None and (costs.is_complete_for(n_ctx, least=2 * MIN_CELLS)):
        return costs
    costs = measure_costs(session, blocks, n_vocab, n_ctx=n_ctx, seconds=seconds)
    if costs.is_worth_keeping:
        write_costs(key, costs)
    return costs


def cost_settings(llm: Any, *, exact: bool) -> dict[str, object]:
    """Return what the times of a pyssd.Llama depend on beside its file and its blocks.

    Args:
        llm: The object, its context open.
        exact: Its reference mode is on.
    """
    from pyssd import _loader, kernels
    from pyssd.loading import flash_attention_is_on

    params = llm.context_params
    files = _loader.libraries().files
    return {
        "kernels": f"pyssd {kernels.instruction_set()}" if llm._packed else "upstream",
        "exact": exact,
        "library": {name: _stamp(path) for name, path in sorted(files.items())},
        "threads": [params.n_threads, params.n_threads_batch],
        "kv": [params.type_k, params.type_v, bool(params.offload_kqv)],
        "flash_attn": flash_attention_is_on(llm._ctx.ctx),
        "n_ubatch": params.n_ubatch,
        "lora": llm.lora_path,
    }


def cost_key(
    model_path: str | os.PathLike[str], blocks: Sequence[Block], settings: Mapping[str, object]
) -> dict[str, Any]:
    """Return all that the times depend on, as JSON holds it."""
    key = {
        "model": fingerprint(model_path),
        "machine": _machine(),
        "devices": sorted({block.device for block in blocks}),
        "blocks": [[block.kind, block.nbytes, block.device] for block in blocks],
        **settings,
    }
    made: dict[str, Any] = json.loads(json.dumps(key))
    return made


def fingerprint(model_path: str | os.PathLike[str]) -> dict[str, object]:
    """Return what tells a model file from others in a millisecond: the sizes of its parts and a hash of both ends."""
    paths = model_files(model_path)
    digest = hashlib.sha256()
    with Path(paths[0]).open("rb") as file:
        digest.update(file.read(_HEAD))
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        digest.update(file.read(_TAIL))
    return {"nbytes": [path.stat().st_size for path in paths], "sha256": digest.hexdigest()}


def read_costs(key: Mapping[str, Any], blocks: Sequence[Block]) -> CostModel | None:
    """Return what the cache holds for a key; None, with a line in the log if there is a file, when it cannot be used."""
    path = _path(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _LOG.warning("the cost cache %s is ignored: it cannot be read (%s)", path, error)
        return None
    try:
        stored = json.loads(text)
        if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
            msg = "it has another form"
            raise ValueError(msg)
        if stored.get("key") != key:
            msg = "it is for another model or machine"
            raise ValueError(msg)
        return CostModel.from_dict(stored["costs"], blocks)
    except (ValueError, KeyError, RecursionError) as error:
        _LOG.warning("the cost cache %s is ignored: %s", path, error)
        return None


def write_costs(key: Mapping[str, Any], costs: CostModel) -> None:
    """Keep a measurement; does nothing where the folder cannot be written."""
    path = _path(key)
    text = json.dumps({"format": _FORMAT, "key": key, "costs": costs.as_dict()}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".costs-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)  # noqa: PTH105  (atomic: others see the former file or this one)
        except OSError:
            os.unlink(name)  # noqa: PTH108
            raise
        _prune(path.parent)


def _prune(folder: Path) -> None:
    """Forget what has not been measured for longest: every new build of the library makes new files."""
    by_age = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-_MAX_FILES]:
        path.unlink()


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return costs_dir() / f"{digest[:32]}.json"


def _stamp(path: str | os.PathLike[str]) -> str:
    """What changes when a library is built or installed anew."""
    try:
        status = Path(path).stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _machine() -> str:
    """Name of the processor, where the system tells it: home folders travel between machines."""
    name = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", "rb") as file:  # noqa: PTH123
        for line in file.read(1 << 12).splitlines():
            if line.startswith(b"model name"):
                return f"{name} {line.partition(b':')[2].strip().decode(errors='replace')}"
    return f"{name} {platform.processor()}"
