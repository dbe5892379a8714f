"""Graphs are built once per context, width and 256 KV cells entered: exactly.

The counts come from process_ubatch inside libllama. A graph may be reused for another skip set only if the plan's id
takes part in the comparison: a draft graph reused for verify would be lossy without any other sign, so it has its own
tests here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from lowlevel import GreedyChain, Hook, Opened, keep_no_graphs, random_tokens, rpc_devices

CELLS = 256  # n_kv grows in these steps, and a graph is built for one n_kv
N_CTX = 1024
KEPT, PLACES = (
    16,
    6,
)  # widths whose graphs are kept, and how many of them (cpp/hook/pyssd-slots.cpp)


class ExpectedBuilds:
    """What a context must build: a graph whenever the window of cells changes, for each width up to `kept`.

    The wider ones take turns in one place.
    """

    def __init__(self, kept: int = 0) -> None:
        self.count = 0
        self.kept = kept
        self.last: dict[int, tuple[int, int]] = {}

    def run(self, width: int, cells: int) -> None:
        """Note a decode of width tokens after which `cells` cells are in use."""
        shape = (width, -(-cells // CELLS))
        place = width if width <= self.kept else 0
        self.count += shape != self.last.get(place)
        self.last[place] = shape


def play_rounds(
    opened: Opened, n_prompt: int, draft_lens: Sequence[int], stop_at: int
) -> tuple[dict[str, int], dict[str, int], float]:
    """Prefill, then rounds with the given draft lengths in turn; builds counted, builds expected, acceptance."""
    session = opened.session
    before = session.graphs_built()
    target, draft = ExpectedBuilds(KEPT), ExpectedBuilds()
    prompt = random_tokens(n_prompt, opened.n_vocab)
    session.prefill(prompt)
    target.run(n_prompt, n_prompt)
    drafted = accepted = rounds = 0
    with GreedyChain() as chain:
        last = session.sample(chain)
        while session.n_past < stop_at:
            n_past, length = session.n_past, draft_lens[rounds % len(draft_lens)]
            proposed = np.zeros(0, np.int32)
            if length:
                proposed, _ = session.draft(chain, last, length)
                assert len(proposed) == length
                for step in range(length):
                    draft.run(1, n_past + step + 1)
            emitted = session.verify(chain, last, proposed)
            target.run(length + 1, n_past + length + 1)
            assert session.n_past == n_past + len(emitted)
            last = int(emitted[-1])
            rounds += 1
            drafted += length
            accepted += len(emitted) - 1
    after = session.graphs_built()
    built = {name: after[name] - before[name] for name in ("target", "draft")}
    return built, {"target": target.count, "draft": draft.count}, accepted / drafted


def test_one_build_per_context_and_window_of_cells(tiny_llama: Path) -> None:
    """Every draft token is accepted here, so the formula of the specification applies as it stands."""
    with Opened(tiny_llama, n_ctx=N_CTX) as opened:
        opened.session.set_skip(None)
        built, _, acceptance = play_rounds(opened, n_prompt=200, draft_lens=[3], stop_at=700)
    assert acceptance == 1.0
    windows = 3  # cells 1-256, 257-512, 513-768
    assert built["draft"] == windows
    assert built["target"] == windows + 1  # prefill and verify differ in width in the first window


def test_two_hundred_rounds_inside_one_window_build_nothing(tiny_llama: Path) -> None:
    with Opened(tiny_llama, n_ctx=N_CTX) as opened:
        opened.session.set_skip(opened.bits(attention=[1], mlp=[2]))
        built, _, _ = play_rounds(opened, n_prompt=8, draft_lens=[1], stop_at=250)
        assert opened.session.counters()["verify_calls"] >= 120
    assert built == {"target": 2, "draft": 1}


@pytest.mark.parametrize("draft_lens", [[3], [3, 3, 1, 1, 2], [5, 0, 2, 0, 0]])
def test_builds_with_rejections_and_changing_widths(
    tiny_llama: Path, draft_lens: list[int]
) -> None:
    with Opened(tiny_llama, n_ctx=N_CTX) as opened:
        opened.session.set_skip(opened.bits(attention=[3], mlp=[0, 3]))
        built, expected, acceptance = play_rounds(
            opened, n_prompt=230, draft_lens=draft_lens, stop_at=560
        )
    assert 0.0 < acceptance < 1.0
    assert built == expected


def test_builds_of_other_families(family: str, tiny_model: Callable[..., Path]) -> None:
    with Opened(tiny_model(family), n_ctx=N_CTX) as opened:
        opened.session.set_skip(opened.bits(attention=[1, 2], mlp=[3]))
        # a sliding window has a cache of its own, whose steps differ once it is full: stay below
        built, expected, _ = play_rounds(opened, n_prompt=60, draft_lens=[3, 3, 2], stop_at=250)
    assert built == expected


@pytest.mark.parametrize("n_gpu_layers", [5, 3])
def test_builds_with_offloaded_layers(tiny_llama: Path, rpc_server: str, n_gpu_layers: int) -> None:
    devices = rpc_devices(rpc_server)
    with Opened(tiny_llama, n_ctx=N_CTX, devices=devices, n_gpu_layers=n_gpu_layers) as opened:
        opened.session.set_skip(opened.bits(attention=[3], mlp=[0]))
        built, expected, _ = play_rounds(opened, n_prompt=240, draft_lens=[3], stop_at=300)
    assert built == expected


def test_more_widths_than_places_are_built_again(tiny_llama: Path) -> None:
    """The one that was not used for longest gives way; memory stays bounded."""
    with Opened(tiny_llama, n_ctx=N_CTX) as opened:
        session = opened.session
        opened.bits()  # the blocks are known
        some = np.arange(1, PLACES + 1, dtype=np.int32)
        session.time_verify(some)
        built, nbytes = session.graphs_built()["target"], session.context_nbytes()["target"]
        session.time_verify(np.tile(some, 3))
        assert session.graphs_built()["target"] == built
        assert session.context_nbytes()["target"] == nbytes
        session.time_verify(np.arange(PLACES + 1, 0, -1, dtype=np.int32))
        # the new one took the place of width 1, which comes last
        assert session.graphs_built()["target"] == built + 2


@pytest.mark.parametrize("n_prompt", [20, 240])
def test_rows_do_not_depend_on_which_graph_is_kept(tiny_llama: Path, n_prompt: int) -> None:
    """A kept graph gives the rows that one built for the pass gives, in every order of widths and across a window."""
    widths = [1, 3, 1, 17, 1, 3, 2, 1, 5, 17, 6, 7, 1, 3, 8, 9, 3]
    tokens = random_tokens(400, 512)
    with Opened(tiny_llama, n_ctx=N_CTX) as kept, Opened(tiny_llama, n_ctx=N_CTX) as fresh:
        for opened in (kept, fresh):
            opened.bits()  # from here on graphs are kept
            opened.session.prefill(tokens[:n_prompt])
        keep_no_graphs(fresh)
        at = n_prompt
        for width in widths:
            rows = []
            for opened in (kept, fresh):
                session = opened.session
                session.verify_begin(int(tokens[at]), tokens[at + 1 : at + width])
                rows.append([session.logits(row).copy() for row in range(width)])
                session.verify_end(width)
            assert np.array_equal(rows[0], rows[1]), width
            at += width
        assert kept.session.graphs_built()["target"] < fresh.session.graphs_built()["target"]


def test_changing_the_skip_set_builds_once_and_setting_it_again_does_not(tiny_llama: Path) -> None:
    with Opened(tiny_llama) as opened, GreedyChain() as chain:
        session = opened.session
        session.prefill(random_tokens(20, 512))
        first, second = opened.bits(attention=[1]), opened.bits(mlp=[1])
        built = []
        for skip in (first, first, first.copy(), second, first, None, None):
            session.set_skip(skip)
            session.draft(chain, 7, 2)
            built.append(session.graphs_built()["draft"])
    assert built == [1, 1, 1, 2, 3, 4, 4]


def test_plan_id_takes_part_in_reuse_on_one_context(tiny_llama: Path) -> None:
    """Same context, same batch shape, same cells; only the plan differs from decode to decode."""
    prompt, token = random_tokens(32, 512), random_tokens(1, 512, seed=9)
    with Opened(tiny_llama) as opened, Hook(opened) as hook:
        blocks = hook.blocks()
        plans = {
            "none": None,
            "first": np.zeros(len(blocks), np.uint8),
            "second": np.zeros(len(blocks), np.uint8),
        }
        plans["first"][2] = 1
        plans["second"][5] = 1

        def step(name: str) -> np.ndarray:
            hook.plan(plans[name])
            logits = hook.logits(token, start=len(prompt))[0]
            hook.rewind(len(prompt))
            return logits

        hook.plan(None)
        hook.logits(prompt)
        n_built = hook.n_built()
        seen = {name: step(name) for name in ("none", "first", "second")}
        assert hook.n_built() == n_built + 3
        for one, other in (("none", "first"), ("none", "second"), ("first", "second")):
            assert np.max(np.abs(seen[one] - seen[other])) > 0.01 * np.max(np.abs(seen[one]))
        # back to each: the very same numbers, not those of the plan before
        for name in ("second", "none", "first"):
            assert np.array_equal(step(name), seen[name])
        n_built = hook.n_built()
        assert np.array_equal(step("first"), seen["first"])
        assert hook.n_built() == n_built


def test_plan_id_takes_part_in_reuse_of_the_draft(tiny_llama: Path) -> None:
    prompt = random_tokens(32, 512)

    def fresh(skip_layer: int) -> tuple[list[int], list[float]]:
        with Opened(tiny_llama) as opened, GreedyChain() as chain:
            opened.session.prefill(prompt)
            opened.session.set_skip(opened.bits(attention=[skip_layer], mlp=[skip_layer]))
            tokens, confidences = opened.session.draft(chain, 7, 4)
        return tokens.tolist(), confidences.tolist()

    expected = {layer: fresh(layer) for layer in (0, 2)}
    assert expected[0] != expected[2]
    with Opened(tiny_llama) as opened, GreedyChain() as chain:
        opened.session.prefill(prompt)
        for layer in (0, 2, 2, 0, 2):
            opened.session.set_skip(opened.bits(attention=[layer], mlp=[layer]))
            tokens, confidences = opened.session.draft(chain, 7, 4)
            assert (tokens.tolist(), confidences.tolist()) == expected[layer]


def test_verify_after_a_draft_of_the_same_width_is_the_target(tiny_llama: Path) -> None:
    """One token drafted, none verified: both contexts run width 1 at the same cells, under different plans."""
    tokens = random_tokens(44, 512)

    def logits_of_rounds(with_drafts: bool) -> list[np.ndarray]:
        with Opened(tiny_llama) as opened, GreedyChain() as chain:
            session = opened.session
            session.prefill(tokens[:32])
            session.set_skip(opened.bits(attention=[1], mlp=[1, 2, 3]))
            rows = []
            for token in tokens[32:]:
                if with_drafts:
                    session.draft(chain, int(token), 1)
                session.verify(chain, int(token), np.zeros(0, np.int32))
                rows.append(session.logits().copy())
        return rows

    for plain, drafted in zip(logits_of_rounds(False), logits_of_rounds(True), strict=True):
        assert np.array_equal(plain, drafted)


def test_plan_id_takes_part_in_reuse_of_the_scout(tiny_llama: Path) -> None:
    tokens = random_tokens(24, 512)
    with Opened(tiny_llama) as opened:
        first, second = opened.bits(attention=[0]), opened.bits(mlp=[0])
        session = opened.session
        before = session.skip_logits(tokens, first)
        other = session.skip_logits(tokens, second)
        again = session.skip_logits(tokens, first)
        assert np.array_equal(before, again)
        assert np.max(np.abs(before - other)) > 0.01 * np.max(np.abs(before))
        assert session.graphs_built()["scout"] == 3
        session.skip_logits(tokens, first)
        assert session.graphs_built()["scout"] == 3
