"""Acceptance of sampled drafts: coupled noise against independent sampling, over the same texts.

Both arms emit the same text (the target's), so they see the same contexts; only the draft's noise differs. Drafts have
three tokens and no confidence bound. Usage:

    python benchmarks/coupling.py [--model PATH] [--data DIR] [--prompts 40] [--tokens 64] [--temperature 1.0]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pyssd
from pyssd.sampling import chain_address, couple

DRAFT_LEN = 3
SKIP_SET = "f:1,3,6,9,12,13,15,27"
DOMAINS = ("chat", "code", "gsm8k", "instruct", "qa", "storytelling", "text_to_sql", "translation")


def read_prompts(folder: Path, n: int) -> list[str]:
    """Take the first prompts of every domain in turn."""
    rows = [
        (folder / f"{domain}.dev.jsonl").read_text(encoding="utf-8").splitlines()
        for domain in DOMAINS
    ]
    return [
        json.loads(rows[i % len(DOMAINS)][i // len(DOMAINS)])["prompt"][:1500] for i in range(n)
    ]


def make_chain(llm: pyssd.Llama, temperature: float, seed: int) -> Any:
    llm.set_seed(seed)
    sampler = llm._init_sampler(temp=temperature, top_k=0, top_p=1.0, min_p=0.0)
    couple(sampler, seed)
    return sampler


def run_prompt(
    llm: pyssd.Llama, prompt: list[int], n_tokens: int, temperature: float, seeds: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (drafted, accepted, token) of every round; seeds of the target's and the draft's noise."""
    session = llm._session
    assert session is not None
    target, draft = (make_chain(llm, temperature, seed) for seed in seeds)
    session.rewind(0)
    session.prefill(np.asarray(prompt, np.int32))
    last = session.sample(chain_address(target))
    for _ in range(n_tokens):
        if last == llm.token_eos():
            return
        chain = target if seeds[0] == seeds[1] else draft
        tokens, _ = session.draft(chain_address(chain), last, DRAFT_LEN)
        emitted = session.verify(chain_address(target), last, tokens)
        yield len(tokens), len(emitted) - 1, int(emitted[-1])
        last = int(emitted[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=24, help="rounds per prompt")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--skip-set", default=SKIP_SET)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coupling.json"))
    args = parser.parse_args()

    from pyssd.models import find_model

    rates: dict[str, list[int]] = {"coupled": [0, 0], "independent": [0, 0]}
    with pyssd.Llama(str(find_model(args.model)), n_ctx=2048, verbose=False) as llm:
        session = llm._session
        assert session is not None
        session.set_skip(pyssd.SkipSet.of(args.skip_set, llm.blocks).bits(llm.blocks))
        for number, text in enumerate(read_prompts(args.data, args.prompts)):
            chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            prompt = llm.tokenize(chat.encode(), special=True)
            seed = random.Random(number).getrandbits(31)
            for name, draft_seed in (("coupled", seed), ("independent", seed ^ 0x5BD1E995)):
                for drafted, accepted, _ in run_prompt(
                    llm, prompt, args.tokens, args.temperature, (seed, draft_seed)
                ):
                    rates[name][0] += drafted
                    rates[name][1] += accepted
            print(
                f"{number + 1}/{args.prompts} "
                + " ".join(f"{name} {a / max(d, 1):.3f}" for name, (d, a) in rates.items()),
                file=sys.stderr,
            )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown'}",
        "model": args.model,
        "temperature": args.temperature,
        "draft_len": DRAFT_LEN,
        "skip_set": args.skip_set,
        "prompts": args.prompts,
        **{
            name: {"drafted": d, "accepted": a, "acceptance_rate": round(a / d, 4)}
            for name, (d, a) in rates.items()
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
