"""The prompts in the package: complete, well-formed, of the sizes that measurements need, and in every wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from pyssd import prompts
from pyssd.errors import OptionError

ROOT = Path(__file__).resolve().parent.parent
N_PROMPTS = 12
LENGTHS = {  # characters of the shortest and the longest prompt
    "chat": (10, 800),
    "code": (80, 1000),
    "code_edit": (800, 3000),
    "summarize": (1200, 3500),
    "translate": (150, 800),
    "maths": (40, 800),
    "sql": (250, 1500),
}


def test_domains_are_those_of_the_files() -> None:
    folder = files("pyssd.prompts")
    found = {entry.name for entry in folder.iterdir() if entry.name.endswith(".jsonl")}
    assert found == {f"{domain}.jsonl" for domain in prompts.domains()}
    assert set(prompts.domains()) == set(LENGTHS)
    assert len(prompts.domains()) == len(LENGTHS)


@pytest.mark.parametrize("domain", LENGTHS)
def test_each_line_is_one_prompt(domain: str) -> None:
    raw = files("pyssd.prompts").joinpath(f"{domain}.jsonl").read_bytes()
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    assert not raw.startswith(b"\xef\xbb\xbf")
    lines = raw.decode("utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    assert rows == prompts.load(domain)
    assert [row["id"] for row in rows] == [f"{domain}-{n:02d}" for n in range(1, N_PROMPTS + 1)]
    for row in rows:
        assert list(row) == ["id", "domain", "prompt"]
        assert row["domain"] == domain
        assert row["prompt"] == row["prompt"].strip()
        shortest, longest = LENGTHS[domain]
        assert shortest <= len(row["prompt"]) <= longest, row["id"]
        assert not re.search(r"[\x00-\x08\x0b-\x1f\ufffd]", row["prompt"])


def test_prompts_are_all_different() -> None:
    rows = [row for domain in prompts.domains() for row in prompts.load(domain)]
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)


def test_unknown_domain_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"poems.*chat, code, code_edit"):
        prompts.load("poems")


@pytest.mark.parametrize("name", ["../chat", "chat.jsonl", ""])
def test_paths_are_no_domains(name: str) -> None:
    with pytest.raises(OptionError):
        prompts.load(name)


def test_classic_complaints_about_speculation_are_covered() -> None:
    chat = {row["prompt"] for row in prompts.load("chat")}
    assert {"When is the sunset in Oslo in June?", "Tell me a story."} <= chat
    sizes = [listing_of(row["prompt"]).count("\n") for row in prompts.load("code_edit")]
    assert 60 in sizes
    assert all(30 <= size <= 80 for size in sizes)


def listing_of(prompt: str) -> str:
    """The one code block of a prompt."""
    (found,) = re.findall(r"^```[a-z]+\n(.*?)^```$", prompt, flags=re.DOTALL | re.MULTILINE)
    return str(found)


def test_python_listings_are_correct_python() -> None:
    listings = [
        listing_of(row["prompt"])
        for row in prompts.load("code_edit")
        if "```python\n" in row["prompt"]
    ]
    assert len(listings) >= 3
    for listing in listings:
        compile(listing, "listing", "exec")


def test_texts_to_summarise_have_200_to_500_words() -> None:
    for row in prompts.load("summarize"):
        assert 200 <= len(row["prompt"].split()) <= 500, row["id"]


def test_every_wheel_has_the_files(tmp_path: Path) -> None:
    """Built by the project's own backend, without the native part: a line in .gitignore or an exclude would drop them."""
    pytest.importorskip("scikit_build_core")
    code = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for domain in prompts.domains():
            source = files("pyssd.prompts").joinpath(f"{domain}.jsonl").read_bytes()
            assert archive.read(f"pyssd/prompts/{domain}.jsonl") == source
