"""Names of Hugging Face's hub, with a cache in its layout that the test makes, and no network."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.weights import load
from fullstride.llm.weights.hub import is_name
from fullstride.llm.weights.loading import find

COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache; whoever would fetch fails."""
    original = huggingface_hub.snapshot_download

    def only_local(**asked: Any) -> str:
        if not asked.get("local_files_only"):
            raise ConnectionError("no\nnetwork")
        return original(**asked)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", only_local)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, folder: Path, commit: str, reference: str) -> Path:
    """A model in the cache: each file a link to a blob, and the commit under a branch or tag."""
    model = cache / "models--owner--tiny-1.5"
    blobs, snapshot = model / "blobs", model / "snapshots" / commit
    for each in (blobs, snapshot, model / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    (model / "refs" / reference).write_text(commit)
    for file in folder.iterdir():
        shutil.copy(file, blobs / f"{commit}-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{commit}-{file.name}")
    return snapshot


def test_a_name_is_found_in_the_cache_by_branch_tag_and_commit(cache, tiny_qwen2, tiny_qwen3):
    main, tagged = put(cache, tiny_qwen2, COMMITS[0], "main"), put(cache, tiny_qwen3, COMMITS[1], "v2")
    assert find("owner/tiny-1.5") == main
    assert find("owner/tiny-1.5@v2") == find(f"owner/tiny-1.5@{COMMITS[1]}") == tagged
    assert [load(name).config.architecture for name in ("owner/tiny-1.5", "owner/tiny-1.5@v2")] == ["qwen2", "qwen3"]


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors", "everything"])
def test_what_is_not_whole_is_fetched_and_the_reason_why_not_is_one_line(cache, tiny_qwen2, lost):
    if lost != "everything":
        (put(cache, tiny_qwen2, COMMITS[0], "main") / lost).unlink()
    with pytest.raises(ConfigError) as refused:
        load("owner/tiny-1.5")
    start = "model=owner/tiny-1.5: no such file or folder, and not in Hugging Face's cache; fetching it failed: "
    assert str(refused.value).startswith(start)
    assert "no network" in str(refused.value)


def test_what_is_fetched_is_a_models_folder(cache, tiny_qwen3, tmp_path, monkeypatch):
    asked = []

    def fetched(**given: Any) -> str:
        asked.append(given)
        if given.get("local_files_only"):
            raise FileNotFoundError
        return str(tiny_qwen3 if given["repo_id"] == "owner/model" else tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert find("owner/model@main") == tiny_qwen3
    assert [(each["repo_id"], each["revision"]) for each in asked] == [("owner/model", "main")] * 2
    with pytest.raises(ConfigError, match="no config.json: .* run hf download owner/model-GGUF FILE --local-dir DIR"):
        find("owner/model-GGUF")


def test_a_folder_of_that_path_goes_before_the_hub(cache, tiny_qwen3, tmp_path):
    shutil.copytree(tiny_qwen3, tmp_path / "owner" / "tiny-1.5")
    assert find("owner/tiny-1.5") == Path("owner/tiny-1.5")


@pytest.mark.parametrize("name", ["a/b/c", "/a", "a/", "../x", "./a", "~/a", "gpt2", "a/b.gguf", "a/b@", "a b/c"])
def test_paths_are_no_names(name):
    assert not is_name(name)
