"""Measure plain decoding against pyssd on this machine, prompt by prompt in pairs.

Prints a table by domain; --json keeps everything, and an interrupted run goes on where it stopped when the same command is
given again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyssd.cli import options, output
from pyssd.errors import ContextOverflowError, OptionError

if TYPE_CHECKING:
    from pyssd.bench.peers import PeerSetting
    from pyssd.bench.prompts import Prompt
    from pyssd.bench.results import Results
    from pyssd.bench.runner import PeerRun, Sampling
    from pyssd.bench.synthetic import Forcing
    from pyssd.llama import Llama

NAME = "bench"
HELP = "measure plain decoding against pyssd"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    options.add_model(parser, json_line=False)
    parser.add_argument(
        "--kernels", choices=("auto", "upstream"), help="kernels of both sides (default: auto)"
    )
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='JSON lines with "prompt", "domain" and "id" (default: the prompts that come with pyssd)',
    )
    group.add_argument(
        "--domains", nargs="+", metavar="NAME", help="only these domains (default: all)"
    )
    group.add_argument(
        "--limit", type=options.positive, metavar="N", help="the most prompts of a domain"
    )
    group.add_argument(
        "--tokens",
        type=options.positive,
        default=96,
        metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )
    group.add_argument(
        "--repeats",
        type=options.positive,
        default=2,
        metavar="K",
        help="pairs of runs a prompt, at least 2 (default: %(default)s)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="S",
        help="of sampling and of the intervals (default: %(default)s)",
    )
    group.add_argument(
        "--remember",
        action="store_true",
        help="let drafts know the prompts before the one that is measured, as one request knows those before it"
        " (default: they know nothing)",
    )
    group.add_argument(
        "--synthetic-acceptance",
        type=float,
        metavar="A",
        help="accept each drafted token with this chance, whatever the model says: texts become meaningless",
    )
    group = parser.add_argument_group("peers (built by make peers)")
    group.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="also run llama_cpp, prompt-lookup, prompt-lookup-2, ngram-simple, ngram-mod, draft (none named: all)",
    )
    group.add_argument(
        "--peers-bin", type=Path, metavar="FOLDER", help="where they are (default: build/peers/bin)"
    )
    group.add_argument("--draft-model", metavar="MODEL", help="the smaller model of the peer draft")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--json",
        dest="out",
        type=Path,
        metavar="OUT",
        help="write results here after every prompt; a run with the same settings goes on",
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with OUT, which must be there already"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="write speed-ups as a PNG (needs matplotlib)"
    )
    # main() asks for these two of every command
    parser.set_defaults(json=False, speculative="auto")
    parser.set_defaults(draft_len=None, min_confidence=None, skip_set=None)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status, 0 also where the machine was too noisy to claim anything."""
    from pyssd.bench import peers, plot, prompts, report
    from pyssd.bench.peers import runners

    _check(args)
    chosen = prompts.choose(args.prompts or (), domains=args.domains, limit=args.limit)
    names = peers.choose(args.peers, args.draft_model)
    folder = args.peers_bin or peers.DEFAULT_FOLDER
    if names:
        peers.check_folder(folder, names)
    if args.plot is not None:
        plot.check()
    with options.load(args) as llm:
        from pyssd.bench.synthetic import Forcing  # uses the engine, whose libraries are loaded now

        setting = _peer_setting(args, llm, folder)
        results = _results(args, llm, chosen, names)
        force = None
        if args.synthetic_acceptance is not None:
            force = Forcing(llm, args.synthetic_acceptance, setting.sampling.seed)
        _measure(
            llm,
            chosen,
            results,
            args.repeats,
            runners(names, setting),
            force,
            setting,
            remember=args.remember,
        )
    result = results.as_dict()
    for line in report.lines(result):
        print(line)
    if args.plot is not None and result["noisy"]:
        output.note("no picture was made: the machine was too noisy")
    elif args.plot is not None:
        plot.write(args.plot, result["settings"]["model"]["name"], result["domains"])
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before a model loads."""
    from pyssd.models import find_model

    if args.repeats < 2:
        raise OptionError(
            "--repeats is 1; use at least 2, as only repeated runs tell how noisy the machine is"
        )
    if not 0.0 <= args.temperature <= 10.0:
        raise OptionError(f"--temperature is {args.temperature:g}; use a number from 0 to 10")
    if args.synthetic_acceptance is not None and not 0.0 <= args.synthetic_acceptance <= 1.0:
        raise OptionError(
            f"--synthetic-acceptance is {args.synthetic_acceptance:g}; use a chance from 0 to 1"
        )
    if args.resume and args.out is None:
        raise OptionError("--resume needs the file to go on with; name it after --json")
    if args.peers is not None and args.lora is not None:
        raise OptionError("peers run the model without an adapter; leave out --peers or --lora")
    if args.draft_model is not None:
        find_model(args.draft_model)  # a typing error is reported before the model loads
    for path in (args.out, args.plot):
        if path is not None and path.is_dir():
            raise OptionError(f"{path} is a folder; name a file")


def _sampling(args: argparse.Namespace) -> Sampling:
    from pyssd.bench.runner import Sampling

    return Sampling(args.tokens, args.temperature, args.seed & 0x7FFFFFFF)


def _peer_setting(args: argparse.Namespace, llm: Llama, folder: Path) -> PeerSetting:
    from pyssd.bench.peers import PeerSetting
    from pyssd.models import find_model

    draft = None if args.draft_model is None else find_model(args.draft_model)
    return PeerSetting(
        folder,
        Path(llm.model_path),
        draft,
        _sampling(args),
        llm.n_threads,
        llm.n_ctx(),
        args.gpu_layers,
    )


def _results(
    args: argparse.Namespace, llm: Llama, chosen: list[Prompt], peers: list[str]
) -> Results:
    from pyssd.bench import machine
    from pyssd.bench.results import Results, model_fingerprint, prompts_fingerprint

    sampling = _sampling(args)
    settings: dict[str, Any] = {
        "model": model_fingerprint(Path(llm.model_path)),
        "prompts": prompts_fingerprint(chosen),
        "tokens": sampling.tokens,
        "repeats": args.repeats,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "n_ctx": llm.n_ctx(),
        "n_threads": llm.n_threads,
        "gpu_layers": args.gpu_layers,
        "kernels": args.kernels or "auto",
        "exactness": llm.exactness.level,
        "lora": None if args.lora is None else Path(args.lora).name,
        "peers": peers,
        "draft_model": args.draft_model if "draft" in peers else None,
        "remember": True if args.remember else None,  # None: files from before the option go on
        "synthetic_acceptance": args.synthetic_acceptance,
        "processor": machine.processor(),
    }
    session = machine.session(["pyssd", *sys.argv[1:]])
    return Results(args.out, settings, session, resume=args.resume)


@contextlib.contextmanager
def _named(prompt: Prompt) -> Iterator[None]:
    """Say which prompt does not fit."""
    try:
        yield
    except ContextOverflowError as error:
        raise OptionError(f"prompt {prompt.id} of {prompt.domain}: {error}") from None


def _measure(
    llm: Llama,
    chosen: list[Prompt],
    results: Results,
    repeats: int,
    peers: dict[str, PeerRun],
    force: Forcing | None,
    setting: PeerSetting,
    *,
    remember: bool,
) -> None:
    """Run what is not in the results yet."""
    from pyssd.bench import runner

    todo = [prompt for prompt in chosen if not results.has(prompt)]
    if not todo:
        return
    if len(todo) < len(chosen):
        output.note(f"{len(chosen) - len(todo)} of {len(chosen)} prompts are finished already")
    with _named(todo[0]):
        seconds = runner.warm_up(llm, todo[0].text, setting.sampling)
    llm.forget_drafts()
    if remember:  # what an interrupted run had learnt
        for prompt in chosen:
            if results.has(prompt):
                runner.run_once(llm, prompt.text, setting.sampling, "auto")
    results.note_warm_up(seconds)
    for prompt in todo:
        with _named(prompt):
            record = runner.measure(
                llm,
                prompt,
                setting.sampling,
                repeats,
                peers=peers,
                force=force,
                remember=remember,
            )
        if force is not None:
            record["synthetic"] = force.take()
        results.add(record)
        rates = {
            arm: max(record[arm]["tokens_per_second"], default=0.0) for arm in ("plain", "pyssd")
        }
        output.note(
            f"{len(results.records)}/{len(chosen)} {prompt.domain} {prompt.id}: plain {rates['plain']:.1f},"
            f" pyssd {rates['pyssd']:.1f} tokens/s"
        )
