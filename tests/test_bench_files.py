"""What pyssd bench reads, writes and joins: prompts, results, runs, peers' answers, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench_records import SETTINGS, row

from pyssd.bench import peer_server, plot, summary
from pyssd.bench.peers import PeerSetting, check_folder, choose as choose_peers
from pyssd.bench.prompts import Prompt, choose, read_file
from pyssd.bench.results import Results, model_fingerprint, prompts_fingerprint
from pyssd.bench.runner import Run, Sampling, first_difference, joint_stats, record
from pyssd.errors import OptionError

# prompts -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_prompts_are_read_with_defaults_and_limited_by_domain(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.dev.jsonl",
        {"prompt": "one"},
        "",
        {"prompt": "two", "id": "x", "domain": "code", "reference": "ignored"},
        {"prompt": "three", "id": 4},
    )
    assert read_file(path) == [
        Prompt("1", "mine", "one"),
        Prompt("x", "code", "two"),
        Prompt("4", "mine", "three"),
    ]
    assert [prompt.text for prompt in choose([path], limit=1)] == ["one", "two"]
    assert [prompt.text for prompt in choose([path], domains=["code"])] == ["two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 of .* is not JSON"),
        ('["x"]', "line 2 of .* is no JSON object"),
        ('{"text": "x"}', 'line 2 of .* has no text under "prompt"'),
        ('{"prompt": "  "}', 'line 2 of .* has no text under "prompt"'),
        ('{"prompt": "x", "domain": [1]}', r'line 2 of .* has \[1\] under "domain"'),
        ('{"prompt": "x", "id": ""}', "line 2 of .* has '' under \"id\""),
    ],
)
def test_malformed_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "good"}, line)
    with pytest.raises(OptionError, match=said) as error:
        read_file(path)
    assert "\n" not in str(error.value)


def test_prompts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "id": "1"}, {"prompt": "y", "id": "1"})
    with pytest.raises(OptionError, match="two prompts of a have the id '1'"):
        choose([path])
    with pytest.raises(OptionError, match="no prompts of the domain 'rag'; known are"):
        choose([write(tmp_path / "b.jsonl", {"prompt": "x"})], domains=["rag"])
    with pytest.raises(OptionError, match="there are no prompts to run"):
        choose([write(tmp_path / "c.jsonl")])
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match=r"d\.jsonl is no UTF-8 text"):
        choose([tmp_path / "d.jsonl"])
    with pytest.raises(FileNotFoundError):
        choose([tmp_path / "absent.jsonl"])


def test_packaged_prompts_are_the_default() -> None:
    prompts = choose(limit=2)
    assert {prompt.domain for prompt in prompts} >= {"chat", "code", "code_edit"}
    assert len(prompts) == 2 * len({prompt.domain for prompt in prompts})


# the file ------------------------------------------------------------------------------------------------------------


def test_file_is_whole_after_every_prompt_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    first = Results(path, SETTINGS, {"command": "one"})
    first.add(row("a", [10, 10], [20, 20]))
    value = json.loads(path.read_text())
    assert (value["noisy"], value["domains"]["code"]["speedup"]) == (False, 2.0)
    assert [item.name for item in path.parent.iterdir()] == ["out.json"]
    second = Results(path, SETTINGS, {"command": "two"}, resume=True)
    assert second.has(Prompt("a", "code", "text"))
    assert not second.has(Prompt("a", "chat", "text"))
    second.add(row("b", [10, 10], [20, 20]))
    value = json.loads(path.read_text())
    assert [record["id"] for record in value["records"]] == ["a", "b"]
    assert [session["command"] for session in value["sessions"]] == ["one", "two"]


def test_interrupted_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    results = Results(path, SETTINGS, {})
    results.add(row("a", [10, 10], [20, 20]))
    before = path.read_bytes()

    def stop(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        results.add(row("b", [10, 10], [20, 20]))
    assert path.read_bytes() == before


def test_file_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    Results(path, SETTINGS, {}).add(row("a", [10, 10], [20, 20]))
    with pytest.raises(OptionError, match=r"out\.json was measured with tokens = 96 and not 64;"):
        Results(path, {**SETTINGS, "tokens": 64}, {})
    with pytest.raises(OptionError, match="with peers = null and not"):
        Results(path, {**SETTINGS, "peers": ["draft"]}, {})


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 1}', '{"settings": {}}'])
def test_file_that_is_no_result_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="is no result of pyssd bench; name another file"):
        Results(path, SETTINGS, {})
    assert path.read_text() == text


def test_resume_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is nothing to resume"):
        Results(tmp_path / "out.json", SETTINGS, {}, resume=True)


def test_fingerprints_tell_models_and_prompts_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"GGUF" + bytes(3 << 20))
    other.write_bytes(b"GGUF" + bytes((3 << 20) - 1) + b"x")
    first, second = model_fingerprint(one), model_fingerprint(other)
    assert first["bytes"] == second["bytes"]
    assert first["ends_sha256"] != second["ends_sha256"]
    prompts = [Prompt("1", "a", "x"), Prompt("2", "a", "y")]
    assert prompts_fingerprint(prompts) != prompts_fingerprint(prompts[::-1])


# runs ----------------------------------------------------------------------------------------------------------------


def answer(tokens: list[int], text: str, *, seconds: float = 0.5, prompt: int = 3) -> Run:
    """A run; the last token is never among those evaluated."""
    evaluated = np.array([*range(prompt), *tokens[:-1]], np.int32)
    stats = {"emitted": len(tokens), "decode_seconds": seconds, "rounds": 2, "accepted": 1}
    return Run(text, evaluated, prompt, "stop", 1.0, 0.1, stats)


def test_rate_leaves_out_the_first_token() -> None:
    assert answer([5, 6, 7], "abc").tokens_per_second == pytest.approx(2 / 0.5)
    assert answer([5], "a").tokens_per_second is None


def test_first_difference_is_a_position_in_the_answer() -> None:
    one = answer([5, 6, 7], "abc")
    assert first_difference(one, answer([5, 6, 7], "abc")) is None
    assert first_difference(one, answer([5, 9, 7], "axc")) == 1
    assert first_difference(one, answer([5, 6, 8], "abx")) == 2  # the token that is not evaluated
    assert first_difference(one, answer([5, 6], "ab")) == 1


def test_record_joins_the_runs_of_a_prompt() -> None:
    plain = [answer([5, 6, 7], "abc", seconds=0.5), answer([5, 6, 7], "abc", seconds=0.4)]
    fast = [answer([5, 6, 7], "abc", seconds=0.2), answer([5, 9, 7], "axc", seconds=0.25)]
    joined = record(Prompt("1", "code", "x"), plain, fast)
    assert joined["plain"]["tokens_per_second"] == [4.0, 5.0]
    assert joined["pyssd"]["tokens_per_second"] == [10.0, 8.0]
    assert (joined["same_text"], joined["fork"], joined["plain_repeats"]) == (False, 1, True)
    assert joined["pyssd"]["stats"]["accepted"] == 2
    json.dumps(joined)


def test_joint_statistics_add_counts_and_average_errors() -> None:
    joint = joint_stats(
        [
            {"rounds": 1, "rounds_by": {"plain": 1}, "prediction_error": {"plain": 0.1}},
            {"rounds": 3, "rounds_by": {"ngram": 2}, "prediction_error": {"plain": 0.3}},
        ]
    )
    assert joint["rounds"] == 4
    assert joint["rounds_by"] == {"plain": 1, "ngram": 2}
    assert joint["prediction_error"] == {"plain": pytest.approx(0.2)}
    assert "controller_seconds" not in joint


# peers and pictures --------------------------------------------------------------------------------------------------


def test_rate_of_the_server_is_read() -> None:
    times = {"predicted_n": 65, "predicted_per_second": 128.0, "prompt_n": 32}
    drafts = {"draft_n": 48, "draft_n_accepted": 31}
    assert peer_server.read({"timings": {**times, **drafts}}, n_prompt=32) == {
        "tokens_per_second": 128.0,
        "tokens": 65,
        "same_prompt": True,
        "drafted": 48,
        "accepted": 31,
    }
    assert peer_server.read({"timings": times}, n_prompt=31)["same_prompt"] is False
    single = {"timings": {**times, "predicted_n": 1}}
    assert peer_server.read(single, n_prompt=32)["tokens_per_second"] is None
    assert peer_server.read({"content": ""}, n_prompt=31) == {"error": "its answer has no times"}


def test_server_gets_the_same_sampling_and_threads(tmp_path: Path) -> None:
    def setting(temperature: float) -> PeerSetting:
        sampling = Sampling(96, temperature, 7)
        return PeerSetting(tmp_path, Path("m.gguf"), Path("d.gguf"), sampling, 2, 512)

    words = peer_server.command(setting(0.0), "draft-simple", 80)
    options = dict(zip(words[1::2], words[2::2], strict=True))
    expected = {"-m": "m.gguf", "-t": "2", "-tb": "2", "-td": "2", "-c": "512", "-md": "d.gguf"}
    expected |= {"--spec-type": "draft-simple", "--port": "80"}
    assert {name: options[name] for name in expected} == expected
    assert "-md" not in peer_server.command(setting(0.0), "ngram-mod", 80)
    greedy = peer_server.request(setting(0.0), [1, 2])
    assert (greedy["prompt"], greedy["n_predict"], greedy["top_k"]) == ([1, 2], 96, 1)
    drawn = peer_server.request(setting(0.8), [1, 2])
    assert (drawn["temperature"], drawn["seed"], drawn["top_k"]) == (0.8, 7, 40)


def test_peers_are_chosen_or_refused(tmp_path: Path) -> None:
    assert choose_peers(None, None) == []
    assert "draft" not in choose_peers([], None)
    assert choose_peers([], "small")[-1] == "draft"
    assert choose_peers(["ngram-mod", "ngram-mod"], None) == ["ngram-mod"]
    with pytest.raises(OptionError, match="there is no peer 'vllm'; known are llama_cpp,"):
        choose_peers(["vllm"], None)
    with pytest.raises(OptionError, match="'draft' needs a smaller model"):
        choose_peers(["draft"], None)
    with pytest.raises(OptionError, match="run make peers, or name its folder"):
        check_folder(tmp_path, ["llama_cpp"])
    with pytest.raises(OptionError, match="there is no llama-server"):
        check_folder(tmp_path, ["ngram-mod"])


def test_picture_without_matplotlib_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        plot.check()


def test_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    figures = summary.summarise([row("a", [10, 10], [20, 20]), row("b", [10, 10], [11, 11])])
    plot.write(path, "small.gguf", {"code": figures, "chat": {"prompts": 1}})
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
