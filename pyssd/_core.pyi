"""Typed view of the C++ core.

Pointers travel as int (a ctypes address); token arrays as int32; every call that decodes releases
the GIL. Failures raise the classes of pyssd.errors; a wrong argument raises ValueError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]

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

    def __init__(self, ctx: int, *, exact: bool = False, invariant: bool = False) -> None:
        """exact: ggml-cpu's reference mode; invariant: the attention of pyssd's CPU kernels."""
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
        self, chain: int, last_token: int, max_len: int, min_confidence: float = 0.0
    ) -> tuple[Tokens, Floats]:
        """Ids and confidences. Leaves no cell behind.

        chain is the target's chain, of which the session keeps a copy (0 = greedy). Ends at the
        first token below min_confidence (not kept), at an end of generation (kept), at max_len or
        max_draft, or where the grammar leaves no candidate.
        """

    def verify(self, chain: int, last_token: int, draft: Tokens) -> Tokens:
        """Emitted tokens, 1 to len(draft) + 1 of them.

        n_past grows by their number; the last one is not in KV yet.
        """

    def verify_begin(self, last_token: int, draft: Tokens) -> None:
        """Run the rows of a verify, to be sampled one by one: for logits processors in Python."""

    def verify_end(self, n_emitted: int) -> None:
        """Keep n_emitted (1 to len(draft) + 1) rows. A round that is never ended is dropped."""

    # ---- scout: fresh passes on scratch sequences, the user's cells untouched
    def skip_logits(self, tokens: Tokens, skip: Bits | None, head_rows: int = 0) -> Floats:
        """Logits [n, n_vocab] of one fresh pass under a skip set; -inf beyond head_rows."""

    def skip_argmax(self, tokens: Tokens, skip: Bits | None) -> Tokens:
        """The likeliest token after every position [n] of one fresh pass under a skip set."""

    def hidden(self, tokens: Tokens, taps: Tokens) -> Floats:
        """Residual stream [n_taps, n, n_embd] before each tapped block (n_blocks = after all)."""

    def free_scout(self) -> None:
        """Free the scout's context; the next call makes it anew."""

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
        (part of it), draft_steps, verify_calls, chain_copies (stateful samplers, such as a grammar,
        copied for drafting).
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
