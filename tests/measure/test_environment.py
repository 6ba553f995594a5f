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
from fullstride.measure.environment import COMMIT_VARIABLE, TUNING, environment, machine_slug


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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/x/bin/fullstride", "bench", "llm", "--only", "3 & 4"], "fullstride bench llm --only '3 & 4'"),
        (["/y/fullstride/__main__.py", "bench", "llm"], "fullstride bench llm"),
        (["fullstride", "bench", "x", "--out", "/tmp/here", "--seconds", "3"], "fullstride bench x --seconds 3"),
        (["fullstride", "bench", "x", "--out=/tmp/here"], "fullstride bench x"),
        (["fullstride", "e", "--official", "/a/b/mf/", "p=/a/b.txt"], "fullstride e --official PATH/mf p=PATH/b.txt"),
        (["fullstride", "e", "runs/a", "x=runs/a", "--model=/m/q"], "fullstride e runs/a x=runs/a --model=PATH/q"),
        (["/y/benchmarks/__main__.py", "llm", "--out=x"], "python -m benchmarks llm"),
        (["/y/other/__main__.py", "llm"], None),
        (["/x/bin/pytest", "bench"], None),
        (["fullstride", "e", "x=[/a/b,/c]", "a/b", "http://x/y"], "fullstride e 'x=[PATH/b,PATH/c]' a/b http://x/y"),
        (["-c"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_command_line_is_kept_without_the_folders_of_this_machine(monkeypatch, untuned, words, expected):
    monkeypatch.setattr(sys, "argv", words)
    assert environment()["command"] == expected


@pytest.fixture
def untuned(monkeypatch):
    for name in [name for name in os.environ if TUNING.fullmatch(name) or name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)


def test_what_tunes_a_run_from_outside_is_kept_and_what_places_it_is_not(monkeypatch, untuned):
    monkeypatch.setattr(sys, "argv", ["fullstride", "bench", "llm"])
    given = {
        "XLA_FLAGS": "--xla_a=1 --xla_dump_to=/tmp/here/dumps --xla_b",
        "NVIDIA_TF32_OVERRIDE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_VISIBLE_DEVICES": "3,GPU-8f2c",
        "NCCL_VERSION": "2.28",
        "CUDA_VERSION": "13.0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_P2P_DIRECT_DISABLE": "1",
        "JAX_COORDINATOR_ADDRESS": "host:1",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/x",
        "FULLSTRIDE_CACHE": "there",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    flags = "'--xla_a=1 --xla_dump_to=PATH/dumps --xla_b'"
    kept = "CUDA_VISIBLE_DEVICES=0,1 NCCL_NVLS_ENABLE=0 NCCL_P2P_DIRECT_DISABLE=1 NVIDIA_TF32_OVERRIDE=0"
    assert environment()["command"] == f"{kept} XLA_FLAGS={flags} fullstride bench llm"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "''"),
        ("2", "0"),
        ("1, 3", "0,1"),
        ("-1", "''"),
        ("NoDevFiles", "''"),
        ("2,-1,3", "0"),
        ("MIG-a/1/0", "MIG-a/1/0"),
    ],
)
def test_of_visible_gpus_their_number_is_kept(monkeypatch, untuned, given, told):
    monkeypatch.setattr(sys, "argv", ["fullstride", "bench", "llm"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert environment()["command"] == f"CUDA_VISIBLE_DEVICES={told} fullstride bench llm"


@pytest.mark.parametrize(("nodes", "expected"), [("1", ""), ("2", "--nnodes=2 ")])
def test_processes_that_torchrun_began_say_so(monkeypatch, untuned, nodes, expected):
    monkeypatch.setattr(sys, "argv", ["/x/fullstride/__main__.py", "meanflow", "train"])
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": nodes, "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert environment()["command"] == f"torchrun {expected}--nproc-per-node=4 -m fullstride meanflow train"


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


@pytest.mark.parametrize(
    ("device", "cpu", "gpu", "slug"),
    [
        ("cuda", "INTEL(R) XEON(R) PLATINUM 8558", "NVIDIA H200", "nvidia-h200"),
        ("cuda", "AMD EPYC", "NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("cpu", "AMD EPYC", "NVIDIA H200", "amd-epyc-16-cores"),
        ("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz", None, "intel-xeon-2-20ghz-16-cores"),
        ("cpu", "Apple M2", None, "apple-m2-16-cores"),
    ],
)
def test_a_machine_has_one_name_that_a_file_can_bear(device, cpu, gpu, slug):
    found = {"cpu": cpu, "cores": 16, "gpu": {"name": gpu} if gpu else None}
    assert machine_slug(device, found) == slug
