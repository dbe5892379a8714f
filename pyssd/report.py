"""What the controller did, in words: for llm.stats and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyssd.propose import NGRAM, NGRAM_SKIP, PLAIN, RECYCLE, SKIP

if TYPE_CHECKING:
    from pyssd.controller import Controller
    from pyssd.engine import DraftPlan
    from pyssd.stats import SpecStats

_VERBS = {
    NGRAM: "copied from the context",
    RECYCLE: "followed recycled tokens",
    SKIP: "drafted with the skip set",
    NGRAM_SKIP: "drafted on behind copied tokens",
    PLAIN: "decoded plainly",
}


def decision(plan: DraftPlan, stats: SpecStats, controller: Controller, n_past: int) -> str:
    """Say what was chosen how often, and why: the price of a wider pass, and what came of it.

    Args:
        plan: Of the generation.
        stats: Of the generation, its speed-up included.
        controller: That decided.
        n_past: A position of the generation.
    """
    shares = stats.share
    if not shares:
        return "no round was needed"
    parts = [f"{_VERBS.get(arm, arm)} in {share:.0%} of rounds" for arm, share in shares.items()]
    table = controller.costs.units(n_past)
    text = f"{', '.join(parts)}: a pass over 4 tokens costs {table[4] / table[1]:.2f}x one over 1"
    text += f", over 8 {table[8] / table[1]:.2f}x"
    if stats.rounds:
        text += f", and a round that drafted gave {stats.mean_acceptance_len:.2f} tokens"
    elif plan.always:
        text += ", and nothing was there to draft from"
    else:
        text += ", and no draft was likely enough to pay for that"
    if plan.skip is not None and shares.get(SKIP, 0.0) < 0.1 and not plan.always:
        chance = plan.skip.calibration.mean()
        text += f"; a token of the skip set is right with {chance:.0%}, which seldom pays here"
    if stats.speedup is not None:
        text += f"; {stats.speedup:.2f}x the speed of plain decoding (estimated)"
    return text
