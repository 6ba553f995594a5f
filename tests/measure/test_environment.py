import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch

from fullstride.measure import environment as module
from fullstride.measure.environment import COMMIT_VARIABLE, environment


def test_versions_and_machine_are_this_ones():
    found = environment()
    assert found["python"] == platform.python_version()
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["versions"]["numpy"] == importlib.metadata.version("numpy")
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert found["cpu"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found["date"])) < timedelta(minutes=1)
    assert json.loads(json.dumps(found)) == found


def test_what_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", ("numpy", "no-such-package-anywhere"))
    assert set(environment()["versions"]) == {"numpy"}


def test_a_gpu_that_torch_sees_is_named_with_its_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.1\necho 570.1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    expected = {"name": "NVIDIA H200", "memory_bytes": 150 << 30, "cuda": torch.version.cuda}
    assert environment()["gpu"] == expected | {"driver": "570.1"}
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["gpu"] == expected | {"driver": None}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with the package in it and one commit; returns a function that runs git there."""
    package = tmp_path / "fullstride" / "measure"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("")
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str) -> str:
        env = os.environ | names
        done = subprocess.run(["git", *arguments], cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    monkeypatch.setattr(module, "__file__", str(package / "environment.py"))
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    return git


def test_the_commit_is_the_packages_own(repository, tmp_path):
    found = environment()
    assert found["commit"] == repository("rev-parse", "HEAD")
    assert found["dirty"] is False
    (tmp_path / "fullstride" / "measure" / "environment.py").write_text("changed = True\n")
    assert environment()["dirty"] is True


def test_a_new_module_makes_the_tree_dirty_and_results_beside_it_do_not(repository, tmp_path):
    (tmp_path / "benchmarks.json").write_text("{}")
    assert environment()["dirty"] is False
    (tmp_path / "fullstride" / "new.py").write_text("")
    assert environment()["dirty"] is True


def test_another_projects_repository_has_no_say(repository, tmp_path, monkeypatch):
    package = tmp_path / ".venv" / "lib" / "fullstride" / "measure"
    package.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(package / "environment.py"))
    assert (environment()["commit"], environment()["dirty"]) == (None, None)


def test_a_copy_without_history_says_so_or_is_told(monkeypatch, tmp_path):
    (tmp_path / "fullstride" / "measure").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "fullstride" / "measure" / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert (environment()["commit"], environment()["dirty"]) == (None, None)
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert (environment()["commit"], environment()["dirty"]) == ("abc123", None)


def test_the_given_commit_goes_before_the_history(repository, monkeypatch):
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert environment()["commit"] == "abc123"


def test_the_command_is_that_of_this_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fullstride", "meanflow", "evaluate", "runs/a run"])
    assert environment()["command"] == "fullstride meanflow evaluate 'runs/a run'"
