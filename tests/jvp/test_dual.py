import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, vmap

from fullstride.jvp.dual import Dual, outermost_level, pack, refuse_higher_order, unpack, unpack_all


def points(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return list(torch.randn(2, 3, 4, generator=g, dtype=torch.float64))


def test_a_dual_tensor_is_taken_apart_and_put_together(seed):
    x, t = points(seed)
    with forward_ad.dual_level():
        primal, tangent = unpack(forward_ad.make_dual(x, t))
        assert torch.equal(primal, x)
        assert tangent is not None
        assert torch.equal(tangent, t)
        again = forward_ad.unpack_dual(pack(2 * primal, 3 * tangent))
        assert torch.equal(again.primal, 2 * x)
        assert again.tangent is not None
        assert torch.equal(again.tangent, 3 * t)
        assert unpack_all(again.primal) == [(again.primal, None)]
    assert unpack_all(None) == [(None, None)]


def test_without_a_tangent_the_tensor_itself_comes_back():
    x, _ = points(0)
    assert unpack(x) == Dual(x, None)
    assert unpack(x).primal is x
    assert pack(x, None) is x
    with forward_ad.dual_level():
        assert unpack(x).tangent is None


def test_under_torch_func_the_pair_is_plain(seed):
    x, t = points(seed)

    def run(x):
        primal, tangent = unpack(x)
        assert tangent is not None
        assert forward_ad.unpack_dual(primal).tangent is None
        return pack(primal.sin(), primal.cos() * tangent)

    found = torch.func.jvp(run, (x,), (t,))
    torch.testing.assert_close(found, torch.func.jvp(torch.sin, (x,), (t,)))


def test_vmap_alone_finds_no_tangent(seed):
    x, _ = points(seed)

    def run(x):
        assert unpack(x) == Dual(x, None)
        return x.sin()

    torch.testing.assert_close(vmap(run)(x), x.sin())


def test_transforms_inside_are_refused_and_outside_are_not(seed):
    x, t = points(seed)
    outside = vmap(lambda x, t: torch.func.jvp(lambda x: pack(*unpack(x)).sin(), (x,), (t,))[1])
    torch.testing.assert_close(outside(x, t), x.cos() * t)
    with pytest.raises(RuntimeError, match="a jvp of a vmap"):
        torch.func.jvp(vmap(lambda x: unpack(x).primal), (x,), (t,))
    with outermost_level(), pytest.raises(RuntimeError, match="a jvp of a vmap"):
        vmap(lambda x: unpack(x).primal)(forward_ad.make_dual(x, t))
    twice = lambda x: torch.func.jvp(lambda y: unpack(y).primal, (x,), (t,))[1]  # noqa: E731
    with pytest.raises(RuntimeError, match="a jvp inside a jvp"):
        torch.func.jvp(twice, (x,), (t,))

    def loss(x):
        refuse_higher_order()
        return x.sin().sum()

    torch.testing.assert_close(grad(loss)(x), x.cos())
    with pytest.raises(RuntimeError, match="a jvp of a gradient"):
        torch.func.jvp(grad(loss), (x,), (t,))
    with outermost_level(), pytest.raises(RuntimeError, match="a jvp of a gradient"):
        grad(loss)(x)
    assert forward_ad._current_level == -1
    refuse_higher_order()
