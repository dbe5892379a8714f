"""Emitted tokens follow the target's distribution, for every sampler, while drafts are accepted and rejected.

The reference is NumPy: `target_probs` computes, from the target's own logits, what a sampler chain makes of them. Each
emitted token is mapped to a uniform number through the cumulative probabilities (the probability integral transform,
randomised within the token's share); if every conditional distribution is right, these numbers are independent and
uniform, which a chi-square test over 50 bins checks on more than 20,000 tokens a sampler.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from pyssd import Llama

import llama_cpp

N_TOKENS = 20_000
N_BINS = 50
MIN_P = 1e-4
EAGER: dict[str, Any] = {"max_draft_len": 2, "min_confidence": 0.0}
LETTERS = "root ::= [a-d]+"

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temp": 1.0},
    "cool": {"temp": 0.6},
    "top_k": {"temp": 1.0, "top_k": 5},
    "top_p": {"temp": 1.0, "top_p": 0.8},
    "min_p": {"temp": 1.2, "min_p": 0.1},
    "typical": {"temp": 1.0, "typical_p": 0.7},
    "penalties": {
        "temp": 1.0, "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.3,
    },
    "defaults": {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "mirostat2": {"temp": 1.0, "mirostat_mode": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.1},
    "all": {"temp": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.2},
}  # fmt: skip
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}

Floats = npt.NDArray[np.float64]


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    result: Floats = weights / weights.sum(-1, keepdims=True)
    return result


def target_probs(
    logits: Floats, tokens: npt.NDArray[np.int64], settings: dict[str, Any], allowed: Floats
) -> Floats:
    """Probabilities [n, n_vocab] after penalties, grammar, top-k, typical, top-p, min-p and temperature.

    That is llama.cpp's order. Penalties of row i see tokens[:i], the last 64 of them.
    """
    chosen = np.zeros((len(tokens) + 1, logits.shape[1]))
    chosen[1:][np.arange(len(tokens)), tokens] = 1.0
    counts = np.cumsum(chosen, 0)[:-1]
    counts[64:] -= counts[:-64].copy()
    penalty = np.where(logits <= 0, settings["repeat_penalty"], 1.0 / settings["repeat_penalty"])
    logits = np.where(counts > 0, logits * penalty, logits)
    logits = logits - counts * settings.get("frequency_penalty", 0.0)
    logits = logits - (counts > 0) * settings.get("presence_penalty", 0.0)
    logits = logits + allowed
    if settings["top_k"] > 0:
        logits = keep_if(
            logits,
            logits >= np.sort(logits, 1)[:, -min(settings["top_k"], logits.shape[1]), np.newaxis],
        )
    if settings["typical_p"] < 1.0:
        probs = softmax(logits)
        surprise = -np.log(probs)
        entropy = np.sum(probs * surprise, 1, keepdims=True)
        order = np.argsort(np.abs(surprise - entropy), 1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, 1), 1)
        logits = keep_if(logits, ranks(order) <= (sums <= settings["typical_p"]).sum(1)[:, None])
    if settings["top_p"] < 1.0:
        probs = softmax(logits)
        order = np.argsort(-probs, 1, kind="stable")
        sums = np.cumsum(np.take_along_axis(probs, order, 1), 1)
        logits = keep_if(logits, ranks(order) <= (sums < settings["top_p"]).sum(1)[:, None])
    if settings["min_p"] > 0.0:
        limit = logits.max(1, keepdims=True) + math.log(settings["min_p"])
        logits = keep_if(logits, logits >= limit)
    return softmax(logits / settings["temp"])


def keep_if(logits: Floats, keep: npt.NDArray[np.bool_]) -> Floats:
    return np.where(keep, logits, -np.inf)


def ranks(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.argsort(order, 1)


class Mirostat2:
    """Mirostat v2: a limit on surprise that follows the surprise seen."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.tau, self.eta = settings["mirostat_tau"], settings["mirostat_eta"]
        self.mu = 2.0 * self.tau

    def probs(self, logits: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
        rows = softmax(logits)
        for row, token in enumerate(tokens):
            with np.errstate(divide="ignore"):
                surprise = -np.log2(rows[row])
            rows[row][(surprise > self.mu) & (surprise > surprise.min())] = 0.0
            rows[row] /= rows[row].sum()
            self.mu -= self.eta * (-math.log2(rows[row, token]) - self.tau)
        return rows


def uniforms(
    llm: Llama, settings: dict[str, Any], seed: int, n_tokens: int, grammar: str | None
) -> list[float]:
    """Generate, and map each token to a number that is uniform if the token was drawn from the target."""
    llm.set_seed(seed)
    parsed = None if grammar is None else llama_cpp.LlamaGrammar.from_string(grammar, verbose=False)
    allowed = np.zeros(llm.n_vocab())
    if grammar is not None:
        pieces = [llm.detokenize([token]) for token in range(llm.n_vocab())]
        ends = {llm.token_eos()}
        allowed[:] = [
            0.0 if token in ends or (piece and set(piece) <= set(b"abcd")) else -np.inf
            for token, piece in enumerate(pieces)
        ]
    llm.reset()
    prompt = [3 + seed % 20, 7]
    tokens: list[int] = []
    for token in llm.generate(prompt, grammar=parsed, **settings):
        tokens.append(token)
        if len(tokens) == n_tokens or (grammar is not None and token == llm.token_eos()):
            break
    start = len(prompt) - 1
    logits = llm.scores[start : start + len(tokens)].astype(np.float64)
    emitted = np.array(tokens)
    limits = np.tile(allowed, (len(tokens), 1))
    if grammar is not None:
        limits[0, llm.token_eos()] = -np.inf  # at least one letter
    if settings.get("mirostat_mode") == 2:
        probs = Mirostat2(settings).probs(logits + limits, emitted)
    else:
        probs = target_probs(logits, emitted, settings, limits)
    rows = np.arange(len(tokens))
    own = probs[rows, emitted]
    assert (own > 0).all(), np.flatnonzero(own == 0)
    before = np.cumsum(probs, 1)[rows, emitted] - own
    return list(before + np.random.default_rng(seed).random(len(tokens)) * own)


@pytest.fixture(
    scope="module", params=["gumbel", pytest.param("llama_cpp", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest, toy_model: Path) -> Any:
    made = Llama(
        str(toy_model), n_ctx=512, n_threads=1, verbose=False, exact=True, logits_all=True,
        skip_set="f:1", speculative=EAGER, coupling=request.param,
    )  # fmt: skip
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grammar", [None, LETTERS], ids=["free", "grammar"])
def test_tokens_follow_the_target(llm: Llama, name: str, grammar: str | None) -> None:
    if name == "typical" and grammar is not None:
        pytest.skip("llama.cpp's typical sampler computes 0 log 0 for tokens a grammar removed")
    settings = {**OFF, **CASES[name]}
    numbers: list[float] = []
    seed = accepted = drafted = 0
    while len(numbers) < N_TOKENS:
        seed += 1
        numbers += uniforms(llm, settings, seed, 400, grammar)
        accepted, drafted = accepted + llm.stats.accepted, drafted + llm.stats.drafted
        assert seed < 20_000
    assert 0 < accepted < drafted
    counts, _ = np.histogram(numbers, bins=N_BINS, range=(0.0, 1.0))
    assert stats.chisquare(counts).pvalue > MIN_P
    # and no memory from one token to the next
    first, second = np.array(numbers[:-1]), np.array(numbers[1:])
    table, _, _ = np.histogram2d(first, second, bins=5, range=((0, 1), (0, 1)))
    assert stats.chi2_contingency(table).pvalue > MIN_P


@pytest.mark.parametrize("mode", [1])
def test_mirostat_1_has_the_frequencies_of_llama_cpp(toy_model: Path, mode: int) -> None:
    """Version 1 truncates by an estimate that is tedious to repeat: compare with llama_cpp.Llama, seeds apart."""
    common: dict[str, Any] = {
        "n_ctx": 512, "n_threads": 1, "verbose": False, "flash_attn": True,
    }  # fmt: skip
    settings = {**OFF, "temp": 1.0, "mirostat_mode": mode, "mirostat_tau": 2.5}
    stock = llama_cpp.Llama(str(toy_model), **common)
    ours = Llama(str(toy_model), skip_set="f:1", speculative=EAGER, **common)
    counts = np.zeros((2, 4, ours.n_vocab()))
    for which, (llm, base) in enumerate(((ours, 0), (stock, 10**6))):
        for seed in range(2500):
            llm.set_seed(base + seed)
            for place, token in enumerate(llm.generate([5, 6, 7], **settings)):
                counts[which, min(place, 3), token] += 1
                if place == 7:
                    break
    ours.close()
    stock.close()
    for place in range(4):
        table = counts[:, place]
        table = table[:, table.sum(0) > 10]
        assert stats.chi2_contingency(table).pvalue > MIN_P
