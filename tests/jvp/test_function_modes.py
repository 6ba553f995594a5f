import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fullstride.jvp.function_modes import DetachedTangents, ExplicitZeros


def points(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def graphs(tangent: torch.Tensor | None) -> bool:
    assert tangent is not None
    return tangent.requires_grad


OPERATIONS = {
    "linear": lambda x, w: x @ w,
    "in place": lambda x, w: (x @ w).mul_(w.sum()),
    "slice written": lambda x, w: (x @ w).clone().index_copy_(0, torch.tensor([1]), (x @ w)[:1]),
    "view": lambda x, w: (x @ w).view(-1)[2:],
    "chunk": lambda x, w: (x @ w).chunk(2, -1)[1],
    "split": lambda x, w: next(iter((x @ w).split(1))),
    "transpose": lambda x, w: (x @ w).mT,
    "reshape": lambda x, w: (x @ w).mT.reshape(-1),
    "same": lambda x, w: (x @ w).contiguous(),
    "dropout": lambda x, w: F.dropout(x @ w, 0.5),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_tangent_is_cut_and_its_value_kept(name, seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    w.requires_grad_()

    def run(mode: TorchFunctionMode | None):
        torch.manual_seed(seed)
        with forward_ad.dual_level():
            if mode is None:
                return forward_ad.unpack_dual(OPERATIONS[name](forward_ad.make_dual(x, t), w))
            with mode:
                return forward_ad.unpack_dual(OPERATIONS[name](forward_ad.make_dual(x, t), w))

    cut, whole = run(DetachedTangents()), run(None)
    assert graphs(whole.tangent)
    assert not graphs(cut.tangent)
    assert torch.equal(cut.primal, whole.primal)
    assert cut.tangent is not None
    assert whole.tangent is not None
    assert torch.equal(cut.tangent, whole.tangent)
    assert whole.tangent.any()
    assert torch.equal(*(torch.autograd.grad(out.primal.sin().sum(), w)[0] for out in (cut, whole)))


def test_a_written_view_still_reaches_its_base(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    w.requires_grad_()

    def run(x):
        h = x @ w
        part = h.view(-1)[3:9]
        part.mul_(2)
        part += 1
        return h

    expected = torch.func.jvp(run, (x,), (t,))
    with forward_ad.dual_level(), DetachedTangents():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, t)))
    torch.testing.assert_close(tuple(found), tuple(expected))


def test_tangents_of_others_are_left_whole(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    w.requires_grad_()
    leaf = t.clone().requires_grad_()
    with forward_ad.dual_level(), DetachedTangents():
        forward_ad.make_dual(x, leaf).contiguous()
        mine = forward_ad.unpack_dual(forward_ad.make_dual(x, t @ w)).tangent
        assert graphs(mine)
    assert leaf.requires_grad


class Names(TorchFunctionMode):
    """Mode that notes which first arguments carry a tangent at each call."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        flat = [x for x in given if isinstance(x, torch.Tensor) and x.ndim == 1 and x.is_floating_point()]
        if func in (F.linear, F.group_norm, F.layer_norm, F.conv2d, torch.Tensor.mul) and flat:
            duals = [forward_ad.unpack_dual(x, level=0).tangent for x in flat]
            self.seen.append((func.__name__, all(t is not None and not t.any() for t in duals)))
        return func(*args, **(kwargs or {}))


def test_vectors_that_meet_a_dual_have_zeros(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5))
    net.double()
    x, t = points(seed, (2, 3, 2, 2), (2, 3, 2, 2))
    run = lambda x: net(x).mul(net[4].weight)  # noqa: E731
    names = Names()
    with forward_ad.dual_level(), names, ExplicitZeros():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, t)))
        net(x)
    torch.testing.assert_close(tuple(found), tuple(torch.func.jvp(run, (x,), (t,))))
    assert [zeros for _, zeros in names.seen] == [True] * 3 + [False] * 4  # what is routed has its own op
    assert {name for name, _ in names.seen} == {"conv2d", "group_norm", "linear", "layer_norm", "mul"}


def test_inside_a_transform_nothing_is_touched(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    w.requires_grad_()
    rows = vmap(lambda row: (row @ w).sin())
    with forward_ad.dual_level(), DetachedTangents(), ExplicitZeros():
        out = rows(forward_ad.make_dual(x, t))
        found = forward_ad.unpack_dual(out * 1)
    torch.testing.assert_close(tuple(found), tuple(torch.func.jvp(rows, (x,), (t,))))
    assert not graphs(found.tangent)
