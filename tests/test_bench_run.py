"""pyssd bench on models: what it runs, writes, resumes, refuses and says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyssd
from pyssd.bench import peers, runner
from pyssd.bench.prompts import Prompt
from pyssd.bench.runner import Sampling
from pyssd.bench.synthetic import Forcing, Outcomes, SpoiltDrafts, predict

ENV = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
SMALL = ("--threads", "1", "--n-ctx", "512", "--tokens", "12")


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyssd", "bench", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=False, env=ENV
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts of two domains."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "domain": "chat", "prompt": "Say hello."},
        {"id": "b", "domain": "copy", "prompt": "Repeat: one two three one two three one two"},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


# the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_small_real_model_end_to_end(smollm2: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = (smollm2, "--prompts", prompts, *SMALL, "--json", out)
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    value = json.loads(out.read_text())
    assert [record["id"] for record in value["records"]] == ["a", "b"]
    assert set(value["domains"]) == {"chat", "copy"}
    for record in value["records"]:
        assert record["same_text"], "exactness level 2: texts are equal"
        assert len(record["plain"]["tokens_per_second"]) == 2
        assert record["pyssd"]["stats"]["emitted"] == 2 * record["tokens"]
        assert record["plain"]["first_token_seconds"][0] <= record["plain"]["wall_seconds"][0]
    assert value["settings"]["exactness"] == 2
    assert str(tmp_path) not in json.dumps({**value, "sessions": []})
    assert "Every text equals plain decoding's." in done.stdout
    assert ("too noisy" in done.stdout) is value["noisy"]
    # the same command again measures nothing and says the same
    before = out.read_bytes()
    again = bench(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert again.stderr == ""
    assert out.read_bytes() == before


def test_interrupted_run_goes_on(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = (tiny_llama, "--prompts", prompts, *SMALL, "--json", out)
    assert bench(*arguments).returncode == 0
    value = json.loads(out.read_text())
    kept = value["records"].pop(0)
    value["records"] = [kept]
    out.write_text(json.dumps(value))
    done = bench(*arguments)
    assert "1 of 2 prompts are finished already" in done.stderr
    records = json.loads(out.read_text())["records"]
    assert records[0] == kept
    assert [record["id"] for record in records] == ["a", "b"]


def test_file_of_other_settings_is_refused(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:  # fmt: skip
    out = tmp_path / "out.json"
    arguments = (tiny_llama, "--prompts", prompts, *SMALL, "--limit", 1, "--json", out)
    assert bench(*arguments).returncode == 0
    done = bench(*arguments, "--temperature", 0.5)
    assert done.returncode == 2
    assert "was measured with temperature = 0.0 and not 0.5" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--repeats", 1), "--repeats is 1; use at least 2"),
        (("--temperature", -1), "--temperature is -1"),
        (("--synthetic-acceptance", 1.5), "--synthetic-acceptance is 1.5"),
        (("--resume",), "--resume needs the file"),
        (("--json", "."), ". is a folder"),
        (("--peers", "vllm"), "there is no peer 'vllm'"),
        (("--peers", "draft"), "'draft' needs a smaller model"),
        (("--peers", "ngram-mod", "--peers-bin", "absent"), "run make peers"),
        (("--peers", "--lora", "x.gguf"), "peers run the model without an adapter"),
        (("--draft-model", "no-such-draft"), "there is no model 'no-such-draft'"),
        (("--domains", "poems"), "no prompts of the domain 'poems'"),
    ],
)
def test_mistakes_are_one_sentence_before_a_model_loads(
    arguments: tuple[object, ...], said: str
) -> None:
    done = bench("no-such-model.gguf", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_prompt_that_does_not_fit_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "hello " * 2000, "id": "big"}) + "\n")
    done = bench(tiny_llama, "--prompts", path, *SMALL)
    assert done.returncode == 2
    assert "prompt big of long: " in done.stderr
    assert "exceed" in done.stderr


# pairs ---------------------------------------------------------------------------------------------------------------


def test_each_pyssd_run_begins_without_what_drafts_learnt(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    with pyssd.Llama(str(tiny_llama), n_ctx=512, n_threads=1, verbose=False) as llm:
        forget, run_once = llm.forget_drafts, runner.run_once

        def noting_forget(back_to: Any) -> None:
            assert back_to is None
            happened.append("forget")
            forget(back_to)

        def noting_run(llm: Any, text: str, sampling: Sampling, speculative: str) -> runner.Run:
            happened.append(speculative)
            run = run_once(llm, text, sampling, speculative)
            assert run.stats["prompt_tokens"] == run.n_prompt, "no cell of an earlier run is used"
            return run

        monkeypatch.setattr(llm, "forget_drafts", noting_forget)
        monkeypatch.setattr(runner, "run_once", noting_run)
        record = runner.measure(llm, Prompt("1", "x", "hello hello"), Sampling(8, 0.8, 3), 2)
    assert happened == ["off", "forget", "auto", "off", "forget", "auto"]
    assert record["plain_repeats"], "the same seed gives the same text"


def test_with_remember_drafts_know_the_prompts_before_and_not_this_one(tiny_llama: Path) -> None:
    sampling = Sampling(24, 0.0, 3)
    with pyssd.Llama(str(tiny_llama), n_ctx=512, n_threads=1, verbose=False) as llm:
        planner = llm._planner
        assert planner is not None
        knew: list[int] = []
        forget = planner.forget_drafts

        def noting_forget(back_to: Any) -> None:
            forget(back_to)
            knew.append(n_known(planner._table))

        planner.forget_drafts = noting_forget  # type: ignore[method-assign]
        for text in ("hello hello", "the sea was calm"):
            runner.measure(llm, Prompt("1", "x", text), sampling, 3, remember=True)
    # at first nothing, then the first prompt, which is the same before each repeat
    assert knew[:3] == [0, 0, 0]
    assert knew[3] > 0
    assert knew[3:] == [knew[3]] * 3


def n_known(table: Any) -> int:
    """Tokens behind which a table has a draft."""
    return 0 if table is None else sum(len(table.draft(-1, token, 1)[0]) for token in range(400))


def test_an_interrupted_run_that_remembers_learns_what_it_had_learnt(
    tiny_llama: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    lines = [json.dumps({"prompt": f"hello {word}", "id": word}) for word in ("sea", "sky")]
    prompts.write_text("\n".join(lines) + "\n")
    done = bench(tiny_llama, "--prompts", prompts, "--remember", "--json", out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "drafts know the prompts before" in done.stdout
    value = json.loads(out.read_text())
    value["records"] = value["records"][:1]
    out.write_text(json.dumps(value))
    done = bench(tiny_llama, "--prompts", prompts, "--remember", "--json", out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(out.read_text())["records"]) == 2
    done = bench(tiny_llama, "--prompts", prompts, "--json", out, *SMALL)
    assert done.returncode == 2
    assert "remember" in done.stderr


# forced drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.9, 1.0])
def test_outcomes_have_the_chance_they_were_asked_for(acceptance: float) -> None:
    outcomes = Outcomes(acceptance, seed=1)
    lengths = np.array([outcomes.next(8) for _ in range(500)])
    for length in range(1, 9):
        assert np.mean(lengths >= length) == pytest.approx(acceptance**length, abs=0.01)
    again = Outcomes(acceptance, seed=1)
    assert [again.next(8) for _ in range(500)] == lengths.tolist()


def test_prediction_is_the_best_length_of_the_table() -> None:
    table = [0.0, 2.0, 2.2, 2.4, 40.0]
    # in the long run a round of two drafted tokens emits 1.75 for 2.4 seconds
    best = predict(table, 0.5, 600)
    assert best.draft_len == 2
    assert best.speedup == pytest.approx(1.75 * 2.0 / 2.4, rel=2e-3)
    assert best.speedup < 1.75 * 2.0 / 2.4
    assert predict(table, 0.0, 50).speedup == pytest.approx(1.0)
    assert predict([0.0, 1.0, 3.0], 0.9, 50).draft_len == 0


def test_prediction_knows_the_end_of_the_answer_and_other_graphs() -> None:
    table = [0.0, 2.0, 2.2, 2.4]
    assert predict(table, 0.9, 1).speedup == 1.0  # a single token leaves nothing to draft
    # one token drafted: right with 0.9, else a plain pass follows
    assert predict(table, 0.9, 2).speedup == pytest.approx(4.0 / (2.2 + 0.1 * 2.0))
    # each of the two passes has a new width
    switched = predict(table, 0.9, 2, switch=0.5)
    assert switched.speedup == pytest.approx(4.5 / (0.5 + 2.2 + 0.1 * (2.0 + 0.5)))
    # a switch that costs more than drafting gains
    assert predict(table, 0.9, 2, switch=30.0).draft_len == 0


def test_spoilt_draft_is_right_up_to_its_outcome() -> None:
    answer = np.arange(10, 20, dtype=np.int32)
    drafts = SpoiltDrafts(answer, 0.5, Outcomes(0.5, seed=4))
    drafts.start(np.zeros(3, np.int32), 10)
    at, seen = 1, set()
    while at < len(answer):
        draft = drafts.draft(4)
        assert draft is not None
        n = drafts.n_accepted(len(draft.tokens))
        right = draft.tokens == answer[at : at + len(draft.tokens)]
        assert right.tolist() == [position != n for position in range(len(right))]
        seen.add(n)
        drafts.emitted(answer[at : at + n + 1])
        at += n + 1
    assert drafts.draft(4) is None
    assert len(seen) > 1


def test_forced_run_keeps_the_text_and_accepts_as_asked(tiny_llama: Path) -> None:
    sampling = Sampling(64, 0.0, 1)
    with pyssd.Llama(str(tiny_llama), n_ctx=512, n_threads=1, verbose=False) as llm:
        assert llm._planner is not None
        # what rounds of such a model cost is nobody's interest here: each draft of four pays
        monkey = _FlatCosts()
        llm._planner.controller.costs = monkey
        force = Forcing(llm, 0.6, seed=1)
        record = runner.measure(llm, Prompt("1", "x", "hello"), sampling, 2, force=force)
        assert llm._planner.forced is None
    stats = record["pyssd"]["stats"]
    assert record["same_text"]
    assert stats["rounds_by"].get("ngram", 0) > 10
    # at most four tokens a draft, 0.6 each: 1.31 on average
    assert stats["accepted"] / stats["rounds"] == pytest.approx(1.306, abs=0.25)
    taken = force.take()
    assert taken["draft_len"] == [4, 4]
    # 1 + 1.306 in the long run, less what the end of the answer costs
    assert taken["predicted_speedup"] == pytest.approx([2.27, 2.27], abs=0.03)
    assert force.take() == {"predicted_speedup": [], "draft_len": []}


class _FlatCosts:
    """Passes up to five tokens cost what one costs, wider ones far more."""

    measured = True
    switch_seconds = 0.0

    scale = 1.0
    switch_units = 0.0

    def table(self, n_past: int) -> list[float]:
        return [0.0, *[1e-3] * 5, *[1.0] * 59]

    units = table

    def draft_seconds(self, skip: object, n_past: int, head_rows: int = 0) -> float:
        return 1.0

    def observe_verify(self, width: int, n_past: int, seconds: float, *, switched: bool) -> None:
        pass

    def observe_draft(self, predicted: float, seconds: float) -> None:
        pass


# peers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_peers_run_the_same_prompt(smollm2: Path) -> None:
    folder = Path(__file__).resolve().parent.parent / peers.DEFAULT_FOLDER
    if not (folder / "llama-server").is_file():
        pytest.skip("the peers have not been built; run: make peers")
    sampling = Sampling(12, 0.0, 1)
    with pyssd.Llama(str(smollm2), n_ctx=512, n_threads=2, verbose=False) as llm:
        setting = peers.PeerSetting(folder, smollm2, smollm2, sampling, 2, 512)
        run = runner.run_once(llm, "Count from one to twenty.", sampling, "off")
        tokens = run.evaluated[: run.n_prompt].tolist()
        for name, run_peer in peers.runners(peers.NAMES, setting).items():
            result = run_peer(tokens)
            assert result.get("error") is None, name
            assert result["same_prompt"], name
            assert result["tokens_per_second"] > 0, name


def test_peer_that_fails_says_why(tiny_llama: Path, tmp_path: Path) -> None:
    # any folder without a libllama will do
    setting = peers.PeerSetting(tmp_path, tiny_llama, None, Sampling(4, 0.0, 1), 1, 512)
    found = peers.runners(["llama_cpp", "ngram-mod"], setting)
    assert found["llama_cpp"]([1, 2])["error"].startswith("exit status 1: ")
    assert found["ngram-mod"]([1, 2])["error"].startswith("it could not be started")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script")
def test_server_that_ends_or_answers_nonsense_is_an_error(tiny_llama: Path, tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    setting = peers.PeerSetting(tmp_path, tiny_llama, None, Sampling(4, 0.0, 1), 1, 512)
    program.write_text("#!/bin/sh\necho the model is too large\nexit 1\n")
    program.chmod(0o755)
    run = peers.runners(["ngram-mod"], setting)["ngram-mod"]
    assert run([1, 2]) == {"error": "it did not come up: the model is too large"}
    program.write_text(f"#!{sys.executable}\n{_SERVER}")
    assert run([1, 2]) == {
        "tokens_per_second": 50.0,
        "tokens": 4,
        "same_prompt": True,
        "drafted": 3,
        "accepted": 1,
    }
    assert run([1, 2, 3])["same_prompt"] is False
    assert run([7]) == {"error": "it answered with status 500: {'timings': {}}"}


_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["n_predict"] == 4 and body["cache_prompt"] is False
        if body["prompt"] == [7]:
            return self.reply(500, {"timings": {}})
        times = {"predicted_n": 4, "predicted_per_second": 50.0, "prompt_n": 2}
        self.reply(200, {"timings": {**times, "draft_n": 3, "draft_n_accepted": 1}})

    def reply(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
