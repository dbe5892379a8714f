"""Draft or decode plainly: decided from measured seconds per emitted token, so that drafting never costs for long."""

from __future__ import annotations

_DECAY = 0.9  # weight of the past in the running sums; about ten rounds count
_PLAIN_STEPS = 4  # plain steps measured before the first draft; the first one builds a graph and is not counted
_TRIAL_ROUNDS = 6  # rounds before drafting is judged
_PROBE_ROUNDS = 3  # rounds of a later probe
_FIRST_WAIT, _LAST_WAIT = (
    32,
    1024,
)  # plain steps between probes; doubles after every probe that fails
_REFRESH_ROUNDS = 64  # drafting rounds between two plain steps that keep the comparison fresh


class _Rate:
    """Seconds per token as a ratio of decaying sums: a long round weighs by its tokens."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.seconds = self.seconds * _DECAY + seconds
        self.tokens = self.tokens * _DECAY + tokens

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.tokens > 0.0 else None


class Controller:
    """Chooses, before each round, whether to draft; lives as long as its skip set.

    Args:
        always: Draft in every round. The rates are still measured where plain steps happen.
    """

    def __init__(self, *, always: bool) -> None:
        self.always = always
        self._plain = _Rate()
        self._drafting = _Rate()
        self._plain_steps = 0
        self._rounds_left = _TRIAL_ROUNDS
        self._wait = 0
        self._next_wait = _FIRST_WAIT
        self._since_refresh = 0

    def wants_draft(self) -> bool:
        """Tell whether the next round should draft."""
        if self.always:
            return True
        return (
            self._plain_steps > _PLAIN_STEPS
            and self._wait == 0
            and self._since_refresh < _REFRESH_ROUNDS
        )

    def observe(self, *, drafting: bool, emitted: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            drafting: A draft was tried, even if it came out empty.
            emitted: Tokens the round emitted.
            seconds: Its wall time, draft included.
        """
        if drafting:
            self._drafting.add(emitted, seconds)
            self._since_refresh += 1
            if not self.always:
                self._judge()
            return
        self._plain_steps += 1
        self._since_refresh = 0
        if self._plain_steps > 1:
            self._plain.add(emitted, seconds)
        if self._wait > 0:
            self._wait -= 1
            if self._wait == 0:
                self._drafting, self._rounds_left = _Rate(), _PROBE_ROUNDS

    def _judge(self) -> None:
        if self._rounds_left > 0:
            self._rounds_left -= 1
        if self._rounds_left > 0:
            return
        speedup = self.speedup
        if speedup is not None and speedup < 1.0:
            self._wait = self._next_wait
            self._next_wait = min(2 * self._next_wait, _LAST_WAIT)
        elif speedup is not None:
            self._next_wait = _FIRST_WAIT

    @property
    def speedup(self) -> float | None:
        """Plain seconds per token / drafting seconds per token; None until both are measured."""
        plain, drafting = self._plain.seconds_per_token, self._drafting.seconds_per_token
        return None if plain is None or drafting is None or drafting <= 0.0 else plain / drafting

    @property
    def plain_seconds_per_token(self) -> float | None:
        """Measured seconds of a plain step; None until one was measured."""
        return self._plain.seconds_per_token

    @property
    def resting(self) -> bool:
        """Whether drafting is off because it measured slower."""
        return self._wait > 0

    def describe(self) -> str:
        """Say what is being done and why, as a part of a sentence."""
        speedup = self.speedup
        if self.always:
            return "drafts in every round, as asked"
        if self.resting and speedup is not None:
            return f"plain decoding for now: a round measured {speedup:.2f}x the speed of plain decoding"
        if speedup is None:
            return "plain decoding until both ways are measured"
        return f"drafts while it pays: {speedup:.2f}x the speed of plain decoding (estimated)"
