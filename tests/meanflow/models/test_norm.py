import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.jvp import jvp
from fullstride.meanflow.models.common import GroupNorm, ada_layer_norm, rms_norm


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def test_silu_behind_a_group_norm_is_the_librarys(seed):
    ours = GroupNorm(12, 3, 1e-3, act="silu").double()
    theirs = nn.GroupNorm(3, 12, 1e-3).double()
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())
    x, t = (x.double() for x in draw(seed, (3, 12, 5, 4), (3, 12, 5, 4)))
    found, expected = jvp(ours, (x,), (t,)), torch.func.jvp(lambda x: F.silu(theirs(x)), (x,), (t,))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours(x), expected[0], rtol=1e-9, atol=1e-10)


SHAPES = {
    "group": [(2, 8, 3, 5)],
    "ada": [(2, 5, 7), (2, 1, 7), (2, 1, 7)],
    "rms": [(2, 5, 8), (8,)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_half_precision_is_normalised_in_fp32_with_and_without_a_tangent(name, seed):
    """And rounded once, to what the next layer reads under autocast, or to the queries' and keys' own format."""
    norms = {"group": GroupNorm(8, act="silu"), "ada": ada_layer_norm, "rms": rms_norm}
    xs, ts = (draw(s, *SHAPES[name]) for s in (seed, seed + 10))
    halves = [[x.bfloat16() if i == 0 or name == "ada" else x for i, x in enumerate(a)] for a in (xs, ts)]
    exact = jvp(norms[name], tuple(x.float() for x in halves[0]), tuple(x.float() for x in halves[1]))
    with torch.autocast("cpu", torch.bfloat16):
        alone = norms[name](*halves[0])
        found = jvp(norms[name], tuple(halves[0]), tuple(halves[1]))
    for x, expected in ((alone, exact[0]), *zip(found, exact, strict=True)):
        assert x.dtype == torch.bfloat16
        # Half a step of bf16, and as much again where fp32's own rounding tips the balance.
        torch.testing.assert_close(x.float(), expected, rtol=2**-8, atol=1e-5)
        assert (x != expected.bfloat16()).float().mean() < 0.02
