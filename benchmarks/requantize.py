"""Write a model in another weight type: python benchmarks/requantize.py MODEL F16|Q8_0|... OUT.gguf

Speed is what such a file is for: it holds what the source's quantisation left of the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("type", choices=("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K"))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    from pyssd.loading import llama_lib
    from pyssd.models import find_model

    kind = {"F32": "LLAMA_FTYPE_ALL_F32"}.get(args.type, f"LLAMA_FTYPE_MOSTLY_{args.type}")
    params = llama_lib.llama_model_quantize_default_params()
    params.ftype = getattr(llama_lib, kind)
    params.allow_requantize = True
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_suffix(".part")
    source = str(find_model(args.model)).encode()
    if llama_lib.llama_model_quantize(source, str(part).encode(), params) != 0:
        raise SystemExit(f"{args.model} could not be written as {args.type}")
    part.replace(args.out)


if __name__ == "__main__":
    main()
