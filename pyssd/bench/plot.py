"""One picture of a benchmark: speed-up of each domain with its interval. matplotlib is imported here only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyssd.errors import OptionError


def check() -> None:
    """Check that matplotlib is there, before an hour of measuring.

    Raises:
        OptionError: it is not installed.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise OptionError(
            "--plot needs matplotlib, which is not installed; run pip install matplotlib"
        )


def write(path: Path, title: str, domains: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a PNG.

    Args:
        path: the file.
        title: above the picture.
        domains: figures by domain, as summary.summarise returns them; those without a speed-up are left out.
    """
    check()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {name: figures for name, figures in domains.items() if figures.get("speedup")}
    names = list(shown)[::-1]  # the first domain at the top
    figure, axes = plt.subplots(figsize=(7.0, 1.2 + 0.45 * len(names)))
    for row, name in enumerate(names):
        value = shown[name]["speedup"]
        low, high = shown[name]["interval"] or (value, value)
        axes.plot([low, high], [row, row], color="0.35", linewidth=2)
        axes.plot([value], [row], "o", color="tab:blue")
        axes.annotate(f"{value:.2f}", (value, row), (0, 6), textcoords="offset points", ha="center")
    axes.axvline(1.0, color="0.6", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.3)
    axes.set_xlabel("speed-up over plain decoding, 95% interval over prompts")
    axes.set_title(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)
