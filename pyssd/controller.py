"""Draft or decode plainly: decided from measured seconds per emitted token, so that drafting never costs for long.

Plain decoding, n-gram drafts and skip drafts are the arms. A means of drafting whose rounds measure slower than plain
decoding rests, and is tried again after ever longer waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyssd.cost import WidthSeconds

_DECAY = 0.9  # weight of the past in the running sums; about ten rounds count
_PLAIN_STEPS = (
    4  # plain steps before the first skip draft; the first one builds a graph and is not counted
)
_TRIAL_ROUNDS = 6  # rounds before an arm is judged
_PROBE_ROUNDS = 3  # rounds of a later probe
# other rounds between probes, the first and the longest; doubles after every probe that fails. A text may turn to copying
# at any token, and a failed n-gram draft costs little: it is probed sooner.
_SKIP_WAITS = (32, 1024)
_NGRAM_WAITS = (8, 256)
_REFRESH_ROUNDS = 64  # drafting rounds between the plain steps that keep the comparison fresh
_MARGIN = 0.02  # of a plain step: what an n-gram draft must be expected to gain

PLAIN, NGRAM, SKIP = "plain", "ngram", "skip"
_NAMES = {NGRAM: "n-gram drafts", SKIP: "skip drafts"}


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


class _Arm:
    """The rounds of one means of drafting, and whether it rests."""

    __slots__ = ("next_wait", "rate", "rounds_left", "wait", "waits")

    def __init__(self, waits: tuple[int, int]) -> None:
        self.waits = waits
        self.rate = _Rate()
        self.rounds_left = _TRIAL_ROUNDS  # before it is judged
        self.wait = 0  # rounds of others before the next probe
        self.next_wait = waits[0]

    def probe(self) -> None:
        self.wait = 0
        self.rate, self.rounds_left = _Rate(), _PROBE_ROUNDS

    def judge(self, speedup: float | None) -> None:
        if self.rounds_left > 0:
            self.rounds_left -= 1
        if self.rounds_left > 0 or speedup is None:
            return
        if speedup < 1.0:
            self.wait = self.next_wait
            self.next_wait = min(2 * self.next_wait, self.waits[1])
        else:
            self.next_wait = self.waits[0]


class Measured:
    """What holds for a model whatever skip set is in use; controllers share it."""

    def __init__(self) -> None:
        self.plain = _Rate()
        self.recent = _Rate()  # of all rounds
        self.widths = WidthSeconds()
        self.ngram = _Arm(_NGRAM_WAITS)
        self.plain_steps = 0
        self.since_refresh = 0
        self.last_source = ""


class Controller:
    """Chooses, before each round, which means may draft; lives as long as its skip set.

    Args:
        always: Draft in every round. The rates are still measured where plain steps happen.
        shared: Measurements that outlive the skip set; None = its own.
    """

    def __init__(self, *, always: bool, shared: Measured | None = None) -> None:
        self.always = always
        self._shared = Measured() if shared is None else shared
        self._arms = {NGRAM: self._shared.ngram, SKIP: _Arm(_SKIP_WAITS)}

    def begin(self) -> None:
        """Start a generation: another prompt may be one to copy from, so n-gram drafts get a new chance."""
        self._shared.last_source = ""
        if self._arms[NGRAM].wait > 0:
            self._arms[NGRAM].probe()

    def wants(self, source: str) -> bool:
        """Tell whether the next round may draft by this means."""
        if self.always:
            return True
        shared = self._shared
        measured = shared.plain.tokens > 0.0
        if shared.since_refresh >= (_REFRESH_ROUNDS if measured else _TRIAL_ROUNDS):
            return False
        if source == SKIP and shared.plain_steps <= _PLAIN_STEPS:
            return False
        return self._arms[source].wait == 0

    def worth(self, chances: Sequence[float]) -> int:
        """Tell how many tokens of a free draft to verify: the length with the largest expected gain, 0 if none pays.

        A gain is the expected tokens at the present price of a token, less what the wider pass costs.

        Args:
            chances: Of each token to be accepted if those before it are.
        """
        shared = self._shared
        table = shared.widths.table()
        price = table[1]
        if shared.widths.measured:
            rates = (shared.plain.seconds_per_token, shared.recent.seconds_per_token)
            price = min((rate for rate in rates if rate is not None), default=price)
        best, best_gain = 0, _MARGIN * table[1]
        reach, expected = 1.0, 0.0
        for length, chance in enumerate(chances, 1):
            reach *= chance
            expected += reach
            gain = expected * price - (table[length + 1] - table[1])
            if gain > best_gain:
                best, best_gain = length, gain
        return best

    def observe(
        self, *, source: str, emitted: int, width: int, seconds: float, verify_seconds: float
    ) -> None:
        """Learn from a round.

        Args:
            source: What was tried: "plain", "ngram", "skip" (even if its draft came out empty).
            emitted: Tokens the round emitted.
            width: Tokens of its target pass.
            seconds: Its wall time, draft included.
            verify_seconds: The part of the target pass.
        """
        shared = self._shared
        before, shared.last_source = shared.last_source, source
        shared.recent.add(emitted, seconds)
        for name, arm in self._arms.items():
            if arm.wait > 0 and name != source:
                arm.wait -= 1
                if arm.wait == 0:
                    arm.probe()
        # a plain step behind a pass of another width may build its graph anew: no measure of plain decoding
        is_steady = before == PLAIN or source != PLAIN
        if is_steady:
            shared.widths.add(width, verify_seconds)
        if source == PLAIN:
            shared.plain_steps += 1
            if is_steady:
                shared.plain.add(emitted, seconds)
                shared.since_refresh = 0
            elif before in self._arms:
                self._charge(self._arms[before], seconds)
            return
        arm = self._arms[source]
        arm.rate.add(emitted, seconds)
        shared.since_refresh += 1
        if not self.always:
            arm.judge(self.speedup(source))

    def _charge(self, arm: _Arm, seconds: float) -> None:
        """Let the arm pay for what a plain step takes longer behind its rounds: the graph is that of another width."""
        plain = self._shared.plain.seconds_per_token
        if plain is not None and arm.rate.tokens > 0.0:
            arm.rate.seconds += min(max(seconds - plain, 0.0), plain)

    def speedup(self, source: str) -> float | None:
        """Plain seconds per token / those of the means; None until both are measured."""
        plain = self._shared.plain.seconds_per_token
        drafting = self._arms[source].rate.seconds_per_token
        return None if plain is None or drafting is None or drafting <= 0.0 else plain / drafting

    @property
    def plain_seconds_per_token(self) -> float | None:
        """Measured seconds of a plain step; None until one was measured."""
        return self._shared.plain.seconds_per_token

    def rests(self, source: str) -> bool:
        """Whether the means is off because it measured slower."""
        return self._arms[source].wait > 0

    def describe(self, sources: Sequence[str]) -> str:
        """Say what is being done and why, as a part of a sentence."""
        if self.always:
            return "drafts in every round, as asked"
        if sources and all(self.rests(source) for source in sources):
            return f"plain decoding for now: {', '.join(map(self._describe, sources))}"
        return ", ".join(map(self._describe, sources))

    def _describe(self, source: str) -> str:
        speedup = self.speedup(source)
        if speedup is None:
            return f"{_NAMES[source]} not measured against plain decoding yet"
        if self.rests(source):
            return f"{_NAMES[source]} rest, as they measured {speedup:.2f}x the speed of plain decoding"
        return f"{_NAMES[source]} while they pay: {speedup:.2f}x the speed of plain decoding (estimated)"
