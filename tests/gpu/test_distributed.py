"""Training on two GPUs, by copies and over NCCL: `python -m pytest tests/gpu/test_distributed.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullstride.step.torch import BACKENDS
from tests.gpu.rounds import ROUNDS
from tests.gpu.together import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

KINDS = ("ddp", "fsdp")


def torchrun(*args: str, count: int = 2) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    given = os.environ | {"OMP_NUM_THREADS": "4"}
    started = subprocess.Popen([*launcher, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given)
    with started:
        try:
            out, error = started.communicate(timeout=300)
        finally:
            started.terminate()  # it ends its processes: killed itself, it would leave them waiting on their GPUs
    assert started.returncode == 0, out[-4000:] + error[-12000:]
    return out + error


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of all scenarios' results; processes start and meet once."""
    path = tmp_path_factory.mktemp("together")
    torchrun("-m", "tests.gpu.together", str(path))
    return path


@pytest.mark.parametrize(
    ("transfers", "backend", "accumulate"), [(by, *case) for by, cases in CASES.items() for case in cases]
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_two_gpus_are_those_of_one(folder, kind, transfers, backend, accumulate):
    alone = torch.load(folder / f"alone-{accumulate}.pt", map_location="cpu")
    first, second = (torch.load(folder / f"{kind}-{backend}-{accumulate}-{transfers}-{rank}.pt") for rank in (0, 1))
    for name, expected in alone.items():
        torch.testing.assert_close(first[name], expected, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(first[name], second[name]), name
    assert first["errors"] < 1e-4
    assert first["buckets"] >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_backward_pass_hands_gradients_over_as_they_come(folder, kind):
    for backend in BACKENDS:
        found = torch.load(folder / f"{kind}-{backend}-1-copies-0.pt")
        # Of six layers' twelve tensors, some of the compiler's results may stand for two.
        assert (found["early"] >= 6) == ("compile" in backend), (backend, found["early"])


def test_all_choose_the_same_backend(folder):
    chosen = {(folder / f"auto-{rank}.txt").read_text() for rank in (0, 1)}
    assert len(chosen) == 1
    assert chosen <= set(BACKENDS)


@pytest.mark.parametrize("kind", KINDS)
def test_harm_to_one_process_is_skipped_by_all_within_a_replay(folder, kind):
    assert [(folder / f"harm-{kind}-{rank}.txt").read_text() for rank in (0, 1)] == ["True True"] * 2


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> Path:
    """Folder of the results of means by copies, in rounds between GPUs with random delays."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs GPUs that reach each other's memory")
    path = tmp_path_factory.mktemp("rounds")
    torchrun("-m", "tests.gpu.rounds", str(path))
    return path


def test_copies_are_what_gradients_travel_by_unasked(rounds):
    assert [(rounds / f"unasked-{rank}.txt").read_text() for rank in (0, 1)] == ["copies"] * 2


@pytest.mark.parametrize("how", ["eager", "replayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_means_of_gpus_with_random_delays_are_each_rounds_own(rounds, kind, how):
    for rank in (0, 1):
        errors = torch.load(rounds / f"rounds-{rank}.pt")[f"{kind}, {how}"]
        wrong = (~(errors < 1e-5)).nonzero().flatten().tolist()  # a NaN is one, too
        assert wrong == [], f"process {rank}: rounds {wrong[:10]} of {len(errors)}, off by {errors[wrong[0]]}"
        assert len(errors) >= ROUNDS


def test_a_run_shared_by_two_gpus_goes_on_with_one(tmp_path):
    words = "meanflow train device=cuda model=unet_tiny loss.meanflow_ratio=0.5 data.batch_size=128 save_every=1"
    where = [f"output_dir={tmp_path}", "run_name=a", "log_every=1"]
    told = torchrun("-m", "fullstride", *words.split(), *where, "distributed=fsdp", "backend=graph", "epochs=1")
    assert told.count("trained:") == 1
    alone = [sys.executable, "-m", "fullstride", *words.split(), *where, "backend=graph", "epochs=2", "resume=true"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "made by 2 processes" in done.stderr
