"""Choose, before each round, what to try: the draft with the largest expected gain under the measured costs.

The gain of a round is what its expected tokens are worth, less the seconds it takes. A token is worth the seconds per
token that the best arm would take for it now, or those that were reached of late if they are more (a long draft is worth
its length while drafts like it are rare), and never more than plain decoding takes. So the arm with the largest gain is
the one with the most tokens per second. Plain decoding is an arm like the others: it wins where no draft pays.

Free drafts (copied from the context, recycled) say their chances before they cost anything, and are judged by what the
target emits whether they were proposed or not, so nothing has to be tried out. What a skip draft is worth shows only in
its rounds; those that are run to find out may cost a fixed share of the decode time, no more.

The papers' controllers know no cost of verification and no plain arm (see DraftRule for their thresholds).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from pyssd.choice import Choice, Costs, best_length
from pyssd.cost import MAX_WIDTH
from pyssd.propose import NGRAM, NGRAM_SKIP, PLAIN, SKIP, FreeDraft
from pyssd.propose.skip import SkipArm, best_chain, make_rule

_DECAY = 0.97  # of the running rate; about thirty rounds count
_MIN_TOKENS = 8.0  # of the running rate, before it is believed
_STICKY = 0.9  # of the share of rounds by width; about ten rounds count
_TRUST = 0.9  # in that rate
_MARGIN = 0.01  # of a plain step: what a draft must be expected to gain
_PROBE_SHARE = 0.005  # of the decode time may be lost by rounds that are run to find out
_MAX_PROBE = 2.0  # plain steps that one of them may lose
_PROBE_GRANT = 3.0  # plain steps that may be lost before any time has passed
_REFRESH_ROUNDS = 128  # rounds without a plain step, before one is made to see what it takes
_ERRORS = 256  # latest rounds of an arm whose prediction is remembered


class Controller:
    """Lives as long as the model is loaded: rates and calibrations carry over between requests.

    Args:
        costs: The cost model.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.errors: dict[str, deque[float]] = {}  # arm -> predicted / measured seconds - 1
        self._units = self._tokens = 0.0  # decayed: the rate of late
        self._used = [0.0] * (MAX_WIDTH + 1)  # decayed share of rounds by width
        self._decode_units = 0.0
        self._lost = 0.0  # units that rounds lost that were run to find out
        self._last_width = 0
        self._since_plain = 0
        self._skip: SkipArm | None = None
        self._max_skip_len = 0
        self._always = False

    def begin(
        self, skip: SkipArm | None = None, max_skip_len: int = 0, *, always: bool = False
    ) -> None:
        """Start a generation.

        Args:
            skip: The skip set that may draft, or None.
            max_skip_len: Longest skip draft.
            always: Draft wherever there is something to draft: plain decoding is no arm.
        """
        self._last_width = 0  # the pass before was the prompt's
        self._skip, self._max_skip_len, self._always = skip, max_skip_len, always

    def plain_seconds(self, n_past: int) -> float:
        """Predicted seconds of a plain step among plain steps."""
        return self.costs.units(n_past)[1] * self.costs.scale

    def rate(self, n_past: int) -> float:
        """Speed of late, as a multiple of plain decoding; 1 before much is known."""
        plain = self.costs.units(n_past)[1]
        return plain * self._tokens / self._units if self._tokens >= _MIN_TOKENS else 1.0

    def choose(self, n_past: int, drafts: Sequence[FreeDraft], max_len: int) -> Choice:
        """Choose the arm of the next round.

        Args:
            n_past: Position of the last token.
            drafts: What the free proposers have.
            max_len: Longest draft that may be verified; 0 = the round has to be plain.
        """
        costs, last, used = self.costs, self._last_width, self._used
        table, switch = costs.units(n_past), costs.switch_units
        # a width costs its pass, another graph if the pass before had another one, and another one again for the next
        # round if that is likely to go back
        plain = table[1] + switch * ((last != 1) + 1.0 - used[1])
        if max_len <= 0:
            return Choice(PLAIN, seconds=(table[1] + switch * (last != 1)) * costs.scale)
        own = table[1]
        late = _TRUST * self._units / self._tokens if self._tokens >= _MIN_TOKENS else own
        skip, room = self._skip, min(self._max_skip_len, max_len)
        if room <= 0:
            skip = None
        always = self._always and skip is None
        best = best_length(drafts, max_len, table, switch, last, used, None)
        local = plain / (1.0 + _MARGIN)
        if best is not None and (always or best[1] < local * best[0]):
            local = best[1] / best[0]
        else:
            best = None
        price = min(own, max(late, local))
        if skip is not None:
            step = costs.draft_seconds(skip.bits, n_past, skip.head_rows) / costs.scale
            tokens, units = skip.expected(table, step, price, room)
            price = min(price, max(late, units / tokens))
        if best is not None and price > local:
            best = best_length(drafts, max_len, table, switch, last, used, price)
        floor = price - plain + _MARGIN * own
        choice = Choice(PLAIN)
        if best is not None:
            gain = best[0] * price - best[1]
            if gain > floor or always:
                floor = gain
                choice = Choice(best[4].source, best[4], best[3], best[2])
        if skip is not None:
            choice = self._with_skip(choice, floor, skip, table, step, price, room, max_len)
        if choice.arm != PLAIN and self._since_plain >= _REFRESH_ROUNDS and not self._always:
            loss = floor - (price - plain)
            if self._lost + loss <= _PROBE_SHARE * self._decode_units:
                choice = Choice(PLAIN, is_probe=True, floor=floor)
        choice.price = price
        if choice.rule is None:
            width = choice.width
            choice.seconds = (table[width] + switch * (width != last)) * costs.scale
        else:
            choice.seconds *= costs.scale
            choice.step *= costs.scale
        return choice

    def _with_skip(
        self, best: Choice, floor: float, skip: SkipArm, table: Sequence[float], step: float, price: float,
        room: int, max_len: int,
    ) -> Choice:  # fmt: skip
        """Let the skip set compete with the best of the others, whose gain is the floor."""
        tokens, units = skip.expected(table, step, price, room)
        gain = tokens * price - units
        is_probe = False
        if self._always:
            pays = best.free is None
        else:
            pays = gain > floor
            if not pays and best.arm == NGRAM and best.length < max_len:
                longer = self._continued(
                    best, skip, price, table, step, min(room, max_len - best.length)
                )
                if longer is not None:
                    return longer
            is_probe = not pays and self._may_probe(floor - gain, table[1])
        if not pays and not is_probe:
            return best
        rule = make_rule(skip.calibration, table, step, price, room)
        return Choice(SKIP, None, 0, 1, 0.0, rule, step, is_probe, floor)

    def _continued(
        self, best: Choice, skip: SkipArm, price: float, table: Sequence[float], step: float, max_len: int
    ) -> Choice | None:  # fmt: skip
        """The n-gram draft with a skip draft behind it, if that gains more than the n-gram draft alone."""
        assert best.free is not None
        reach = 1.0
        for chance in best.free.chances[: best.length]:
            reach *= chance
        # the draft context reads the copied tokens in one pass before its first own step
        ahead = step * (table[best.length + 1] / table[1] - 1.0)
        tokens, seconds = best_chain(
            skip.calibration.mean(), table, step, reach * price, max_len, best.length
        )
        gain = reach * (tokens - 1.0) * price - (seconds + ahead - table[best.length + 1])
        if gain <= 0.0:
            return None
        rule = make_rule(skip.calibration, table, step, reach * price, max_len, best.length)
        return Choice(NGRAM_SKIP, best.free, best.length, 1, ahead, rule, step)

    def _may_probe(self, loss: float, plain: float) -> bool:
        """Whether a skip draft may be run to find out, though it is expected to lose."""
        return (
            loss <= _MAX_PROBE * plain
            and self._lost + loss <= _PROBE_SHARE * self._decode_units + _PROBE_GRANT * plain
        )

    def observe(
        self,
        choice: Choice,
        *,
        n_past: int,
        width: int,
        emitted: int,
        draft_seconds: float,
        verify_seconds: float,
        confidences: Sequence[float] = (),
        n_accepted: int = -1,
        n_steps: int = 0,
    ) -> None:
        """Learn from a round.

        Args:
            choice: What was tried.
            n_past: Position before it.
            width: Tokens of its target pass.
            emitted: Tokens it emitted.
            draft_seconds: Wall time before the target pass.
            verify_seconds: Wall time of the target pass, sampling included.
            confidences: Of the tokens that the skip set drafted.
            n_accepted: Tokens of those that were accepted; below 0 if none of them was reached.
            n_steps: Passes of the draft context.
        """
        costs, skip = self.costs, self._skip
        last = self._last_width
        switched = width != last
        seconds = draft_seconds + verify_seconds
        predicted = choice.seconds
        if choice.rule is not None and skip is not None:
            drafting = choice.seconds + choice.step * n_steps
            table, scale = costs.units(n_past), costs.scale
            predicted = drafting + (table[width] + costs.switch_units * switched) * scale
            costs.observe_draft(drafting, draft_seconds)
            skip.learn(confidences, n_accepted, n_steps)
        if seconds > 0.0:
            self._note_error(choice.arm, predicted / seconds - 1.0)
        costs.observe_verify(width, n_past, verify_seconds, switched=switched)
        units = seconds / costs.scale
        self._decode_units += units
        if choice.is_probe:
            self._lost = max(0.0, self._lost + choice.floor - emitted * choice.price + units)
        self._units = self._units * _DECAY + units
        self._tokens = self._tokens * _DECAY + emitted
        self._last_width = width
        self._since_plain = 0 if width == 1 else self._since_plain + 1
        used = self._used
        if last != width:
            used[last] *= _STICKY
        used[width] += (1.0 - _STICKY) * (1.0 - used[width])

    @property
    def is_measured(self) -> bool:
        """Whether predictions are seconds of this machine."""
        return self.costs.measured

    def median_errors(self) -> dict[str, float]:
        """Median of |predicted / measured seconds - 1| over the latest rounds, by arm."""
        return {
            arm: statistics.median(map(abs, errors))
            for arm, errors in self.errors.items()
            if errors
        }

    def _note_error(self, arm: str, error: float) -> None:
        errors = self.errors.get(arm)
        if errors is None:
            errors = self.errors[arm] = deque(maxlen=_ERRORS)
        errors.append(error)
