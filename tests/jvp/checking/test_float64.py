import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullstride.jvp import attention, layer_norm
from fullstride.jvp.checking.float64 import CoarsestFormat, in_float64, on_copies, to_float64

CPU = torch.device("cpu")


def points(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


class Casting(nn.Module):
    """Module with every kind of cast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(1 / 3))
        self.scale: torch.Tensor
        self.constant = torch.tensor(1 / 7)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x.float()) * self.scale
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(h, self.linear.weight)
        h = h.to(torch.bfloat16).half() * self.constant + torch.tensor(1 / 9)
        h = torch.cat([h.type_as(self.scale), torch.full((1, 6), 1 / 11, dtype=torch.float32)])
        return layer_norm(h.to(dtype=torch.float16), self.linear.bias)


def test_nothing_of_a_module_is_rounded(seed):
    torch.manual_seed(seed)
    net, (x,) = Casting(), points(seed, (3, 6))
    w, b = net.linear.weight.double(), net.linear.bias.double()
    exact = in_float64(net, CPU)
    h = (x @ w.T + b) * net.scale.double() @ w.T * net.constant.double() + 1 / 9
    h = torch.cat([h, torch.full((1, 6), 1 / 11, dtype=torch.float64)])
    expected = F.layer_norm(h, (6,), b)
    with torch.autocast("cpu", torch.bfloat16):
        found = exact(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    # torch.tensor(1 / 9) is exact, too: only what was rounded before is.
    assert (found - expected).abs().max() < 1e-13 * expected.abs().max() * 100
    assert (net(x.float()).double() - expected).abs().max() > 1e-4
    assert torch.get_default_dtype() == torch.float32
    assert net.linear.weight.dtype == torch.float32


def test_a_function_over_a_module_is_exact_too(seed):
    torch.manual_seed(seed)
    net, (x,) = nn.Sequential(nn.Linear(6, 6), nn.GELU()), points(seed, (3, 6))
    exact = in_float64(lambda x: net(x.half()).sum(), CPU)(x)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, net.double()(x).sum(), rtol=1e-13, atol=0)


def test_a_named_implementation_is_plain_in_the_reference(seed):
    q, k, v = points(seed, *[(1, 2, 5, 4)] * 3)
    fused = lambda q: attention(q, k, v, implementation="triton")  # noqa: E731
    with pytest.raises(ValueError, match="implementation is 'triton'"):
        fused(q)
    torch.testing.assert_close(in_float64(fused, CPU)(q), F.scaled_dot_product_attention(q, k, v))
    with pytest.raises(ValueError, match="implementation is 'triton'"):
        fused(q)


def test_buffers_stay_as_they_are(seed):
    net, (x,) = nn.BatchNorm1d(6), points(seed, (30, 6))
    before = {k: b.clone() for k, b in net.named_buffers()}
    y = on_copies(net)(x.float())
    exact = in_float64(net, CPU)(x)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(b, before[k]) for k, b in net.named_buffers())
    run = lambda x: x  # noqa: E731
    assert on_copies(run) is run


def test_integers_and_other_values_are_left():
    assert to_float64(torch.arange(3)).dtype == torch.int64
    assert to_float64(torch.float16) == torch.float64
    assert to_float64(torch.int32) == torch.int32
    assert to_float64("x") == "x"
    assert to_float64(torch.ones(2).bfloat16()).dtype == torch.float64


@pytest.mark.parametrize("coarsest", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_coarsest_format_is_noted(coarsest):
    x = torch.ones(3, dtype=torch.float64)
    with CoarsestFormat() as formats:
        assert (x.to(coarsest).double().split(1)[0] + torch.arange(1)).item() == 1
    assert formats.coarsest == coarsest
