"""Hostile files, full contexts, foreign skip sets: each is a clear exception or the same result as plain decoding."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from robust import DRAFTING, N_CTX, SKIPPED, complete, make, one_sentence, random_prompt

from pyssd import Llama, SkipSet
from pyssd.errors import ContextOverflowError, PyssdError, SkipSetError


@pytest.fixture
def llm(tiny_llama: Path) -> Iterator[Llama]:
    with make(tiny_llama, skip_set=SKIPPED, speculative=DRAFTING) as made:
        yield made


# files -------------------------------------------------------------------------------------------------------------


def header_only(path: Path, architecture: str, **numbers: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        writer.add_uint16(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def broken_file(kind: str, folder: Path, model: Path) -> Path:
    content = model.read_bytes()
    path = folder / "model.gguf"
    if kind == "missing":
        return path
    if kind == "directory":
        path.mkdir()
        return path
    if kind == "missing shard":
        return header_only(
            folder / "model-00001-of-00002.gguf", "llama", split__no=0, split__count=2
        )
    if kind == "unknown architecture":
        return header_only(path, "no-such-architecture")
    if kind == "no tensors":
        return header_only(path, "llama")
    path.write_bytes(
        {
            "empty": b"",
            "one byte": b"G",
            "text": b"this is not a model\n" * 100,
            "magic only": content[:4],
            "cut in the header": content[:300],
            "cut at half": content[: len(content) // 2],
            "cut at the end": content[:-100],
            "version 1": content[:4] + b"\1\0\0\0" + content[8:],
            "version 99": content[:4] + b"\x63\0\0\0" + content[8:],
            "zeroed header": content[:8] + bytes(64) + content[72:],
            "huge counts": content[:8] + b"\xff" * 16 + content[24:],
        }[kind]
    )
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "missing", "directory", "missing shard", "unknown architecture", "no tensors", "empty", "one byte", "text",
        "magic only", "cut in the header", "cut at half", "cut at the end", "version 1", "version 99", "zeroed header",
        "huge counts",
    ],
)  # fmt: skip
def test_bad_file_is_one_clear_error(kind: str, tmp_path: Path, tiny_llama: Path) -> None:
    path = broken_file(kind, tmp_path, tiny_llama)
    started = time.monotonic()
    with pytest.raises((PyssdError, OSError)) as caught:
        make(path)
    assert one_sentence(caught.value)
    assert time.monotonic() - started < 5.0
    with make(tiny_llama) as llm:  # the process is unharmed
        assert complete(llm, "a", 4)["text"]


def test_flipped_bytes_in_the_header_never_crash(tmp_path: Path, tiny_llama: Path) -> None:
    content = tiny_llama.read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    for _ in range(8):
        damaged = bytearray(content)
        for place in rng.integers(0, 1500, 4):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        # in a process of its own: a crash must not take the other tests along
        script = "import sys, pyssd\ntry: pyssd.Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False).close()\n"
        script += "except Exception as error: sys.exit(3)"
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, timeout=60, check=False
        )
        assert done.returncode in (0, 3), (done.returncode, done.stderr[-500:])


def test_load_can_be_aborted(tiny_llama: Path) -> None:
    seen: list[float] = []

    def stop(progress: float) -> bool:
        seen.append(progress)
        return False

    with pytest.raises(PyssdError) as caught:
        make(tiny_llama, progress_callback=stop)
    assert one_sentence(caught.value)
    assert len(seen) >= 1
    with make(tiny_llama, progress_callback=lambda _: True) as llm:
        assert complete(llm, "a", 4)["text"]


# limits of the context ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [N_CTX, N_CTX + 1, N_CTX + 300])
def test_prompt_longer_than_the_context(llm: Llama, n_prompt: int) -> None:
    before = complete(llm, "hello")
    with pytest.raises(ContextOverflowError, match=str(N_CTX)) as caught:
        complete(llm, random_prompt(llm, n_prompt))
    assert isinstance(caught.value, ValueError)
    assert one_sentence(caught.value)
    assert complete(llm, "hello") == before


@pytest.mark.parametrize("n_prompt", [200, 248, 253, 254, 255])
@pytest.mark.parametrize("seed", [1, 2])
def test_draft_longer_than_the_room_left(llm: Llama, n_prompt: int, seed: int) -> None:
    prompt = random_prompt(llm, n_prompt, seed)
    drafted = complete(llm, prompt, max_tokens=None)
    assert llm.stats.drafted > 0 or n_prompt > 248
    plain = complete(llm, prompt, max_tokens=None, speculative="off")
    assert drafted == plain


def test_skip_set_for_another_model(llm: Llama, tiny_llama: Path) -> None:
    n_layer = 1 + max(block.layer for block in llm.blocks)
    for value in (
        SkipSet(mlp=[1], n_layer=n_layer + 1),
        f"f:{n_layer}",
        {"attention": [n_layer + 3]},
    ):
        with pytest.raises(SkipSetError) as caught:
            make(tiny_llama, skip_set=value)
        assert one_sentence(caught.value)
        with pytest.raises(SkipSetError):
            complete(llm, "hello", skip_set=value)
    assert complete(llm, "hello") == complete(llm, "hello", speculative="off")
