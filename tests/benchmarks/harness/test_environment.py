import os
import sys

import pytest

from benchmarks.harness.environment import TUNING, environment, machine_slug


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
