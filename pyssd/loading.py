"""Load a model through llama_cpp.Llama's own constructor, with parameters that it has no argument for.

`llama_cpp.Llama.__init__` builds the model and context parameters, the model and the context in one body. It asks two
module functions for default parameters. Both are wrapped once, when pyssd is imported; the wrappers consult what the
*calling thread* wants at the moment (`overridden`) and are the stock functions for every other thread and every other
user of llama_cpp. `suppress_stdout_stderr`, which redirects file descriptors 1 and 2 of the whole process, is switched
off in the same way: pyssd's loader sends llama.cpp's log to `logging`, so there is nothing to hide.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyssd import _loader
from pyssd.errors import PyssdError, UnsupportedModelError

_loader.load()  # decides which libllama llama_cpp opens, so it comes before the imports below

# ruff: noqa: E402
# isort: off
import llama_cpp._internals as llama_internals
import llama_cpp._utils as llama_utils
import llama_cpp.llama_cpp as llama_lib
from llama_cpp import llama as llama_module
from llama_cpp import llama_chat_format
# isort: on

__all__ = ["llama_lib", "llama_module"]

# rows of logits a verify pass may ask for; a stock context reserves n_batch of them
_TARGET_OUTPUTS_MAX = 64
_LOG = logging.getLogger("pyssd")


@dataclass(slots=True)
class LoadOptions:
    """Parameters that pyssd sets beside llama_cpp.Llama's arguments.

    Attributes:
        model: Fields of llama_model_params.
        context: Fields of llama_context_params; they also win over what llama_cpp.Llama assigns.
        errors: Filled with llama.cpp's error lines while the load runs.
    """

    model: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class _ThreadState(threading.local):
    options: LoadOptions | None = None
    quiet: int = 0


_THREAD = _ThreadState()


class ContextParams(llama_lib.llama_context_params):  # type: ignore[misc]
    """llama_context_params whose pinned fields keep their value: llama_cpp.Llama assigns some after the defaults."""

    def pin(self, fields: dict[str, Any]) -> None:
        """Set fields for good."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.__dict__["pinned"] = frozenset(fields)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__.get("pinned", ()):
            super().__setattr__(name, value)


def _install() -> None:
    if getattr(llama_lib.llama_model_default_params, "pyssd", False):
        return
    stock_model, stock_context = (
        llama_lib.llama_model_default_params,
        llama_lib.llama_context_default_params,
    )

    def llama_model_default_params() -> Any:
        params = stock_model()
        for name, value in (_THREAD.options.model if _THREAD.options else {}).items():
            setattr(params, name, value)
        return params

    def llama_context_default_params() -> Any:
        params = stock_context()
        if _THREAD.options is None:
            return params
        pinned = ContextParams.from_buffer_copy(params)
        pinned.pin(_THREAD.options.context)
        return pinned

    class SuppressStdoutStderr(llama_utils.suppress_stdout_stderr):  # type: ignore[misc]
        def __init__(self, disable: bool = True) -> None:
            super().__init__(disable=disable or _THREAD.quiet > 0)

    llama_model_default_params.pyssd = True  # type: ignore[attr-defined]
    llama_lib.llama_model_default_params = llama_model_default_params
    llama_lib.llama_context_default_params = llama_context_default_params
    for module in (llama_module, llama_internals, llama_chat_format):
        module.suppress_stdout_stderr = SuppressStdoutStderr


_install()


@contextlib.contextmanager
def no_redirection() -> Iterator[None]:
    """Keep this thread's llama_cpp calls from redirecting the process's standard output and error."""
    _THREAD.quiet += 1
    try:
        yield
    finally:
        _THREAD.quiet -= 1


