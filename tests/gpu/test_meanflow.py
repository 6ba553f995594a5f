"""MeanFlow on a GPU: `python -m pytest tests/gpu`."""

import copy
import dataclasses
import subprocess
import sys
import time

import pytest
import torch

from fullstride.device.precision import autocast, set_precision
from fullstride.errors import OutOfMemory
from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.objectives import WEIGHTINGS
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.config.schema import DataConfig, LossConfig
from fullstride.meanflow.data.edm_augment import AugmentDraw, EdmAugment
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.derivative import velocity_and_derivative
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.training.build import build_model
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import random_unet
from tests.meanflow.training.test_trainer import assert_identical, config, learned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
EXACT = ["func", "forward_ad", "two_pass"]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2)])
def test_derivative_agrees_with_fp64_on_the_cpu(backend, precision, tolerance, seed):
    net = random_unet(seed, time_max_frequency=8.0)
    points = batch_of_points(seed, batch=33, shape=(3, 6, 6))
    z, v, t, r = points
    expected = velocity_and_derivative(net, z, r, t, v)
    net = net.float().cuda()
    z, v, t, r = [a.float().cuda() for a in points]
    set_precision(precision, CUDA)
    with autocast(precision, CUDA):
        got = velocity_and_derivative(net, z, r, t, v, None, backend=backend)
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < tolerance


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("tangent", ["conditional", "predicted", "averaged"])
def test_the_whole_loss_compiles_and_agrees_with_eager(tangent, weighting, seed):
    torch.manual_seed(seed)
    set_precision("fp32", CUDA)
    net = UNet(3, 16, channels=32, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(8,)).cuda()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.05)
    average = copy.deepcopy(net).eval().requires_grad_(False) if tangent == "averaged" else None
    for p in [] if average is None else average.parameters():
        p.mul_(1.5)
    loss = MeanFlowLoss(ratio=0.75, weighting=weighting)
    if tangent != "conditional":
        loss = ImprovedMeanFlow(ratio=0.75, average=average, weighting=weighting)
    x = torch.randn(12, 3, 16, 16, device="cuda")
    e, t, r = loss.draw(x)
    value, _ = loss.at(net, x, e, t, r)
    gradients = torch.autograd.grad(value, list(net.parameters()))
    compiled = torch.compile(lambda x, e, t, r: loss.at(net, x, e, t, r)[0], fullgraph=True)
    got = compiled(x, e, t, r)
    assert relative(got, value) < 1e-5
    together = torch.cat([g.flatten() for g in torch.autograd.grad(got, list(net.parameters()))])
    assert relative(together, torch.cat([g.flatten() for g in gradients])) < 1e-3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["unet_tiny", "song_unet_tiny", "dit_tiny"])
