"""MODEL arguments: paths, fetched models and installed packages, and a clear error for everything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyssd.errors import UnsupportedModelError
from pyssd.models import cache_dir, find_model, known_models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("PYSSD_MODELS", str(folder))
    return folder


def install(site: Path, name: str, files: list[str]) -> None:
    """Lay out an installed distribution whose module fails when it is imported."""
    package = name.replace("-", "_")
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for file in files:
        (site / package / file).write_bytes(b"GGUF")
    record = [f"{package}/__init__.py,,", *(f"{package}/{file},," for file in files)]
    (info / "RECORD").write_text("\n".join(record) + "\n")


def test_path_wins_over_names(cache: Path, tmp_path: Path) -> None:
    (cache / "x.gguf").write_bytes(b"GGUF")
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    assert find_model(str(path)) == path
    assert find_model("x") == cache / "x.gguf"


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct.Q4_1",
        "smollm2-135m",
        "SmolLM2_135M",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ],
)
def test_fetched_model_by_name(cache: Path, name: str) -> None:
    path = cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    assert find_model(name) == path


def test_installed_package_is_found_and_not_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install(site, "llm-tiny-one", ["tiny.gguf"])
    install(site, "llm-two", ["a.gguf", "b.gguf"])
    install(site, "llm-parts", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
    monkeypatch.syspath_prepend(str(site))
    assert find_model("llm_tiny_one") == site / "llm_tiny_one" / "tiny.gguf"
    assert find_model("llm-two/b") == site / "llm_two" / "b.gguf"
    assert find_model("llm-parts").name == "m-00001-of-00002.gguf"
    with pytest.raises(UnsupportedModelError, match="may be llm-two/a, llm-two/b"):
        find_model("llm-two")
    assert "llm_tiny_one" not in sys.modules
    assert {"llm-tiny-one", "llm-two/a", "llm-two/b", "llm-parts"} <= set(known_models())


def test_unknown_name_lists_what_is_known(cache: Path) -> None:
    (cache / "alpha.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"'beta'.*alpha"):
        find_model("beta")
    with pytest.raises(UnsupportedModelError):
        find_model("")


def test_ambiguous_name_is_an_error(cache: Path) -> None:
    for name in ("qwen-0.5b", "qwen-1.5b"):
        (cache / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"may be qwen-0.5b, qwen-1.5b"):
        find_model("qwen")


def test_folder_is_left_to_the_loader(cache: Path, tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path


def test_cache_folder_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSSD_MODELS", str(tmp_path / "none"))
    assert cache_dir() == tmp_path / "none"
    with pytest.raises(UnsupportedModelError, match="no model 'zzz'"):
        find_model("zzz")
