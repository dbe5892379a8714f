"""The text of a benchmark: what was run, a table of speeds, a table of means, peers, and what to make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyssd.bench.summary import MAX_SPREAD, SLOW, SLOW_TOKENS

Figures = Mapping[str, Any]
_NONE = "-"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the report of a result, as results.Results.as_dict() gives it."""
    domains, noisy = result["domains"], bool(result["noisy"])
    if not domains:
        return ["nothing was measured"]
    settings = result["settings"]
    forced = settings.get("synthetic_acceptance")
    text = [_head(settings), "", *_speeds(domains, noisy=noisy), "", *_means(domains)]
    if any(figures.get("peers") for figures in domains.values()):
        text += ["", *_peers(domains, noisy=noisy)]
    text += ["", _noise(result)]
    if not noisy:
        text += _slow(domains)
    text += _texts(domains)
    if forced is not None:
        text.append(
            f"Drafts were forced: plain decoding's own answer, each token spoilt with chance {1 - forced:g}."
            " The speed says what rounds cost, not what pyssd's own drafts are worth."
        )
        text += _predicted(domains, noisy=noisy)
    return text


def _head(settings: Mapping[str, Any]) -> str:
    sampling = (
        "greedy"
        if settings["temperature"] <= 0
        else f"temperature {settings['temperature']:g}, seed {settings['seed']}"
    )
    return (
        f"{settings['model']['name']}: {settings['tokens']} tokens, {sampling}, {settings['repeats']} pairs"
        f" of plain and pyssd a prompt, {settings['n_threads']} threads, exactness level {settings['exactness']}"
        + (", drafts know the prompts before" if settings.get("remember") else "")
    )


def _speeds(domains: Mapping[str, Figures], *, noisy: bool) -> list[str]:
    """Rates; without the columns that compare where the machine was too noisy for that."""
    header = ["domain", "prompts", "plain", "pyssd", "ms/token"]
    compared = [] if noisy else ["speed-up", "95% interval", "worst prompt"]
    rows = [
        [
            name,
            str(figures["prompts"]),
            _number(figures.get("plain_tokens_per_second"), ".1f"),
            _number(figures.get("pyssd_tokens_per_second"), ".1f"),
            _number(_times(figures.get("seconds_per_token"), 1000.0), ".2f"),
            *([] if noisy else _comparison(figures)),
        ]
        for name, figures in domains.items()
    ]
    return [
        "tokens/s (geometric mean over prompts; a prompt's rate is the median of its runs)",
        *table([*header, *compared], rows),
    ]


def _comparison(figures: Figures) -> list[str]:
    worst = figures.get("worst")
    return [
        _number(figures.get("speedup"), ".3f"),
        _interval(figures.get("interval")),
        _NONE if worst is None else f"{worst['speedup']:.3f} {worst['id']}",
    ]


def _means(domains: Mapping[str, Figures]) -> list[str]:
    header = ["domain", "accepted", "length", "share of rounds", "controller", "same text"]
    rows = [
        [
            name,
            _number(figures["acceptance_rate"], ".0%"),
            _number(figures["mean_acceptance_len"], ".2f"),
            _listed(figures["share"], ".0%"),
            _number(figures["controller_share"], ".2%"),
            f"{figures['same_text']} of {figures['prompts']}",
        ]
        for name, figures in domains.items()
    ]
    text = [
        "drafts (length: tokens of a round that drafted, bonus included; controller: share of decode time)",
        *table(header, rows),
    ]
    errors = {
        name: found for name, figures in domains.items() if (found := figures["prediction_error"])
    }
    if errors:
        text += ["", "median error of predicted round times, by means of drafting"]
        text += table(
            ["domain", "error"], [[name, _listed(found, ".1%")] for name, found in errors.items()]
        )
    return text


def _peers(domains: Mapping[str, Figures], *, noisy: bool) -> list[str]:
    names = list(dict.fromkeys(peer for d in domains.values() for peer in d.get("peers", {})))
    rows = []
    problems = []
    for name, figures in domains.items():
        row = [name]
        for peer in names:
            entry = figures.get("peers", {}).get(peer, {})
            rate, compared = entry.get("tokens_per_second"), entry.get("pyssd_ratio")
            known = rate is not None and compared is not None and not noisy
            row.append(f"{rate:.1f} ({compared:.2f}x)" if known else _number(rate, ".1f"))
            if entry.get("failed"):
                problems.append(
                    f"{peer} failed on {entry['failed']} prompts of {name}: {entry['error']}"
                )
        rows.append(row)
    title = "peers: tokens/s" + ("" if noisy else " (pyssd's rate / the peer's)")
    return [title, *table(["domain", *names], rows), *problems]


def _predicted(domains: Mapping[str, Figures], *, noisy: bool) -> list[str]:
    rows = [
        [
            name,
            _number(figures.get("predicted_speedup"), ".3f"),
            _number(None if noisy else figures.get("measured_to_predicted"), ".3f"),
        ]
        for name, figures in domains.items()
    ]
    return ["", *table(["domain", "predicted speed-up", "measured / predicted"], rows)]


def _noise(result: Mapping[str, Any]) -> str:
    spread = result["spread"]
    if spread is None:
        return "Plain runs were not repeated, so nothing is claimed about speed."
    if result["noisy"]:
        return (
            f"The machine was too noisy to claim a speed-up: plain runs of one prompt differ by {spread:.0%}"
            f" (median over prompts), and {MAX_SPREAD:.0%} is the most that tells anything; try again when it is quiet."
        )
    return f"Plain runs of one prompt differ by {spread:.1%} (median over prompts)."


def _slow(domains: Mapping[str, Figures]) -> list[str]:
    slow = [f"{name} {one}" for name, d in domains.items() for one in d.get("slow_prompts", [])]
    if not any(figures["long_enough"] for figures in domains.values()):
        return [f"No answer has the {SLOW_TOKENS} tokens that it takes to call a prompt slow."]
    if slow:
        return [f"Below {SLOW:g} x plain in every pair: {', '.join(slow)}."]
    return [f"No prompt of {SLOW_TOKENS} tokens or more stayed below {SLOW:g} x plain."]


def _texts(domains: Mapping[str, Figures]) -> list[str]:
    total = sum(figures["prompts"] for figures in domains.values())
    same = sum(figures["same_text"] for figures in domains.values())
    if same == total:
        return ["Every text equals plain decoding's."]
    return [
        f"{total - same} of {total} texts fork from plain decoding's (fork rate {1 - same / total:.1%})."
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out a table: the first column to the left, the others to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _interval(value: Sequence[float] | None) -> str:
    return _NONE if value is None else f"{value[0]:.3f} to {value[1]:.3f}"


def _listed(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items()) or _NONE
