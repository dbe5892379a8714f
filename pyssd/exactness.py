"""How exact speculative output is here: level 1 (same distribution) or 2 (same tokens as plain decoding)."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass

# types that ggml-cpu multiplies by one dot product per row in reference mode and in verify passes, at every width;
# tests/test_lossless.py compares drafted with plain text for the ones that gguf can write and the real models hold
_INVARIANT_TYPES = frozenset(
    """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS I32""".split()  # noqa: SIM905
)
_X86 = frozenset(("x86_64", "amd64"))


@dataclass(frozen=True, slots=True)
class Exactness:
    """What holds for every text, with speculation on or off.

    Attributes:
        level: 1 = the same distribution (always); 2 = also the same tokens as plain decoding.
        reason: Why it is this level, one sentence.
    """

    level: int
    reason: str


def judge_exactness(
    *,
    exact: bool,
    flash_attn: bool,
    devices: Collection[str],
    weight_types: Collection[str],
    packed: bool = False,
    elsewhere: Collection[str] = (),
    guard: float = 0.0,
) -> Exactness:
    """Report the level; anything that has not been shown to be independent of the batch's width is level 1.

    Args:
        exact: As asked for when loading.
        flash_attn: Whether the context runs flash attention (auto resolved).
        devices: Names of the devices that hold blocks.
        weight_types: Names of the tensor types in the file.
        packed: Whether pyssd's own kernels run what they can.
        elsewhere: Buffer types that hold weights outside of pyssd's kernels.
        guard: Margin of the near-tie guard in logits, 0 = there is none.
    """
    found = _judge(exact, flash_attn, devices, weight_types, packed, elsewhere)
    if found.level < 2 and guard > 0.0:
        return Exactness(
            found.level,
            f"{found.reason}; picks within {guard:.2g} logits of another are settled singly (near-tie guard)",
        )
    return found


def _judge(
    exact: bool,
    flash_attn: bool,
    devices: Collection[str],
    weight_types: Collection[str],
    packed: bool,
    elsewhere: Collection[str],
) -> Exactness:
    if not flash_attn:
        return Exactness(
            1, "flash attention is off: attention rounds differently with the width of the batch"
        )
    offloaded = sorted({device for device in devices if not device.upper().startswith("CPU")})
    if offloaded:
        return Exactness(
            1,
            f"blocks are on {', '.join(offloaded)}: its kernels round with the width of the batch",
        )
    if packed and not elsewhere:
        return Exactness(2, "pyssd's kernels compute every row as if it were alone")
    unknown = sorted(set(weight_types) - _INVARIANT_TYPES)
    if unknown:
        return Exactness(1, f"weights of type {', '.join(unknown)} have no width-invariant kernel")
    if platform.machine().lower() not in _X86:
        # ARM's i8mm kernels take two rows at a time where the batch allows it
        return Exactness(1, f"upstream's kernels were not checked on {platform.machine()}")
    if exact:
        return Exactness(2, "exact=True: reference kernels give the same logits at every width")
    return Exactness(2, "upstream's kernels compute the rows of a verify pass as single rows")