class _ErrorLines(logging.Handler):
    """Collects what llama.cpp reports as errors in one thread."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.get_ident() == self._thread:
            self._lines.append(record.getMessage().strip())


@contextlib.contextmanager
def overridden(options: LoadOptions) -> Iterator[None]:
    """Give llama_cpp.Llama objects that this thread makes inside the block the parameters of `options`."""
    outer, _THREAD.options = _THREAD.options, options
    handler = _ErrorLines(options.errors)
    _LOG.addHandler(handler)
    try:
        with no_redirection():
            yield
    finally:
        _LOG.removeHandler(handler)
        _THREAD.options = outer


def load_options(
    *,
    reference: bool,
    packed: bool,
    flash_attn: bool | None,
    all_rows: bool,
    n_batch: int,
    progress_callback: Callable[[float], bool] | None,
) -> LoadOptions:
    """Choose the parameters behind llama_cpp.Llama's arguments.

    Args:
        reference: Keep weights in their file layout: upstream's repacked products depend on the width of the batch.
        packed: Weights on the CPU are offered pyssd's layout, also those of a partly offloaded model.
        flash_attn: None leaves it to llama.cpp, which turns it on where the model and the device allow it.
        all_rows: Reserve logits for every row of a batch (logits_all, embedding).
        n_batch: Rows of a batch, 0 if not known yet.
        progress_callback: Called with 0..1 while weights load; False aborts.
    """
    options = LoadOptions()
    if reference:
        options.model["use_extra_bufts"] = False
    if packed:
        # a GPU's host buffer type would come before the packed one
        options.model["no_host"] = True
    if progress_callback is not None:
        options.model["progress_callback"] = llama_lib.llama_progress_callback(
            lambda progress, _: bool(progress_callback(progress))
        )
    if flash_attn is None:
        options.context["flash_attn_type"] = llama_lib.LLAMA_FLASH_ATTN_TYPE_AUTO
    if not all_rows:
        options.context["n_outputs_max"] = (
            min(_TARGET_OUTPUTS_MAX, n_batch) if n_batch else _TARGET_OUTPUTS_MAX
        )
    return options


def physical_cores() -> int:
    """Count the physical cores this process may use: SMT siblings once, affinity and a cgroup's quota respected."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = affinity(0) if affinity is not None else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cpu_quota()))


def _siblings(cpu: int) -> str:
    try:
        return (
            Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            .read_text()
            .strip()
        )
    except OSError:  # no sysfs (macOS, Windows): take every CPU for a core
        return str(cpu)


def _cpu_quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return os.cpu_count() or 1


def flash_attention_is_on(ctx: int) -> bool:
    """Tell whether a context runs flash attention, "auto" resolved."""
    function = llama_lib._lib.pyssd_flash_attn
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32
    return bool(function(ctx))


class Progress:
    """The user's progress callback; remembers why a load stopped, since llama.cpp only says that it did."""

    def __init__(self, callback: Callable[[float], bool] | None) -> None:
        self._callback = callback
        self._stopped_at: float | None = None
        self._error: BaseException | None = None

    def __call__(self, progress: float) -> bool:
        try:
            go_on = self._callback is None or self._callback(progress) is not False
        except BaseException as error:  # it must not travel through C
            self._error, go_on = error, False
        if not go_on:
            self._stopped_at = progress
        return go_on

    def raise_if_stopped(self, path: str) -> None:
        """Raise what the callback raised, or UnsupportedModelError if it said stop."""
        if self._error is not None:
            raise self._error
        if self._stopped_at is not None:
            raise UnsupportedModelError(
                f"loading {path} was stopped by progress_callback at {self._stopped_at:.0%}"
            )


def load_error(upstream: Mapping[str, Any], lines: Sequence[str], error: Exception) -> PyssdError:
    path = upstream["model_path"]
    detail = next((line.split(": ", 1)[-1] for line in lines if line), str(error))
    unknown = next((line for line in lines if "unknown model architecture" in line), None)
    if unknown is not None:
        name = unknown.rsplit("'", 2)[-2] if unknown.count("'") >= 2 else "?"
        return UnsupportedModelError(
            f"{path} has architecture {name!r}, which this llama.cpp does not know; update pyssd"
        )
    if "llama_context" in str(error):
        return UnsupportedModelError(
            f"no context could be made for {path} ({detail}); check n_ctx, type_k, type_v, flash_attn and free memory"
        )
    if "LoRA" in str(error):
        return UnsupportedModelError(
            f"{upstream['lora_path']} is no LoRA adapter for {path} ({detail}); make one for this model"
        )
    return UnsupportedModelError(
        f"{path} cannot be loaded ({detail}); check the file and the arguments"
    )
