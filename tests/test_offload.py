"""Layers on another device, here ggml-rpc servers on loopback: the same rounds give the same text there.

Skipping and graph reuse with offloaded layers are in test_oracle.py and test_reuse.py. A server runs the CPU backend with
its default kernels, so these models have a weight type whose products do not depend on the width of the batch there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_rounds import Chain, decode_drafted, decode_plain
from lowlevel import Opened, random_tokens, rpc_devices

from pyssd import kernels

N_TOKENS = 48


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3"])
@pytest.mark.parametrize("kind", ["greedy", "gumbel"])
def test_drafted_text_equals_plain_with_offloaded_layers(
    tiny_model: Callable[..., Path], rpc_server: str, name: str, share: float, kind: str
) -> None:
    path = tiny_model(name, weight_type="Q8_0")
    with Opened(path) as probe:
        n_layer = 1 + max(block[1] for block in probe.session.blocks())
        reference = sorted({block[4] for block in probe.session.blocks()})
    layers = n_layer + 1 if share == 1.0 else n_layer // 2
    with Opened(path, devices=rpc_devices(rpc_server), n_gpu_layers=layers) as opened:
        session = opened.session
        blocks = session.blocks()
        assert reference == ["CPU"]
        assert any(block[4].startswith("RPC") for block in blocks)
        assert (share == 1.0) == all(block[4].startswith("RPC") for block in blocks)
        prompt = random_tokens(24, opened.n_vocab, 3)

        def chain() -> Chain:
            made = Chain(opened)
            return made.greedy() if kind == "greedy" else made.filters(0.9).gumbel(7)

        with chain() as target:
            plain = decode_plain(opened, target, prompt, N_TOKENS)
        session.set_skip(np.zeros(len(blocks), np.uint8))
        with chain() as target:
            same = decode_drafted(opened, target, prompt, N_TOKENS)
        assert same.tokens == plain.tokens
        assert same.accepted == same.drafted > 0
        some = (np.random.default_rng(5).random(len(blocks)) < 0.4).astype(np.uint8)
        assert some.any()
        session.set_skip(some)
        with chain() as target:
            drafted = decode_drafted(opened, target, prompt, N_TOKENS)
        assert drafted.tokens == plain.tokens


def test_the_cpu_part_of_a_partly_offloaded_model_is_packed(
    tiny_model: Callable[..., Path], rpc_server: str
) -> None:
    path = tiny_model("llama", weight_type="Q8_0")
    with (
        kernels.offered(True, tied=False),
        Opened(path, exact=False, devices=rpc_devices(rpc_server), n_gpu_layers=2) as opened,
    ):
        session = opened.session
        buffers = {buffer for _, _, buffer, _ in session.weights()}
        assert kernels.BUFFER in buffers
        assert any(buffer.startswith("RPC") for buffer in buffers)
        prompt = random_tokens(24, opened.n_vocab, 3)
        with Chain(opened).greedy() as target:
            plain = decode_plain(opened, target, prompt, N_TOKENS)
        session.set_skip(np.eye(1, len(session.blocks()), 3, dtype=np.uint8)[0])
        with Chain(opened).greedy() as target:
            drafted = decode_drafted(opened, target, prompt, N_TOKENS)
        assert drafted.tokens == plain.tokens
