from typing import Any

import torch
from torch import Tensor, nn

from fullstride.step.torch.distributed.early_gradients import listening
from fullstride.step.torch.runners.backends import compiled_loss


def loss(model: nn.Module, batch: Tensor) -> Any:
    return model(batch).square().mean()


def test_a_compiled_backward_pass_tells_of_each_gradient_before_it_ends():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 2))
    batch, told, arrived = torch.randn(7, 3), {}, []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(len(told)))
    compiled: Any = compiled_loss(loss, telling=True)
    with listening(lambda number, gradient: told.__setitem__(number, (gradient.data_ptr(), gradient.clone()))):
        compiled(model, batch).backward()
    assert arrived == [4] * 4
    gradients = {p.grad.data_ptr(): p.grad for p in model.parameters() if p.grad is not None}
    assert {place for place, _ in told.values()} == set(gradients)
    assert all(torch.equal(value, gradients[place]) for place, value in told.values())
    expected = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    compiled(model, batch).backward()  # with nobody listening
    assert len(told) == 4
