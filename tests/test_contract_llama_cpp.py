"""What pyssd.Llama relies on in llama_cpp 0.3.36: names, signatures, and the order in which it uses them."""

from __future__ import annotations

import ctypes
import inspect

import pytest

from pyssd import Llama
from pyssd.loading import ContextParams, llama_lib, llama_module

import llama_cpp
from llama_cpp import _internals, _utils

OWN = (
    "speculative skip_set profile exact coupling kernels selector progress_callback".split()  # noqa: SIM905
)
STOCK = llama_module.Llama


def parameters(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_version_is_the_pinned_one() -> None:
    assert llama_cpp.__version__ == "0.3.36"


def test_constructor_takes_every_argument_of_llama_cpp_with_its_default() -> None:
    stock, ours = parameters(STOCK.__init__), parameters(Llama.__init__)
    del stock["kwargs"], ours["unknown"]
    assert list(ours) == [*stock, *OWN]
    for name, parameter in stock.items():
        if name != "flash_attn":  # None = on where the model allows it
            assert ours[name].default == parameter.default, name
            assert ours[name].kind == parameter.kind, name


def test_generate_has_the_same_signature() -> None:
    stock, ours = parameters(STOCK.generate), parameters(Llama.generate)
    assert list(ours) == list(stock)
    assert [p.default for p in ours.values()] == [p.default for p in stock.values()]


@pytest.mark.parametrize("name", ["create_completion", "__call__", "create_chat_completion"])
def test_request_methods_add_per_call_options_only(name: str) -> None:
    stock, ours = parameters(getattr(STOCK, name)), parameters(getattr(Llama, name))
    assert list(ours) == [*stock, "speculative", "skip_set"]


def test_create_completion_and_call_take_the_same_positional_arguments() -> None:
    assert list(parameters(STOCK.__call__)) == list(parameters(STOCK.create_completion))


def test_completion_passes_what_generate_needs_by_keyword() -> None:
    source = inspect.getsource(STOCK._create_completion)
    for text in (
        "for token in self.generate(",
        "stopping_criteria=stopping_criteria",
        "self._input_ids, self._scores[-1, :]",
        "exceed context window",
        'finish_reason = "length"',
    ):
        assert text in source, text


def test_constructor_asks_module_functions_for_defaults_and_assigns_flash_attention() -> None:
    source = inspect.getsource(STOCK.__init__)
    for text in (
        "llama_cpp.llama_model_default_params()",
        "llama_cpp.llama_context_default_params()",
        "self.context_params.flash_attn_type =",
        "internals.LlamaContext(",
        "suppress_stdout_stderr(disable=verbose)",
        "n_threads or ",
        "self._stack.callback(",
    ):
        assert text in source, text
    for module in (llama_module, _internals):
        assert issubclass(module.suppress_stdout_stderr, _utils.suppress_stdout_stderr)


def test_chain_order_is_the_one_bias_and_coupling_are_fitted_to() -> None:
    source = inspect.getsource(STOCK._init_sampler)
    order = [
        "add_custom", "add_penalties", "add_grammar", "add_greedy", "add_mirostat(", "add_mirostat_v2", "add_top_k",
        "add_typical", "add_top_p", "add_min_p", "add_temp", "add_dist(self._seed)\n        return",
    ]  # fmt: skip
    places = [source.index(name) for name in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "name",
    [
        "llama_sampler_chain_n", "llama_sampler_chain_get", "llama_sampler_chain_remove", "llama_sampler_chain_add",
        "llama_sampler_name", "llama_sampler_free", "llama_sampler_accept", "llama_sampler_init_grammar",
        "llama_state_set_data", "llama_memory_clear", "llama_get_memory", "llama_progress_callback",
    ],
)  # fmt: skip
def test_low_level_function_exists(name: str) -> None:
    assert callable(getattr(llama_lib, name))


def test_struct_fields_that_are_set_behind_the_arguments_exist() -> None:
    model = {name for name, *_ in llama_lib.llama_model_params._fields_}
    context = {name for name, *_ in llama_lib.llama_context_params._fields_}
    assert {"use_extra_bufts", "progress_callback"} <= model
    assert {"flash_attn_type", "n_outputs_max"} <= context


def test_pinned_params_are_the_stock_struct_byte_for_byte() -> None:
    assert ctypes.sizeof(ContextParams) == ctypes.sizeof(llama_lib.llama_context_params)
    params = ContextParams()
    params.pin({"flash_attn_type": -1})
    params.flash_attn_type = 0
    params.n_ctx = 77
    assert (params.flash_attn_type, params.n_ctx) == (-1, 77)
    stock = llama_lib.llama_context_params.from_buffer_copy(params)
    assert (stock.flash_attn_type, stock.n_ctx) == (-1, 77)


def test_default_params_are_stock_outside_of_a_load() -> None:
    assert type(llama_lib.llama_context_default_params()) is llama_lib.llama_context_params
    assert llama_lib.llama_context_default_params().n_outputs_max == 0
    assert llama_lib.llama_model_default_params().use_extra_bufts


def test_attributes_that_chat_handlers_use_exist(tiny_llama: object) -> None:
    with Llama(str(tiny_llama), n_ctx=256, n_threads=1, verbose=False) as llm:
        for name in (
            "n_tokens", "input_ids", "n_batch", "ctx", "model", "_ctx", "_model", "_n_ctx", "_n_vocab", "_logits_all",
            "_requires_eval", "_seed", "chat_format", "chat_handler", "_chat_handlers", "metadata", "cache", "tokenizer_",
        ):  # fmt: skip
            assert hasattr(llm, name), name
