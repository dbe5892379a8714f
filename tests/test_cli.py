"""The command line, as a user runs it: a process with arguments, pipes and an exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyssd.cli import output
from pyssd.stats import SpecStats

Done = subprocess.CompletedProcess[str]
ENV = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
SMALL = ("--threads", "1", "--n-ctx", "512")


def pyssd(*arguments: object, stdin: str = "", env: dict[str, str] | None = None) -> Done:
    command = [sys.executable, "-m", "pyssd", *map(str, arguments)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
        env=env or ENV,
    )


def json_of(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


# run -----------------------------------------------------------------------------------------------------------------


def test_run_prints_text_and_one_line_of_statistics(tiny_llama: Path) -> None:
    options = ("-n", 24, "--temp", 0, "--exact", *SMALL)
    drafting = ("--skip-set", "f:1", "--speculative", "on", "--min-confidence", 0)
    done = pyssd("run", tiny_llama, "hello", *options, *drafting)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert len(done.stderr.splitlines()) == 1
    assert "drafted" in done.stderr
    assert "tokens/s" in done.stderr
    plain = pyssd("run", tiny_llama, "hello", *options, "--speculative", "off")
    assert plain.stdout == done.stdout
    assert plain.stderr.startswith("speculation off: ")


def test_run_reads_stdin_and_prints_json(tiny_llama: Path) -> None:
    value = json_of(
        pyssd("run", tiny_llama, "-", "-n", 8, "--raw", "--json", *SMALL, stdin="hello")
    )
    direct = json_of(pyssd("run", tiny_llama, "hello", "-n", 8, "--raw", "--json", *SMALL))
    assert value["text"] == direct["text"]
    assert value["finish_reason"] == "length"
    assert value["chat"] is False
    assert value["stats"]["emitted"] == 8
    assert value["model"] == str(tiny_llama)


def test_run_with_a_seed_repeats_itself(tiny_llama: Path) -> None:
    def text(seed: int) -> str:
        arguments = ("-n", 16, "--temp", 1, "--seed", seed, "--raw", "--json")
        return str(json_of(pyssd("run", tiny_llama, "hello", *arguments, *SMALL))["text"])

    assert text(7) == text(7) != text(8)


@pytest.mark.parametrize("command", [("run", "hello", "-n", "8"), ("info",)])
def test_closed_pipe_is_quiet(command: tuple[str, ...], tiny_llama: Path) -> None:
    arguments = [sys.executable, "-m", "pyssd", command[0], str(tiny_llama), *command[1:], *SMALL]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, env=ENV) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are POSIX")
def test_ctrl_c_ends_run_with_its_statistics(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama", n_layer=24, n_ctx=8192)
    command = [
        sys.executable,
        "-m",
        "pyssd",
        "run",
        str(model),
        "hello",
        "-n",
        "-1",
        "--n-ctx",
        "8192",
    ]
    with subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - started < 10
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"tokens/s" in errors


@pytest.mark.model
def test_small_real_model_by_name(smollm2: Path) -> None:
    arguments = (
        "The capital of France is",
        "--raw",
        "-n",
        8,
        "--temp",
        0,
        "--threads",
        2,
        "--json",
    )
    env = {**ENV, "OMP_NUM_THREADS": "2", "PYSSD_MODELS": str(smollm2.parent)}
    value = json_of(pyssd("run", "smollm2-135m", *arguments, env=env))
    assert "Paris" in value["text"]
    chat = json_of(pyssd("run", "SmolLM2", "Hello!", "-n", 4, "--threads", 2, "--json", env=env))
    assert chat["chat"] is True


def test_run_and_chat_need_no_learning_libraries(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("sklearn", "skopt", "hnswlib", "matplotlib", "scipy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('absent')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {**ENV, "PYTHONPATH": path}
    assert pyssd("run", tiny_llama, "hello", "-n", 4, *SMALL, env=env).returncode == 0
    assert pyssd("chat", tiny_llama, "-n", 4, *SMALL, stdin="hello\n", env=env).returncode == 0


# chat ----------------------------------------------------------------------------------------------------------------


def test_chat_through_pipes(tiny_llama: Path) -> None:
    lines = "hello\n\n/reset\nhello\n/unknown\n/exit\nnever read\n"
    done = pyssd("chat", tiny_llama, "-n", 8, "--temp", 0, *SMALL, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") == 2
    assert "/unknown" in done.stderr
    assert done.stdout.strip()


def test_chat_prints_json(tiny_llama: Path) -> None:
    lines = "hello\nmore\n/reset\nhello\n"
    value = json_of(pyssd("chat", tiny_llama, "-n", 8, "--temp", 0, "--json", *SMALL, stdin=lines))
    turns = value["turns"]
    assert [turn["user"] for turn in turns] == ["hello", "more", "hello"]
    assert turns[0]["assistant"] == turns[2]["assistant"]
    assert value["totals"]["emitted"] == sum(turn["stats"]["emitted"] for turn in turns)


def test_chat_goes_on_after_a_message_that_is_too_long(tiny_llama: Path) -> None:
    lines = "word " * 2000 + "\nhello\n"
    value = json_of(pyssd("chat", tiny_llama, "-n", 8, "--json", *SMALL, stdin=lines))
    assert "error" in value["turns"][0]
    assert value["turns"][1]["stats"]["emitted"] > 0


# info and check ------------------------------------------------------------------------------------------------------


def test_info_shows_blocks_libraries_and_the_plan(tiny_llama: Path) -> None:
    value = json_of(pyssd("info", tiny_llama, "--plan", "a:1 f:1,2", "--json", "--threads", 1))
    assert value["architecture"] == "llama"
    assert [block["kind"] for block in value["blocks"]] == ["attn", "ffn"] * value["n_layer"]
    assert all(block["nbytes"] > 0 for block in value["blocks"])
    assert value["speculation"]["possible"] is True
    assert {"llama", "ggml", "ggml-base", "ggml-cpu"} <= set(value["libraries"])
    assert value["plan"]["skipped_blocks"] == 3
    assert value["plan"]["draft_nodes"] < value["plan"]["target_nodes"]
    empty = json_of(pyssd("info", tiny_llama, "--plan", "none", "--json", "--threads", 1))
    assert empty["plan"]["draft_nodes"] == empty["plan"]["target_nodes"]
    text = pyssd("info", tiny_llama, "--threads", 1)
    assert text.returncode == 0, text.stderr
    assert value["libraries"]["llama"] in text.stdout
    assert text.stderr == ""
    costs = value["costs"]
    assert costs["measured"]
    assert costs["verify"]["1"] > 0.0
    assert sum(c["count"] for c in costs["classes"]) == len(value["blocks"])
    assert min(costs[name] for name in ("c1", "c2", "c3")) >= 0.0
    assert "  V(1) " in text.stdout
    assert "c1 = " in text.stdout


def test_info_says_why_speculation_is_refused(mamba_model: Path) -> None:
    value = json_of(pyssd("info", mamba_model, "--json", "--threads", 1))
    assert value["speculation"]["possible"] is False
    assert value["costs"] is None
    assert len(value["speculation"]["reason"]) > 10
    done = pyssd("info", mamba_model, "--plan", "f:1", "--threads", 1)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_check_measures_the_width_noise(tiny_model: Callable[..., Path]) -> None:
    value = json_of(
        pyssd("check", tiny_model("llama", weight_type="Q8_0"), "--json", "--threads", 1)
    )
    assert set(value["width_noise"]) == {"default", "exact"}
    assert len(value["width_noise"]["exact"]) == 8
    assert set(value["guard_margin"]) == {"default", "exact"}
    for mode, margin in value["guard_margin"].items():
        largest = max(value["width_noise"][mode].values())
        assert (margin == 0.0) if largest == 0.0 else (0.0 <= margin <= 6.0 * largest)
    assert value["single_ggml_cpu"] is not False
    level = value["exactness"]["level"]
    assert level in (1, 2)
    assert (level == 2) <= (max(value["width_noise"]["exact"].values()) == 0.0)
    done = pyssd("check", tiny_model("llama", weight_type="Q8_0"), "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert f"level {level}" in done.stdout


def test_check_works_where_speculation_does_not(mamba_model: Path) -> None:
    assert json_of(pyssd("check", mamba_model, "--json", "--threads", 1))["exactness"]["level"] in (
        1,
        2,
    )


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "no-such-model", "hello"),
        ("run", "MODEL", "hello", "--skip-set", "a:x"),
        ("run", "MODEL", "hello", "--skip-set", "a:99"),
        ("run", "MODEL", "hello", "--draft-len", "0"),
        ("run", "MODEL", "hello", "--lora", "no-such-file"),
        ("run", "MODEL", "hello", "--raw", "--system", "x"),
        ("run", "MODEL", "word " * 5000),
        ("run", "MODEL"),
        ("run", "MODEL", "hello", "--n-ctx", "0"),
        ("run", "MODEL", "hello", "--temp", "warm"),
        ("run", "MODEL", "hello", "--no-such-option"),
        ("chat", "FOLDER"),
        ("info", "TEXT"),
        ("info", "MODEL", "--plan", "f:99"),
        ("check", "no-such-model"),
        ("no-such-command",),
        (),
    ],
)
def test_errors_are_one_sentence_and_exit_2(
    arguments: tuple[str, ...], tiny_llama: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    names = {"MODEL": str(tiny_llama), "FOLDER": str(tmp_path), "TEXT": str(text)}
    done = pyssd(*(names.get(argument, argument) for argument in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "error: " in done.stderr


def test_errors_are_json_where_that_was_asked_for() -> None:
    done = pyssd("run", "no-such-model", "hello", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["type"] == "UnsupportedModelError"


@pytest.mark.parametrize("command", [(), ("run",), ("chat",), ("info",), ("check",)])
def test_help(command: tuple[str, ...]) -> None:
    done = pyssd(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: pyssd")


# the line of statistics ----------------------------------------------------------------------------------------------


def test_line_of_statistics() -> None:
    stats = SpecStats(
        rounds=5,
        drafted=20,
        accepted=15,
        emitted=25,
        accepted_by={"skip": 15},
        decode_seconds=2.5,
        speedup=1.234,
    )
    line = output.summary(stats)
    assert line == (
        "speed-up 1.23x (estimated) | accepted 15 of 20 drafted (75%) | skip 60%, target 40% | 25 tokens, 10.0 tokens/s"
    )
    off = output.summary(SpecStats(reason="plain decoding: memory\ncannot rewind"))
    assert off.startswith("speculation off: memory cannot rewind | ")
    unsure = output.summary(SpecStats(reason="a given set; drafts in every round"))
    assert unsure.startswith("nothing was worth drafting (a given set; drafts in every round) | ")


def test_shares_add_up_when_a_request_ends_inside_a_draft() -> None:
    shares = output.share_by_means(
        SpecStats(emitted=3, accepted=9, accepted_by={"skip": 6, "ngram": 3})
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["target"] == 0.0
    assert output.share_by_means(SpecStats()) == {}
