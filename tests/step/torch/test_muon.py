"""Muon against torch's own, and a step that is skipped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.step.torch import muon
from fullstride.step.torch.muon import Muon, orthogonalized

SHAPES = [(5, 9), (9, 5), (1, 7), (6, 6)]


def weights(seed: int, shapes=SHAPES) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=g)


def momenta(optimizer: Muon) -> list[Tensor]:
    return [own["momentum_buffer"] for own in optimizer.state.values()]


def test_it_is_torchs_muon_with_the_size_of_adamws_steps(seed, monkeypatch):
    monkeypatch.setattr(muon, "FORMATS", {})  # torch's own is in bf16 on a CPU, too
    ours, theirs = weights(seed), weights(seed)
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    pair = Muon(ours, **options), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for step in range(4):
        for parameters, optimizer in zip((ours, theirs), pair, strict=True):
            give_gradients(parameters, seed + step)
            optimizer.step()
    for a, b, start in zip(ours, theirs, weights(seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert (a - start).abs().mean() > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cpu_iterates_in_fp32(seed, shape):
    """By the singular values, each of which the quintic takes on its own, in fp64."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    u, values, v = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(muon.ITERATIONS):
        values = muon.A * values + muon.B * values**3 + muon.C * values**5
    assert orthogonalized(x).dtype == torch.float32
    torch.testing.assert_close(orthogonalized(x).double(), u @ values.diag() @ v, rtol=1e-4, atol=2e-5)


def test_the_update_has_about_equal_singular_values(seed):
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(seed))
    values = torch.linalg.svdvals(orthogonalized(x).double())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_filter_is_a_matrix_of_its_outputs(seed):
    (kernel,), (matrix,) = weights(seed, [(4, 3, 2, 2)]), weights(seed, [(4, 12)])
    pair = Muon([kernel], lr=0.1), Muon([matrix], lr=0.1)
    for p, optimizer in zip((kernel, matrix), pair, strict=True):
        give_gradients([p], seed)
        optimizer.step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_a_harmful_step_changes_nothing_and_gradients_are_divided(seed):
    parameters, halved = weights(seed), weights(seed)
    optimizer, plain = Muon(parameters, lr=0.1, weight_decay=0.1), Muon(halved, lr=0.1, weight_decay=0.1)
    for each, own in ((optimizer, parameters), (plain, halved)):
        give_gradients(own, seed)
        each.step()
    before = [p.detach().clone() for p in parameters]
    kept = [x.clone() for x in momenta(optimizer)]
    for p in parameters:
        p.grad = torch.full_like(p, float("nan"))
    vars(optimizer)["found_inf"] = torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(momenta(optimizer), kept, strict=True))
    vars(plain)["found_inf"] = torch.zeros(())
    vars(optimizer).update(found_inf=torch.zeros(()), grad_scale=torch.tensor(4.0))
    give_gradients(parameters, seed + 1)
    give_gradients(halved, seed + 1)
    for p in halved:
        p.grad = None if p.grad is None else p.grad / 4
    optimizer.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, halved, strict=True))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"a weight of shape \(3,\), expected matrices"):
        Muon([nn.Parameter(torch.zeros(3))])
