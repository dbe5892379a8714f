"""Typed view of the C++ core.

Pointers travel as int (a ctypes address); token arrays as int32; every call that decodes releases
the GIL. Failures raise the classes of pyssd.errors; a wrong argument raises ValueError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyssd.propose.skip import DraftRule

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]
Seconds = npt.NDArray[np.float64]

def attach(handle: int) -> None:
    """Resolve llama_* and pyssd_* from the loaded libllama (a dlopen handle). Idempotent.

    Raises:
        LibraryNotFoundError: a symbol is missing.
        LibraryConflictError: ABI version or struct sizes differ, or another library is attached.
    """

def struct_sizes() -> dict[str, int]:
    """Sizes of the public structs as the core was compiled."""

def library_sizes() -> dict[str, int]:
    """Sizes that libllama reports; equal to struct_sizes() after attach."""

def gumbel_sampler(seed: int) -> int:
    """Make a llama_sampler* (Gumbel coupling); ownership passes to the chain it is added to.

    Any integer is a seed; its low 64 bits count.
    """

def gumbel_set_pos(chain: int, pos: int) -> None:
    """Set the absolute position of the token to be picked, where it is not Session that samples."""

def chain_has(chain: int, name: str) -> bool:
    """Whether a sampler chain has a member of that llama.cpp name ("grammar", "gumbel", ...)."""

class Session:
    """One sequence over three contexts (target, draft, scout) and one KV memory.

    Between calls KV holds exactly the target's cells for positions < n_past. A call from a second
    thread raises BusyError; cancel() may come from any thread.
    """

    def __init__(
        self, ctx: int, *, exact: bool = False, invariant: bool = False, single_rows: bool = False
    ) -> None:
        """exact: ggml-cpu's reference mode; invariant: the attention of pyssd's CPU kernels.

        single_rows: in verify, upstream's CPU kernels compute each row as they compute a row alone.
        """
    def close(self) -> None:
        """Free the borrowers. Idempotent; must precede llama_free(ctx)."""

    @property
    def n_past(self) -> int: ...
    @n_past.setter
    def n_past(self, value: int) -> None:
        """Adopt cells written by someone else (load_state).

        Raises:
            ValueError: the memory ends elsewhere; the session then stands where the memory ends.
        """

    @property
    def single_rows(self) -> bool:
        """As the argument; may be changed between calls, to compare."""
    @single_rows.setter
    def single_rows(self, value: bool) -> None: ...
    @property
    def refusal(self) -> str | None:
        """Why speculation is impossible here; None if it is possible."""

    def blocks(self) -> list[tuple[int, int, int, int, str]]:
        """(index, layer, kind, nbytes, device) in the order of the residual stream."""

    def weights(self) -> list[tuple[str, str, str, int]]:
        """(name, type, buffer type, nbytes) of the weights of all matrix products; builds a graph."""

    def set_skip(self, skip: Bits | None, head_rows: int = 0) -> None:
        """Set the draft's plan: skip uint8 [n_blocks], 1 = skipped; head_rows 0 = the whole head."""

    # ---- target
    def prefill(self, tokens: Tokens, rows: Floats | None = None) -> None:
        """Evaluate at n_past in chunks of n_ubatch.

        Only the last row has logits, or all when rows [n, n_vocab] is given. A failure (or cancel)
        keeps the chunks before it: see n_past.
        """

    def rewind(self, n_past: int) -> None:
        """Drop the cells from n_past on; DecodeError, with nothing changed, if memory cannot."""

    def rewindable(self, n_past: int) -> bool:
        """Whether rewind would work: a sliding window may have forgotten what n_past attends to."""

    def logits(self, row: int = -1) -> Floats:
        """Writable view of a row of the last target decode, [n_vocab], valid until the next one."""

    def sample(self, chain: int, row: int = -1, pos: int = -1) -> int:
        """Sample a row with the chain, which accepts the token; chain 0 = greedy.

        pos is the absolute position of the new token; -1 means n_past, or n_past + 1 + row between
        verify_begin and verify_end.

        Raises:
            DecodeError: the chain leaves no token (a grammar that cannot go on, NaN logits).
        """

    def synchronize(self) -> None:
        """Wait for the device: before others save, clear or change the KV memory."""

    # ---- a round
    def max_draft(self, n_ctx: int) -> int:
        """Longest draft that n_ctx, context, batch, rows of logits and sliding window allow now."""

    def draft(
        self,
        chain: int,
        last_token: int,
        max_len: int,
        min_confidence: float = 0.0,
        rule: DraftRule | None = None,
        prefix: Tokens | None = None,
    ) -> tuple[Tokens, Floats]:
        """Ids and confidences of what is drafted behind last_token and the prefix (a draft by others).

        Leaves no cell behind. chain is the target's chain, of which the session keeps a copy (0 = greedy). Ends at the
        first token below min_confidence or not worth verifying by the rule (not kept), at an end of generation (kept),
        where the rule says that no further token is worth drafting, at max_len or max_draft, or where the grammar leaves
        no candidate.
        """

    @property
    def draft_steps(self) -> int:
        """Passes of the draft context since the session was made."""

    def verify(
        self,
        chain: int,
        last_token: int,
        draft: Tokens,
        recycle: RecycleTable | None = None,
        before: int = -1,
        guard: float = 0.0,
        rewrite: bool = True,
        drafted: int | None = None,
    ) -> Tokens:
        """Emitted tokens, 1 to len(draft) + 1 of them.

        n_past grows by their number; the last one is not in KV yet. recycle learns from every row, from those of
        rejected tokens about single tokens only; before is the token before last_token, -1 = none that is known.
        drafted: how many tokens were meant; the rest of the draft fills up a width, and teaches nothing where it is
        rejected.

        guard: a row whose pick could be another one if differences of logits changed by this much is settled: its
        token is decoded alone, and the round ends with it. rewrite: before that, the cells that wide passes have
        written since the last prefill are written again, one pass each. 0 = no guard.
        """

    def verify_begin(self, last_token: int, draft: Tokens) -> None:
        """Run the rows of a verify, to be sampled one by one: for logits processors in Python."""

    def verify_end(self, n_emitted: int) -> None:
        """Keep n_emitted (1 to len(draft) + 1) rows. A round that is never ended is dropped."""

    def recycle(
        self, table: RecycleTable, before: int, tokens: Tokens, right: int | None = None
    ) -> None:
        """Let a table learn from the last len(tokens) rows of the last target pass.

        Row i stands behind tokens[i]; before is the token before them all. For rounds of verify_begin (last token
        and draft) and for the last row of a prefill. right: how many of the tokens are right, those behind them
        being rejected (None = all): rejected ones teach the table about single tokens only.

        Raises:
            DecodeError: the pass had fewer rows of logits.
        """

    # ---- scout: fresh passes on scratch sequences, the user's cells untouched
    def skip_logits(self, tokens: Tokens, skip: Bits | None, head_rows: int = 0) -> Floats:
        """Logits [n, n_vocab] of one fresh pass under a skip set; -inf beyond head_rows."""

    def skip_argmax(self, tokens: Tokens, skip: Bits | None) -> Tokens:
        """The likeliest token after every position [n] of one fresh pass under a skip set."""

    def hidden(self, tokens: Tokens, taps: Tokens) -> Floats:
        """Residual stream [n_taps, n, n_embd] before each tapped block (n_blocks = after all)."""

    def free_scout(self) -> None:
        """Free the scout's context; the next call makes it anew."""

    # ---- measuring: on scratch cells behind the user's; the logits of the last decode are gone afterwards
    def time_verify(self, widths: Tokens, n_cells: int = 0, max_seconds: float = ...) -> Seconds:
        """Seconds of a target pass of each width, in this order, all rows having logits; float64 [<= n].

        A pass that is no longer in the graph of the one before it builds its own. Ends early, with fewer passes, when
        max_seconds are over.

        Args:
            widths: int32 [n], each at most max_draft + 1.
            n_cells: Cells in front, beside those of the user; their time is not counted.
            max_seconds: Wall time after which no other pass begins; math.inf by default.

        Raises:
            UnsupportedModelError: speculation is refused here.
            ContextOverflowError: there is no room for it.
        """

    def time_draft(
        self, skip: Bits | None, head_rows: int, n_steps: int, max_seconds: float = ...
    ) -> Seconds:
        """Seconds of draft steps under a plan, the greedy pick included; float64 [<= n_steps].

        The first step builds the plan's graph. The plan set with set_skip holds again afterwards.

        Raises:
            UnsupportedModelError: speculation is refused here.
            SkipSetError: the plan does not fit the model.
        """

    def cancel(self) -> None:
        """Make the running call raise Cancelled within one pass, and later ones until cleared."""

    def clear_cancel(self) -> None: ...

    # ---- what it cost
    def graphs_built(self) -> dict[str, int]:
        """Graphs built since the session was made: "target", "draft", "scout"."""

    def graph_nodes(self) -> dict[str, int]:
        """Nodes of the graph that ran last in each context."""

    def context_nbytes(self) -> dict[str, int]:
        """Bytes of compute and output buffers of each context."""

    def counters(self) -> dict[str, float]:
        """Totals since the session was made.

        draft_seconds, draft_sampling_seconds (part of it), verify_seconds, verify_sampling_seconds
        (part of it), tops_seconds (what recycling costs verify), draft_steps, verify_calls, chain_copies (stateful
        samplers, such as a grammar, copied for drafting), guard_rows (near-ties settled), guard_passes (of one token,
        for them), guard_seconds (of those; part of verify_seconds, not of verify_sampling_seconds).
        """

