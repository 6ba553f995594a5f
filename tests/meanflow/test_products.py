"""A derivative takes each convolution and each product of a weight twice: for the primal and for the tangent."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.derivative import velocity_and_derivative
from tests.meanflow.compiled_products import NETWORKS, Counting, products
from tests.meanflow.fields import batch_of_points


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


@pytest.mark.parametrize("name", NETWORKS)
def test_nor_does_a_compiled_one(name):
    command = [sys.executable, "-m", "tests.meanflow.compiled_products", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