def test_a_step_waits_for_the_device_only_to_report(tmp_path, name):
    """No `.item()`, no copy to the host between reports: any would raise here. Everything is switched on."""
    trainer = Trainer(
        config(
            tmp_path,
            device="cuda",
            epochs=4,
            model=MODELS[name](class_conditional=True),
            data=DataConfig(batch_size=149, hflip=True, augment=0.3 if name == "song_unet_tiny" else 0.0),
            loss=LossConfig(omega=1.5, kappa=0.2, label_dropout=0.2, weighting="huber"),
        )
    )
    for _ in range(2):
        trainer._step(*next(trainer.batches))
        trainer.state.guard.exhausted()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer._step(*next(trainer.batches))
        trainer.state.guard.exhausted()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_that_does_not_fit_is_answered_with_one_that_takes_less(tmp_path, monkeypatch):
    # Where memory is short cuDNN takes another way that needs less of it: the peak of one run would say little.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    base = config(tmp_path, device="cuda", data=DataConfig(batch_size=896), gradient_accumulation_steps=1)
    base = dataclasses.replace(base, model=MODELS["unet_tiny"](channels=128))
    trainer = Trainer(dataclasses.replace(base, run_name="measured"))
    torch.cuda.reset_peak_memory_stats()
    trainer._step(*next(trainer.batches))
    peak = torch.cuda.max_memory_reserved()
    del trainer
    total = torch.cuda.get_device_properties(0).total_memory
    trainer = Trainer(base)
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.7 * peak / total)
        with pytest.raises(OutOfMemory, match=r"data.batch_size=448 gradient_accumulation_steps=2 takes less"):
            trainer.run_to_end()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_harmful_step_is_skipped_on_the_device(tmp_path):
    trainer = Trainer(config(tmp_path, device="cuda"))
    raw, labels = next(trainer.batches)
    trainer._step(raw, labels)
    weights = [p.detach().clone() for p in trainer.state.model.parameters()]
    trainer._step(raw * float("nan"), labels)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.state.model.parameters(), strict=True))
    assert trainer.state.guard.tensors["skipped"].item() == 1
    trainer._step(raw, labels)
    # Not every weight: behind a layer that starts at zero the first gradients are zero.
    assert not all(torch.equal(a, b) for a, b in zip(weights, trainer.state.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["song_unet_tiny", "dit_tiny"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_other_networks_derivatives_agree_with_fp64_on_the_cpu(name, precision, tolerance, seed):
    torch.manual_seed(seed)
    model = MODELS[name]()
    vars(model).update({"dropout": 0.0} if "dropout" in vars(model) else {})
    net = build_model(model, (3, 8, 8), 0).double()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    points = batch_of_points(seed, batch=33, shape=(3, 8, 8))
    z, v, t, r = points
    expected = velocity_and_derivative(net, z, r, t, v)
    net = net.float().cuda()
    z, v, t, r = [a.float().cuda() for a in points]
    set_precision(precision, CUDA)
    with autocast(precision, CUDA):
        got = velocity_and_derivative(net, z, r, t, v)
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < tolerance


def test_augmentation_on_the_gpu_is_the_cpus(seed):
    x = torch.randn(17, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    augment = EdmAugment(0.9)
    draw = augment.draw(17, torch.device("cpu"), torch.Generator().manual_seed(seed))
    on_gpu = AugmentDraw(**{k: v.cuda() for k, v in vars(draw).items()})
    set_precision("fp32", CUDA)
    torch.testing.assert_close(augment.apply(x.cuda(), on_gpu).cpu(), augment.apply(x, draw), rtol=0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact_on_the_gpu(tmp_path, precision):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        base = config(tmp_path, device="cuda", precision=precision)
        constant = dataclasses.replace(base.optimizer, decay="constant")
        base = dataclasses.replace(base, optimizer=constant)
        straight = train(dataclasses.replace(base, run_name="a"))
        train(dataclasses.replace(base, run_name="b", epochs=1))
        resumed = train(dataclasses.replace(base, run_name="b", resume=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_identical(straight, resumed)
    assert learned(straight) == learned(resumed)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_the_compiled_backend_trains_as_eager_does(tmp_path):
    losses = {}
    for backend in ("eager", "compile"):
        base = config(tmp_path, device="cuda", run_name=backend, model=MODELS["dit_tiny"](class_conditional=True))
        trainer = Trainer(dataclasses.replace(base, backend=backend))
        metrics = []
        for _ in range(3):
            metrics.append(trainer._step(*next(trainer.batches)))
            trainer.state.position.step += 1
        losses[backend] = torch.stack([torch.stack([m["squared_error"], m["grad_norm"]]) for m in metrics])
    assert relative(losses["compile"], losses["eager"]) < 1e-3


STOPPED = """
import dataclasses, pathlib, sys
from fullstride.errors import Preempted
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.training.trainer import train
from tests.meanflow.training.test_trainer import config

base = config(pathlib.Path(sys.argv[1]), device="cuda", epochs=10**6, model=MODELS["dit_tiny"](), save_every=0)
try:
    train(dataclasses.replace(base, backend=sys.argv[2]))
except Preempted as stopped:
    print(stopped)
"""


@pytest.mark.parametrize("backend", ["eager", "compile"])
def test_sigterm_saves_whatever_compiled_the_step(tmp_path, backend):
    """Triton's LLVM puts a handler of SIGTERM that serves one signal only; timeout(1) sends two."""
    log = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path), backend], stdout=subprocess.PIPE, text=True
    )
    for _ in range(240):
        time.sleep(0.5)
        if log.is_file() and log.read_text().count("loss") > 5:
            break
    process.terminate()
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped; saved" in out
    assert len(checkpoints(tmp_path / "run")) == 1
