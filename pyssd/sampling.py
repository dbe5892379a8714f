"""The target's sampler chain, and what Python callbacks a request brings along.

The chain is the one llama_cpp.Llama builds (penalties, grammar, mirostat or top-k .. temperature). Two things differ:
`coupling="gumbel"` replaces its last sampler, `dist`, by the core's Gumbel sampler, whose noise depends on (seed,
position, token) alone, so that draft and target see the same noise; and `logit_bias` is a native sampler at the head
of the chain, where llama_cpp copies the whole vocabulary in Python for every token.

Logits processors and stopping criteria are not part of the chain: the engine calls them, once for each emitted token.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyssd import _core
from pyssd.loading import llama_lib

Logits = npt.NDArray[np.float32]
Processor = Callable[[npt.NDArray[np.int32], Logits], Logits]
Criterion = Callable[[npt.NDArray[np.int32], Logits], bool]

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws a seed itself


def chain_address(sampler: Any) -> int:
    """Return the llama_sampler* of a llama_cpp LlamaSampler as an integer."""
    return ctypes.cast(sampler.sampler, ctypes.c_void_p).value or 0


def couple(sampler: Any, seed: int) -> None:
    """Replace a final `dist` by the Gumbel sampler; chains that end in greedy or mirostat stay as they are."""
    chain = sampler.sampler
    last = llama_lib.llama_sampler_chain_n(chain) - 1
    if (
        last < 0
        or llama_lib.llama_sampler_name(llama_lib.llama_sampler_chain_get(chain, last)) != b"dist"
    ):
        return
    llama_lib.llama_sampler_free(llama_lib.llama_sampler_chain_remove(chain, last))
    noise_seed = seed & 0xFFFFFFFF
    if noise_seed == _RANDOM_SEED:
        noise_seed = random.SystemRandom().getrandbits(32)
    gumbel = ctypes.c_void_p(_core.gumbel_sampler(noise_seed))
    llama_lib.llama_sampler_chain_add(chain, ctypes.cast(gumbel, llama_lib.llama_sampler_p_ctypes))


def prepend_bias(sampler: Any, bias: Mapping[int, float], n_vocab: int) -> None:
    """Put a logit-bias sampler at the head of a chain: the bias acts on raw logits, before penalties and grammar."""
    chain = sampler.sampler
    rest = [
        llama_lib.llama_sampler_chain_remove(chain, 0)
        for _ in range(llama_lib.llama_sampler_chain_n(chain))
    ]
    sampler.add_logit_bias(n_vocab, dict(bias))
    for item in rest:
        llama_lib.llama_sampler_chain_add(chain, item)


def read_bias(logit_bias: Mapping[Any, Any], n_vocab: int) -> dict[int, float]:
    """Check a logit_bias argument (keys may be texts, as in OpenAI's JSON).

    Raises:
        ValueError: A token is not in the vocabulary.
    """
    bias = {int(token): float(value) for token, value in logit_bias.items()}
    for token in bias:
        if not 0 <= token < n_vocab:
            raise ValueError(
                f"logit_bias names token {token}, the vocabulary has {n_vocab}; use 0 to {n_vocab - 1}"
            )
    return bias


def check_grammar(vocab: Any, grammar: Any) -> None:
    """Refuse a grammar that llama.cpp cannot read; adding it to a chain would crash.

    Raises:
        ValueError: The text is no grammar, or has no rule of the root's name.
    """
    probe = llama_lib.llama_sampler_init_grammar(
        vocab, grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    )
    if not probe:
        raise ValueError(
            f"the grammar cannot be read or has no rule {grammar._root!r}; check its GBNF text"
        )
    llama_lib.llama_sampler_free(probe)


def joint_processor(processors: Any) -> Processor | None:
    """Make one processor of None, a callable, or an iterable of callables (llama_cpp takes any of them)."""
    if processors is None:
        return None
    steps = (
        [processors]
        if callable(processors) and not isinstance(processors, list)
        else list(processors)
    )

    def run(input_ids: npt.NDArray[np.int32], logits: Logits) -> Logits:
        for step in steps:
            logits = step(input_ids, logits)
        return logits

    return run if steps else None


def apply_processor(
    processor: Processor, input_ids: npt.NDArray[np.int32], logits: Logits
) -> Logits:
    """Run a logits processor on a copy; the raw logits stay as they are.

    Args:
        processor: From `joint_processor`.
        input_ids: int32 [n], evaluated tokens; the token to come is not among them.
        logits: float32 [n_vocab].

    Raises:
        ValueError: It returned something of another shape.
    """
    result = np.asarray(processor(input_ids, logits.copy()), dtype=np.float32)
    if result.shape != logits.shape:
        raise ValueError(
            f"a logits processor returned shape {result.shape}; return float32 {list(logits.shape)}"
        )
    return result
