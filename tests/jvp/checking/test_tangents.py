import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.jvp import TangentError, attention, check_tangents, jvp, layer_norm
from fullstride.meanflow.models.dit import Block, DiT
from fullstride.meanflow.models.unet import Stage, UNet
from tests.jvp.networks import SHAPES, random_network, random_points


def random_module(module: nn.Module, seed: int) -> nn.Module:
    """Make every parameter random, so that none hides a path."""
    torch.manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.2)
    return module


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)


BLOCKS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "dit": (lambda: Block(24, 3, 2.0, qk_norm=True), [(2, 5, 24), (2, 24)]),
    "unet": (lambda: Stage(8, 12, 16, 0.0, attend=True), [(2, 8, 4, 4), (2, 16)]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_meanflows_blocks_pass(name, dtype, seed):
    make, shapes = BLOCKS[name]
    half = dtype == torch.bfloat16
    block, kept = random_module(make(), seed).to(torch.float32 if half else dtype), torch.float32 if half else dtype
    points = (draw(s, *shapes, dtype=kept) for s in (seed, seed + 10))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        report = check_tangents(block, *points)
    assert report.dtype == dtype
    assert report.tolerance == torch.finfo(dtype).eps ** 0.5
    # In fp64 it may run as the reference does, bit for bit.
    assert report.tangent > 0 or dtype == torch.float64
    assert report.tangent < report.tolerance / 3
    assert 0 <= report.output < report.tolerance / 3
    assert 0 <= report.difference < 1e-7


@pytest.mark.parametrize("values_only", [False, True])
def test_a_printed_report_is_a_sentence_and_a_table(values_only, seed):
    net = random_module(nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3)), seed)
    report = check_tangents(net, draw(seed, (4, 5)), draw(seed + 10, (4, 5)), values_only=values_only)
    sentence, table = str(report).split("\n\n")
    assert sentence == "The derivative agrees with fp64 within the tolerance; coarsest format: float32."
    header, *rows = table.splitlines()
    assert header.split() == ["relative", "error", "found", "allowed"]
    found = [report.output, report.tangent, *([] if values_only else [report.difference])]
    allowed = [report.tolerance] * 2 + [1e-6] * (not values_only)
    assert [row.split()[-2:] for row in rows] == [[f"{a:.1e}", f"{b:.1e}"] for a, b in zip(found, allowed, strict=True)]
    assert ("torch.func.jvp" in rows[1], "central differences" in rows[1]) == (not values_only, values_only)
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize("name", ["unet", "dit"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_whole_networks_of_meanflow_pass(name, autocast):
    """Along (v, 0, 1), with times that turn fast and parts that compute in fp32 by themselves."""
    net = (
        UNet(1, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,))
        if name == "unet"
        else None
    )
    net = random_module(net or DiT(1, 8, width=16, depth=2, heads=2, qk_norm=True), 0)
    z, v, r, t = draw(0, (3, 1, 8, 8), (3, 1, 8, 8), (3,), (3,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        report = check_tangents(net, (z, r.sigmoid(), t.sigmoid()), (v, None, torch.ones_like(t)))
    assert report.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert 0 < report.tangent < report.tolerance


@pytest.mark.parametrize("name", SHAPES)
def test_networks_of_others_pass_by_every_transform(name, seed):
    net, (primals, tangents) = random_network(name, seed=seed), random_points(name, seed)
    for transform in (jvp, torch.func.jvp):
        report = check_tangents(net, primals, tangents, transform=transform)
        assert report.dtype == torch.float64
        assert report.difference < 1e-6


def test_pytrees_and_what_does_not_move(seed):
    x, y, tx = draw(seed, (3, 4), (3, 4), (3, 4))

    def run(state, scale):
        return {"a": [state["x"].sin() * state["y"] * scale, state["y"] * 2], "count": torch.arange(3)}

    floats = lambda *args: {"a": run(*args)["a"]}  # noqa: E731
    report = check_tangents(floats, ({"x": x, "y": y}, 3), ({"x": tx, "y": None}, None))
    assert 0 < report.tangent < 1e-6


def test_buffers_random_numbers_and_gradients_are_as_before(seed):
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).train()
    before = {k: x.clone() for k, x in net.state_dict().items()}
    x, t = draw(seed, (9, 6), (9, 6))
    torch.manual_seed(seed)
    check_tangents(net, (x,), (t,))
    after = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


class Wrong(torch.autograd.Function):
    """sin, whose derivative is off by a factor, in one element if that is named."""

    @staticmethod
    def forward(x: Tensor, factor: float, place: tuple[int, int] | None) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.factor, ctx.place = inputs
        ctx.save_for_forward(x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        factor = torch.ones_like(x)
        factor[... if ctx.place is None else ctx.place] = ctx.factor
        return x.cos() * tangents[0] * factor


@pytest.mark.parametrize(("factor", "place"), [(1.0001, None), (0.0, (2, 1)), (-1.0, None), (float("nan"), (0, 3))])
def test_a_custom_functions_wrong_derivative_is_found_by_differences(factor, place, seed):
    (x, t), right = draw(seed, (4, 5), (4, 5)), (1.0, None)
    run = lambda factor, place: lambda x: Wrong.apply(x * 2, factor, place) + x  # noqa: E731
    assert check_tangents(run(*right), (x,), (t,), transform=torch.func.jvp).difference < 1e-8
    by = "by torch.func.jvp of plain" if factor != factor else "by central differences in fp64"
    with pytest.raises(TangentError, match=by) as caught:
        check_tangents(run(factor, place), (x,), (t,), transform=torch.func.jvp)
    if place is not None:
        at = f"tangent is worst at {list(place)}: "
        assert str(caught.value).startswith(at)
    if factor == 0.0:
        exact = 2 * (2 * x[2, 1].double()).cos() * t[2, 1] + t[2, 1]
        got, expected = re.findall(r": ([-0-9.e]+), expected ([-0-9.e]+) by", str(caught.value))[0]
        assert float(expected) == pytest.approx(exact.item(), rel=1e-5)
        assert float(got) == pytest.approx(t[2, 1].item(), rel=1e-5)


BROKEN = {
    "detached": lambda x, w: x.sin() + (x @ w).detach(),
    "slightly": lambda x, w: x.sin() + 1e-3 * x.detach() @ w,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_detached_branch_is_found(name, seed):
    x, t, w = draw(seed, (6, 5), (6, 5), (5, 5))
    message = r"tangent is worst at \[\d, \d\]: .* by central differences in fp64; .* Look for detach"
    with pytest.raises(TangentError, match=message):
        check_tangents(lambda x: BROKEN[name](x, w), (x,), (t,))


def test_a_difference_is_held_against_values_alone(seed):
    """The forward derivative of Wrong is wrong but unused; a wrong difference is found."""
    x, t = draw(seed, (4, 5), (4, 5))
    run = lambda x: Wrong.apply(x * 2, 0.0, None)  # noqa: E731

    def difference(factor: float, f: Any, primals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
        x, t = primals[0], factor * tangents[0]
        return f(x), (f(x + 1e-2 * t) - f(x - 1e-2 * t)) / 2e-2

    ways = [functools.partial(difference, factor) for factor in (1.0, 1.1)]
    report = check_tangents(run, (x,), (t,), transform=ways[0], tolerance=0.05, values_only=True)
    assert 0 < report.tangent < 1e-2
    assert report.difference == 0
    with pytest.raises(TangentError, match="tangent is worst at .* by central differences in fp64"):
        check_tangents(run, (x,), (t,), transform=ways[1], tolerance=0.05, values_only=True)
    with pytest.raises(TangentError, match="by torch.func.jvp of plain"):
        check_tangents(run, (x,), (t,), transform=ways[0], tolerance=0.05)


def test_a_staircase_has_no_derivative_and_needs_none(seed):
    x, t = draw(seed, (6, 5), (6, 5))
    assert check_tangents(lambda x: x.round() + x.sin(), (x,), (t,)).difference < 1e-6


def test_what_a_transform_does_wrong_is_found(seed):
    x, t, w = draw(seed, (6, 5), (6, 5), (5, 5))
    run = lambda x: {"h": layer_norm(x @ w)}  # noqa: E731

    def zeros(f, primals, tangents):
        u, dudt = jvp(f, primals, tangents)
        return u, {"h": torch.zeros_like(dudt["h"])}

    def off(f, primals, tangents):
        u, dudt = jvp(f, primals, tangents)
        dudt["h"][3, 2] += 1
        return u, dudt

    def shifted(f, primals, tangents):
        u, dudt = jvp(f, primals, tangents)
        return {"h": u["h"] + 1e-2}, dudt

    for transform, message in (
        (zeros, r"tangent\['h'\] is worst at .*: 0, expected .* relative error 1.00e\+00 there, 1.00e\+00 in all"),
        (off, r"tangent\['h'\] is worst at \[3, 2\]: .* by torch.func.jvp of plain operations in fp64"),
        (shifted, r"output\['h'\] is worst at .* expected at most 3.45e-04 in all. Look at fused operations"),
    ):
        with pytest.raises(TangentError, match=message):
            check_tangents(run, (x,), (t,), transform=transform)
    assert issubclass(TangentError, ValueError)


def test_a_tolerance_of_ones_own(seed):
    x, t = draw(seed, (6, 5), (6, 5))
    rough = lambda x: (x.bfloat16() * 3).float().sin()  # noqa: E731
    report = check_tangents(rough, (x,), (t,))
    assert report.dtype == torch.bfloat16
    assert 1e-3 < report.tangent < 0.05
    with pytest.raises(TangentError, match="expected at most 1.00e-04 in all"):
        check_tangents(rough, (x,), (t,), tolerance=1e-4)


def test_a_tangent_that_cancels_is_measured_against_its_output(seed):
    """The sum of a softmax is constant: its tangent is rounding error."""
    x, t = draw(seed, (6, 50), (6, 50))
    report = check_tangents(lambda x: F.softmax(x, -1).sum(-1), (x,), (t,))
    assert report.tangent < report.tolerance


def test_kinks_are_no_errors(seed):
    net = nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 3))
    x, t = draw(seed, (20, 10), (20, 10))
    assert check_tangents(net, (x,), (t,)).difference < 1e-6


def test_masks_and_constants_of_a_closure(seed):
    q, k, v, t = draw(seed, *[(2, 3, 5, 4)] * 4)
    bias = draw(seed + 5, (5, 5))[0].masked_fill(torch.ones(5, 5).tril(-1) > 0, -torch.inf)
    run = lambda q, k: attention(q, k, v, attn_mask=bias)  # noqa: E731
    assert 0 < check_tangents(run, (q, k), (t, None)).tangent < 1e-5
    assert 0 < check_tangents(run, (q, k), (t, t), transform=torch.func.jvp).tangent < 1e-5


def test_arguments_are_checked_first():
    with pytest.raises(ValueError, match="every tangent is None"):
        check_tangents(torch.sin, (torch.ones(2),), (None,))


def test_the_gradient_through_the_tangent_is_checked_too(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()).double()
    x, v = torch.randn(2, 4, 6, dtype=torch.float64)
    whole = functools.partial(jvp, tangent_grad=True)
    check_tangents(net, (x,), (v,), transform=whole, tangent_grad=True)
    with pytest.raises(TangentError, match="the gradient through the tangent is"):
        check_tangents(net, (x,), (v,), transform=torch.func.jvp, tangent_grad=True)  # torch's is wrong of the norm
    with pytest.raises(TangentError, match="transform must keep the tangent's graph"):
        check_tangents(net, (x,), (v,), tangent_grad=True)
