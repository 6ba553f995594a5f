"""A derivative takes each convolution and each product of a weight twice: for the primal and for the tangent."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.objective.derivative import velocity_and_derivative, velocity_and_some_derivatives
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.compiled_products import NETWORKS, PRODUCTS, Counting, products


@pytest.fixture(params=NETWORKS)
def network(request, seed) -> nn.Module:
    torch.manual_seed(seed)
    return NETWORKS[request.param]()


def points(seed: int) -> list[Tensor]:
    z, v, t, r = batch_of_points(seed, shape=(3, 8, 8))
    return [x.float() for x in (z, r, t, v)]


@pytest.mark.parametrize("backend", ["func", "forward_ad", "two_pass"])
def test_no_derivative_takes_a_third_product(network, backend, seed):
    z, r, t, v = points(seed)
    with Counting() as forward:
        network(z, r, t)
    with Counting() as both:
        velocity_and_derivative(network, z, r, t, v, backend=backend)
    assert products(forward.seen) > 8
    assert products(both.seen) == (2 + (backend == "two_pass")) * products(forward.seen)


class BySamples(TorchDispatchMode):
    """The number of samples of each convolution and product of a weight, which its results have, too."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.seen = tokens, Counter[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func) in PRODUCTS:
            rows = out.shape[0]
            self.seen[rows // self.tokens if rows >= self.tokens and out.ndim == 2 else rows] += 1
        return out


def test_one_pass_takes_each_product_once_of_all_samples_and_once_of_some(network, seed):
    z, r, t, v = points(seed)
    tokens = 16 if isinstance(network, DiT) else len(z) + 1  # of a patch's vector, which counts as a sample's
    with BySamples(tokens) as forward:
        network(z, r, t)
    with BySamples(tokens) as both:
        velocity_and_some_derivatives(network, z, r, t, v[:3])
    count = forward.seen[7]
    assert forward.seen == {7: count}
    assert count > 8
    assert both.seen == {7: count, 3: count}


@pytest.mark.parametrize(
    "name", ["unet", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("song_unet", "dit"))]
)
def test_nor_does_a_compiled_one(forked, name):
    (done,) = forked(["tests.meanflow.objective.compiled_products", name])
    assert done.returncode == 0, done.stderr[-3000:]
