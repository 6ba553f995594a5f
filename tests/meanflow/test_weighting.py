import numpy as np
import pytest
import torch

from fullstride.meanflow.weighting import adaptive_weight


@pytest.mark.parametrize("power", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("c", [1e-3, 1e-2])
def test_matches_the_formula_in_double_precision(power, c, seed):
    error = torch.rand(11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100
    expected = 1 / (error.numpy() + c) ** power
    np.testing.assert_allclose(adaptive_weight(error, power, c).numpy(), expected, rtol=1e-12)


def test_no_gradient_flows_through_the_weight():
    error = torch.tensor([2.0, 3.0], requires_grad=True)
    (adaptive_weight(error, 1.0, 1e-2) * error).sum().backward()
    assert error.grad is not None
    torch.testing.assert_close(error.grad, 1 / (error.detach() + 1e-2))


def test_a_loss_of_mean_squares_is_this_one_with_eps_times_the_elements(seed):
    elements, power, c = 37, 0.75, 1e-2
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(5, elements, generator=generator, dtype=torch.float64, requires_grad=True)
    total, mean = error.square().sum(1), error.square().mean(1)
    ours = (adaptive_weight(total, power, c * elements) * total).mean()
    theirs = (mean / (mean.detach() + c) ** power).mean()
    torch.testing.assert_close(ours, elements ** (1 - power) * theirs)
    gradients = [torch.autograd.grad(loss, error)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(gradients[0], elements ** (1 - power) * gradients[1])


@pytest.mark.parametrize(("power", "c"), [(-1.0, 1e-3), (1.0, 0.0)])
def test_refuses_what_has_no_meaning(power, c):
    with pytest.raises(ValueError, match="expected power >= 0 and eps > 0"):
        adaptive_weight(torch.ones(2), power, c)