class NgramIndex:
    """Where the last tokens of a sequence stood before, and how often what followed came true."""

    def __init__(self, capacity: int) -> None:
        """capacity: the latest positions that are looked at; memory is 60 to 80 bytes for each."""
    def __len__(self) -> int:
        """Tokens of the sequence."""

    def sync(self, tokens: Tokens) -> int:
        """Make the sequence these tokens; returns how many of them were there already."""

    def extend(self, tokens: Tokens) -> None:
        """Add tokens that the target emitted.

        They are compared with the last draft, whether it was proposed or not: chances follow what came true.
        """

    def rewind(self, n: int) -> None:
        """Forget all but the first n tokens."""

    def draft(self, max_len: int) -> tuple[Tokens, Floats, int]:
        """Tokens behind the longest match, their chances, and the length of the match (0 = none, 2 to 32).

        A chance is the estimated probability that the target emits the token if it has emitted those before it.
        """

class RecycleTable:
    """For each token and pair of tokens, the id that the target ranked highest the last time it stood behind them.

    Session.verify and Session.recycle fill it from rows of logits; of a prompt, which has no rows, begin takes what
    followed in the text.
    """

    def __init__(self, n_vocab: int) -> None:
        """n_vocab: as Session's rows have it; memory is 8 bytes for each token and 1.3 MB for the pairs."""

    def begin(self, tokens: Tokens) -> None:
        """Start a text with these tokens, and learn what follows what in it.

        What other texts have left stays, with chances of its own. Of long texts the last 16384 tokens count.
        """

    def learn(self, before: int, tokens: Tokens, tops: Tokens) -> None:
        """Learn that tops[i] ranked highest behind before, tokens[: i + 1]; negative ids are passed over."""

    def draft(self, before: int, last: int, max_len: int) -> tuple[Tokens, Floats]:
        """Tokens behind (before, last), and their chances; both empty if nothing is known of last.

        A chance is the estimated probability that the target emits the token if it has emitted those before it; it
        follows what came true of drafts of that kind. before = -1: not known.
        """

    def extend(self, tokens: Tokens) -> None:
        """Judge the last draft by what the target emitted, whether the draft was proposed or not."""

    def clear(self) -> None:
        """Forget all entries; how often drafts were right is kept."""

    def copy(self) -> RecycleTable: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the table; they do not grow."""
