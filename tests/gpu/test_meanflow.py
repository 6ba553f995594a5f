"""MeanFlow on a GPU: `python -m pytest tests/gpu`."""

import dataclasses

import pytest
import torch

from fullstride.meanflow.derivative import velocity_and_derivative
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective import MeanFlowLoss
from fullstride.meanflow.trainer import train
from fullstride.precision import autocast, set_precision
from tests.meanflow.fields import batch_of_points
from tests.meanflow.test_derivative import random_unet
from tests.meanflow.test_trainer import assert_identical, config, learned

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
def test_the_whole_loss_compiles_and_agrees_with_eager(seed):
    torch.manual_seed(seed)
    set_precision("fp32", CUDA)
    net = UNet(3, 16, channels=32, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(8,)).cuda()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.05)
    loss = MeanFlowLoss(ratio=0.75)
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
def test_a_step_waits_for_the_device_only_to_report(tmp_path):
    """No `.item()`, no copy to the host between reports: any would raise here."""
    from fullstride.meanflow.trainer import Trainer

    trainer = Trainer(config(tmp_path, device="cuda", optimizer=config(tmp_path).optimizer))
    batches = trainer._batches(0)
    trainer._step(batches[0])
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer._step(batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
