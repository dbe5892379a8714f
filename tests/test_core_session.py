"""Session: drafts never change what is emitted, and KV holds the target's own cells between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from core_rounds import (
    NO_DRAFT,
    Chain,
    context_params,
    decode_drafted,
    decode_plain,
    is_end,
    n_cells,
)
from lowlevel import Opened, api, random_tokens

from pyssd import errors

CHAINS: dict[str, Callable[[Chain], Chain]] = {
    "greedy": lambda c: c.greedy(),
    "gumbel": lambda c: c.filters(0.9).gumbel(),
    "gumbel alone": lambda c: c.gumbel(7),
    "penalties": lambda c: c.penalties().filters(0.8).gumbel(),
    "grammar greedy": lambda c: c.grammar().greedy(),
    "grammar": lambda c: c.penalties().grammar().filters(1.0).gumbel(),
    "bias": lambda c: c.bias(70, 5.0).filters(1.0).gumbel(),
    "dist": lambda c: c.filters(0.8).dist(),
}


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Iterator[Opened]:
    with Opened(tiny_llama, n_ctx=1024, n_ubatch=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Opened]:
    with Opened(smollm2, n_ctx=1024) as opened:
        yield opened


def random_bits(opened: Opened, share: float, seed: int = 0) -> np.ndarray:
    n_blocks = len(opened.session.blocks())
    return (np.random.default_rng(seed).random(n_blocks) < share).astype(np.uint8)


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_output_equals_plain_decoding_with_any_skip_set(
    llama: Opened, kind: str, share: float
) -> None:
    prompt = random_tokens(20, llama.n_vocab)
    with CHAINS[kind](Chain(llama)) as chain:
        plain = decode_plain(llama, chain, prompt, 60)
    llama.session.set_skip(random_bits(llama, share))
    with CHAINS[kind](Chain(llama)) as chain:
        drafted = decode_drafted(llama, chain, prompt, 60)
    assert drafted.tokens == plain.tokens
    assert drafted.drafted > 0


@pytest.mark.parametrize("kind", [kind for kind in CHAINS if kind != "dist"])
def test_every_draft_is_accepted_with_an_empty_skip_set(llama: Opened, kind: str) -> None:
    llama.session.set_skip(None)
    with CHAINS[kind](Chain(llama)) as chain:
        drafted = decode_drafted(llama, chain, random_tokens(20, llama.n_vocab, 1), 60)
    assert drafted.accepted == drafted.drafted > 0


def test_all_families_emit_the_plain_text(family_model: Path) -> None:
    with Opened(family_model, n_ctx=512) as opened:
        prompt = random_tokens(20, opened.n_vocab)
        with CHAINS["gumbel"](Chain(opened)) as chain:
            plain = decode_plain(opened, chain, prompt, 40)
        opened.session.set_skip(random_bits(opened, 0.4))
        with CHAINS["gumbel"](Chain(opened)) as chain:
            assert decode_drafted(opened, chain, prompt, 40).tokens == plain.tokens


@pytest.mark.parametrize("n_prompt", [40, 300, 600])
@pytest.mark.parametrize("kind", ["greedy", "gumbel"])
def test_real_model_accepts_every_draft_of_an_empty_skip_set(
    real: Opened, kind: str, n_prompt: int
) -> None:
    real.session.set_skip(None)
    with CHAINS[kind](Chain(real)) as chain:
        drafted = decode_drafted(real, chain, random_tokens(n_prompt, real.n_vocab), 24)
    assert drafted.accepted == drafted.drafted > 0


def test_real_model_emits_the_plain_text_with_a_skip_set(real: Opened) -> None:
    prompt = random_tokens(40, real.n_vocab)
    for kind in ("greedy", "gumbel"):
        with CHAINS[kind](Chain(real)) as chain:
            plain = decode_plain(real, chain, prompt, 40)
        real.session.set_skip(random_bits(real, 0.1))
        with CHAINS[kind](Chain(real)) as chain:
            drafted = decode_drafted(real, chain, prompt, 40)
        assert drafted.tokens == plain.tokens
        assert 0 < drafted.accepted < drafted.drafted


def test_coupled_noise_beats_independent_drafts(real: Opened) -> None:
    """Draft and target see the same noise at a position; with another seed drafts are independent draws."""
    session = real.session
    session.set_skip(real.bits(mlp=[11, 14], attention=[17]))
    accepted = {"coupled": 0, "independent": 0}
    drafted = 0
    with Chain(real).filters(1.0).gumbel(1) as chain, Chain(real).filters(1.0).gumbel(2) as other:
        tokens = decode_plain(real, chain, random_tokens(40, real.n_vocab), 100).tokens
        session.rewind(40)
        for last, following in pairwise(tokens):
            drafted += 1
            for name, sampler in (("coupled", chain), ("independent", other)):
                draft, _ = session.draft(sampler.address, last, 1)
                accepted[name] += int(draft[0] == following)
            session.prefill(np.array([last], np.int32))
    assert accepted["coupled"] > accepted["independent"] + 0.1 * drafted


def test_sampling_in_steps_equals_verify(llama: Opened) -> None:
    session = llama.session
    session.set_skip(random_bits(llama, 0.3))
    prompt = random_tokens(20, llama.n_vocab, 2)
    with CHAINS["grammar"](Chain(llama)) as chain:
        whole = decode_drafted(llama, chain, prompt, 40)
    with CHAINS["grammar"](Chain(llama)) as chain:
        session.rewind(0)
        session.prefill(prompt)
        tokens = [session.sample(chain.address)]
        while len(tokens) < 40 and not is_end(llama, tokens[-1]):
            draft, _ = session.draft(chain.address, tokens[-1], min(4, 40 - len(tokens)))
            session.verify_begin(tokens[-1], draft)
            for row in range(len(draft) + 1):
                tokens.append(session.sample(chain.address, row))
                if row == len(draft) or tokens[-1] != draft[row] or is_end(llama, tokens[-1]):
                    break
            session.verify_end(row + 1)
            assert n_cells(llama) == session.n_past
    assert tokens[:40] == whole.tokens


def test_abandoned_round_is_dropped(llama: Opened) -> None:
    session = llama.session
    session.rewind(0)
    session.prefill(random_tokens(20, llama.n_vocab))
    session.verify_begin(5, np.array([6, 7], np.int32))
    assert n_cells(llama) == 23
    with Chain(llama).greedy() as chain:
        session.verify(chain.address, 5, NO_DRAFT)
    assert n_cells(llama) == session.n_past == 21


def test_python_sampler_sees_emitted_tokens_only(llama: Opened) -> None:
    """A logits processor runs once per emitted token, never on a draft."""
    calls = []
    llama.session.set_skip(random_bits(llama, 0.5))
    prompt = random_tokens(20, llama.n_vocab)
    with Chain(llama).custom(lambda cur: calls.append(1)).greedy() as chain:
        drafted = decode_drafted(llama, chain, prompt, 30)
    assert len(calls) == 1 + sum(len(emitted) for _, emitted in drafted.drafts)
    with Chain(llama).greedy() as chain:
        assert decode_plain(llama, chain, prompt, 30).tokens == drafted.tokens


@pytest.mark.parametrize("kind", ["mirostat", "xtc"])
def test_samplers_with_state_of_their_own_stay_exact(llama: Opened, kind: str) -> None:
    def build(chain: Chain) -> Chain:
        if kind == "mirostat":
            return chain.add(api.llama_sampler_init_mirostat_v2(3, 5.0, 0.1))
        return chain.add(api.llama_sampler_init_xtc(0.5, 0.05, 1, 3)).filters(1.0).gumbel()

    prompt = random_tokens(20, llama.n_vocab)
    llama.session.set_skip(random_bits(llama, 0.3))
    with build(Chain(llama)) as chain:
        plain = decode_plain(llama, chain, prompt, 40)
    with build(Chain(llama)) as chain:
        assert decode_drafted(llama, chain, prompt, 40).tokens == plain.tokens


def test_a_chain_at_a_reused_address_is_not_mistaken_for_the_old_one(llama: Opened) -> None:
    """Every request builds a chain; malloc likes to give it the same address."""
    llama.session.set_skip(None)
    for seed in range(4):
        with Chain(llama).filters(1.0).gumbel(seed) as chain:
            drafted = decode_drafted(llama, chain, random_tokens(10, llama.n_vocab), 20)
        assert drafted.accepted == drafted.drafted > 0


def test_draft_stops_below_the_confidence_bound(real: Opened) -> None:
    session = real.session
    session.set_skip(None)
    session.rewind(0)
    session.prefill(random_tokens(40, real.n_vocab))
    everything, confidences = session.draft(0, 100, 12)
    assert len(everything) == 12
    assert ((confidences > 0) & (confidences <= 1.0001)).all()
    bound = float(np.sort(confidences)[6])
    kept, _ = session.draft(0, 100, 12, bound)
    first_below = int(np.argmax(confidences < bound))
    assert kept.tolist() == everything[:first_below].tolist()


def test_draft_leaves_the_next_target_pass_untouched(llama: Opened) -> None:
    session = llama.session
    session.set_skip(random_bits(llama, 0.5))
    prompt = random_tokens(30, llama.n_vocab)
    session.rewind(0)
    session.prefill(prompt)
    fresh = session.logits().copy()
    session.draft(0, 9, 6)
    session.rewind(29)
    session.prefill(prompt[29:])
    assert np.array_equal(session.logits(), fresh)


def test_grammar_drafts_copy_the_grammar_only_after_a_rejection(llama: Opened) -> None:
    session = llama.session
    session.set_skip(None)
    before = session.counters()["chain_copies"]
    with CHAINS["grammar greedy"](Chain(llama)) as chain:
        drafted = decode_drafted(llama, chain, random_tokens(20, llama.n_vocab), 60)
    assert drafted.accepted == drafted.drafted
    assert session.counters()["chain_copies"] - before == 1


@pytest.mark.parametrize("kind", ["greedy", "top-k", "wide"])
def test_grammar_on_the_largest_logits_gives_what_the_whole_chain_gives(
    smollm2: Path, kind: str
) -> None:
    """The core asks the grammar about the ids that can matter; llama_sampler_sample asks about all of them."""
    build: dict[str, Callable[[Chain], Chain]] = {
        "greedy": lambda c: c.penalties().grammar().greedy(),
        "top-k": lambda c: c.bias(300, 9.0).grammar().filters(1.5, 20, 1.0).gumbel(3),
        "wide": lambda c: c.grammar().filters(1.5, 4000, 1.0).gumbel(3),
    }
    with Opened(smollm2, n_ctx=256) as opened:
        session = opened.session
        session.prefill(random_tokens(10, opened.n_vocab))
        rng = np.random.default_rng(0)
        with build[kind](Chain(opened)) as ours, build[kind](Chain(opened)) as theirs:
            for _ in range(25):
                session.logits()[:] = rng.normal(0, 4, opened.n_vocab)
                theirs.set_pos(session.n_past)
                expected = api.llama_sampler_sample(theirs.chain, opened.ctx, -1)
                assert session.sample(ours.address) == expected
                if is_end(opened, expected):
                    break


def test_sliding_window_survives_drafts_and_forgets_honestly(
    tiny_model: Callable[..., Path],
) -> None:
    path = tiny_model("gemma3")
    with context_params(swa_full=False), Opened(path, n_ctx=1024, n_ubatch=32) as opened:
        session = opened.session
        prompt = random_tokens(300, opened.n_vocab)
        with CHAINS["greedy"](Chain(opened)) as chain:
            plain = decode_plain(opened, chain, prompt, 120)
        session.set_skip(random_bits(opened, 0.4))
        assert 0 < session.max_draft(1024) <= 31
        with CHAINS["greedy"](Chain(opened)) as chain:
            assert decode_drafted(opened, chain, prompt, 120).tokens == plain.tokens
        n_past = session.n_past
        assert session.rewindable(n_past)
        assert session.rewindable(0)
        assert not session.rewindable(40)
        with pytest.raises(errors.DecodeError, match="sliding window"):
            session.rewind(40)
        assert session.n_past == n_cells(opened) == n_past


def test_recurrent_models_decode_plainly(mamba_model: Path) -> None:
    with Opened(mamba_model, n_ctx=512) as opened:
        session = opened.session
        assert session.refusal
        assert session.max_draft(512) == 0
        assert {kind for _, _, kind, _, _ in session.blocks()} <= {2}
        with Chain(opened).greedy() as chain:
            assert (
                len(decode_plain(opened, chain, random_tokens(20, opened.n_vocab), 10).tokens) == 10
            )
            with pytest.raises(errors.UnsupportedModelError):
                session.draft(chain.address, 5, 4)
            with pytest.raises(errors.UnsupportedModelError):
                session.verify(chain.address, 5, np.array([1], np.int32))
        assert not session.rewindable(5)
        with pytest.raises(errors.DecodeError):
            session.rewind(5)
        session.rewind(0)
        assert session.n_past == n_cells(opened) == 0
