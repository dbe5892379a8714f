"""A process that runs stock llama_cpp.Llama once: a job in JSON on stdin, times in JSON on stdout.

It imports nothing of pyssd, so that llama_cpp opens the libraries that LLAMA_CPP_LIB_PATH names.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Read a job, generate, write tokens and the seconds between the first and the last of them."""
    job = json.load(sys.stdin)
    from llama_cpp import Llama, llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafting: dict[str, Any] = {}
    if job["lookup"]:
        # without logits_all the prompt lookup of this version fails on prompts longer than n_batch
        draft_model = LlamaPromptLookupDecoding(num_pred_tokens=job["lookup"])
        drafting = {"draft_model": draft_model, "logits_all": True}
    llm = Llama(
        job["model"],
        n_ctx=job["n_ctx"],
        n_threads=job["n_threads"],
        n_threads_batch=job["n_threads"],
        n_gpu_layers=job["n_gpu_layers"],
        seed=job["seed"],
        verbose=False,
        **drafting,
    )
    times: list[float] = []
    # generate, not create_completion: what that adds for each token has nothing to do with decoding
    for token in llm.generate(job["tokens"], temp=job["temperature"]):
        times.append(time.perf_counter())
        if len(times) >= job["max_tokens"] or llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            break
    json.dump({"tokens": len(times), "seconds": times[-1] - times[0]}, sys.stdout)


if __name__ == "__main__":
    main()
