import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, vmap
from torch.utils import _pytree as pytree

from fullstride.jvp import attention, jvp, layer_norm, prepare
from fullstride.jvp.state import tangent_grad
from fullstride.meanflow.models.unet import UNet
from tests.jvp import plain_ops
from tests.jvp.networks import OURS, SHAPES, random_network, random_points, saved_bytes


def close(found, expected):
    """Compare to the rounding of fp64; no expected tensor is zero."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(x.abs().max() > 1e-3 for x in pytree.tree_leaves(expected))


def points(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.fixture(params=SHAPES)
def case(request, seed):
    """Return a network, a reference in elementary operations, primals and tangents."""
    net = random_network(request.param, seed=seed)
    return net, random_network(request.param, plain_ops, seed), *random_points(request.param, seed)


def test_output_and_tangent_are_torchs(case):
    net, plain, primals, tangents = case
    expected = torch.func.jvp(plain, primals, tangents)
    close(jvp(net, primals, tangents), expected)
    close(jvp(net, primals, tangents, tangent_grad=True), expected)
    with torch.no_grad():
        close(jvp(net, primals, tangents), expected)
    with torch.inference_mode():
        inferred = tuple(p.clone() for p in primals)
        close(jvp(net, inferred, tangents), expected)
    with torch.no_grad():
        close(jvp(net, inferred, tangents), expected)


def test_one_time_for_all_samples_may_be_expanded(seed):
    x, v, scale = points(seed, (4, 3), (4, 3), (1,))
    t, one = points(seed + 1, (1,))[0].requires_grad_(), torch.ones(1, dtype=torch.float64)
    run = lambda x, t: (x * t[:, None]).sin() * scale.expand(3) + scale.expand(3)  # noqa: E731
    expected = torch.func.jvp(run, (x, t.repeat(4)), (v, one.repeat(4)))
    for kept in (False, True):
        found = jvp(run, (x, t.expand(4)), (v, one.expand(4)), tangent_grad=kept)
        close(found, expected)
        close(torch.autograd.grad(found[0].sum(), t), torch.autograd.grad(expected[0].sum(), t, retain_graph=True))


def test_the_detached_tangent_leaves_the_primals_gradients(case):
    net, plain, primals, tangents = case
    asked = list(net.parameters()), list(plain.parameters())
    u, dudt = jvp(net, primals, tangents)
    assert u.requires_grad
    assert not dudt.requires_grad
    found = torch.autograd.grad((u - dudt).square().sum(), asked[0], allow_unused=True)
    u, dudt, *_ = torch.func.jvp(plain, primals, tangents)
    close(found, torch.autograd.grad((u - dudt.detach()).square().sum(), asked[1], allow_unused=True))


@pytest.mark.parametrize("name", sorted({*OURS, "gated"}))
def test_gradients_through_the_tangent_are_torchs(name, seed):
    nets = random_network(name, seed=seed), random_network(name, plain_ops, seed)
    primals, tangents = random_points(name, seed)
    found = []
    for net, transform in ((nets[0], jvp), (nets[1], torch.func.jvp)):
        leaves = [x.clone().requires_grad_() for x in (*primals, *tangents)]
        kwargs = {"tangent_grad": True} if transform is jvp else {}
        u, dudt, *_ = transform(net, tuple(leaves[: len(primals)]), tuple(leaves[len(primals) :]), **kwargs)
        loss = u.square().sum() + dudt.sin().sum()
        found.append(torch.autograd.grad(loss, [*leaves, *net.parameters()]))
    close(*found)


@pytest.mark.parametrize("name", SHAPES)
def test_no_more_is_kept_than_for_a_forward_pass(name, seed):
    net, (primals, tangents) = random_network(name, seed=seed), random_points(name, seed)
    alone = saved_bytes(lambda: net(*primals))
    assert alone > 0
    assert saved_bytes(lambda: jvp(net, primals, tangents)) <= 1.15 * alone
    assert saved_bytes(lambda: torch.func.jvp(net, primals, tangents)) > 1.4 * alone


def test_no_more_is_kept_of_a_whole_unet(seed):
    torch.manual_seed(seed)
    net = UNet(3, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=())
    args, moves = ((torch.randn(2, 3, 8, 8), torch.rand(2), torch.rand(2)) for _ in range(2))
    assert saved_bytes(lambda: jvp(net, args, moves)) <= 1.15 * saved_bytes(lambda: net(*args))


ONE_BY_ONE = {
    "silu": F.silu,
    "mish": F.mish,
    "softmax": lambda h: F.softmax(h, -1),
    "log_softmax": lambda h: F.log_softmax(h, -1),
    "dropout": lambda h: F.dropout(h, 0.4),
    "layer_norm": lambda h: F.layer_norm(h, (8,)),
    "group_norm": lambda h: F.group_norm(h, 2),
    "max": lambda h: h.max(-1)[0],
    "sort": lambda h: h.sort(-1)[0],
    "unbind": lambda h: torch.stack([a * a for a in h.view(2, 8, 8).unbind(0)]),
    "views": lambda h: h.view(4, 4, 8).transpose(1, 2)[1:] * 2,
    "indexed": lambda h: h[torch.arange(16) % 3] * h,
    "cumsum": lambda h: h.cumsum(0).square(),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, h),
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "where": lambda h: torch.where(h > 0, h.sin(), h.cos()),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_no_more_is_kept_of_any_operation(name, seed):
    x, t, w = points(seed, (16, 8), (16, 8), (8, 8))
    w.requires_grad_()
    run = lambda x: ONE_BY_ONE[name](x @ w) * 1.5  # noqa: E731
    alone = saved_bytes(lambda: run(x))
    assert saved_bytes(lambda: jvp(run, (x,), (t,))) <= 1.02 * alone + 64
    torch.manual_seed(seed)
    found = jvp(run, (x,), (t,))
    torch.manual_seed(seed)
    close(found, torch.func.jvp(run, (x,), (t,)))


@pytest.mark.parametrize("through", [False, True], ids=["detached", "through"])
def test_pytrees_aux_and_what_does_not_move(through, seed):
    x, y, z, tx, tz = points(seed, (3, 4), (3, 4), (4,), (3, 4), (4,))

    def run(state, scale, power):
        out = {"product": state["x"] * state["y"] * scale, "pair": (state["x"].sin() * scale, state["y"] + 1)}
        return out, {"count": power, "kept": state["x"] * 2}

    primals = {"x": x, "y": y}, z, 3
    u, dudt, aux = jvp(run, primals, ({"x": tx, "y": None}, tz, None), tangent_grad=through, has_aux=True)
    moved = lambda x, z: run({"x": x, "y": y}, z, 3)  # noqa: E731
    expected = torch.func.jvp(lambda x, z: moved(x, z)[0], (x, z), (tx, tz))
    torch.testing.assert_close((u, dudt), expected, rtol=1e-12, atol=1e-12)
    assert not dudt["pair"][1].any()
    assert aux["count"] == 3
    assert torch.equal(aux["kept"], x * 2)
    assert forward_ad._current_level == -1


def test_outputs_that_nothing_moves_have_zero_tangents(seed):
    x, t, y = points(seed, (3, 4), (3, 4), (5,))
    (same, constant, cut), tangents = jvp(lambda x: (x, y * 2, x.detach()), (x,), (t,))
    assert torch.equal(same, x)
    assert torch.equal(constant, y * 2)
    assert torch.equal(tangents[0], t)
    for tangent, like in zip(tangents[1:], (constant, cut), strict=True):
        assert torch.equal(tangent, torch.zeros_like(like))


@pytest.mark.parametrize("through", [False, True], ids=["detached", "through"])
def test_the_callers_tangents_are_never_written(through, seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))

    def run(x):
        x.mul_(x)
        x += 1
        x.view(-1)[2:5].mul_(3)
        return x @ w

    mine, expected = t.clone(), torch.func.jvp(run, (x.clone(),), (t.clone(),))
    close(jvp(run, (x.clone(),), (mine,), tangent_grad=through), expected)
    assert torch.equal(mine, t)
    for same in (lambda x: x, lambda x: x.contiguous(), lambda x: x.view(3, 4)):
        _, out = jvp(same, (x,), (mine,), tangent_grad=through)
        out.mul_(2)
        assert torch.equal(mine, t)


def test_the_callers_tangent_keeps_its_graph(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    w.requires_grad_()
    mine = t @ w
    _, dudt = jvp(lambda x: (x @ w).sin(), (x,), (mine,))
    assert not dudt.requires_grad
    assert mine.grad_fn is not None
    close(torch.autograd.grad(mine.sum(), w)[0], t.sum(0)[:, None].expand(4, 4))


@pytest.mark.parametrize("through", [False, True], ids=["detached", "through"])
def test_views_and_broadcast_tangents_are_fine_as_arguments(through, seed):
    x, w, t = points(seed, (6, 4), (4, 4), (4,))
    run = lambda x, y: (x @ w).sin() * y  # noqa: E731
    primals, tangents = (x[1:4], x[3:].flip(0)), (t.expand(3, 4), x.t()[:, ::2].t())
    found = jvp(run, primals, tangents, tangent_grad=through)
    close(found, torch.func.jvp(run, tuple(map(torch.clone, primals)), tuple(map(torch.clone, tangents))))


def test_one_tensor_given_twice_has_two_tangents(seed):
    x, a, b = points(seed, (5,), (5,), (5,))
    u, dudt = jvp(lambda x, y: x * y.sin(), (x, x), (a, b))
    close((u, dudt), (x * x.sin(), a * x.sin() + x * x.cos() * b))


def test_dropout_has_one_mask_and_the_generator_moves_on_as_in_a_forward_pass(seed):
    x, t = points(seed, (64, 8), (64, 8))
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
    torch.manual_seed(seed)
    expected, after = net(x), torch.rand(3)
    torch.manual_seed(seed)
    u, dudt = jvp(net, (x,), (t,))
    assert torch.equal(torch.rand(3), after)
    close(u, expected)
    assert torch.equal(dudt == 0, u == 0)
    assert 0.2 < (u == 0).double().mean() < 0.8


def test_half_precision_keeps_its_dtypes(seed):
    x, t, w = (a.bfloat16() for a in points(seed, (9, 8), (9, 8), (8, 8)))
    u, dudt = jvp(lambda x: layer_norm(x @ w), (x,), (t,))
    exact = torch.func.jvp(lambda x: plain_ops.layer_norm(x @ w.double()), (x.double(),), (t.double(),))
    assert u.dtype == dudt.dtype == torch.bfloat16
    for found, expected in zip((u, dudt), exact, strict=True):
        assert (found.double() - expected).norm() < 0.02 * expected.norm()


def test_a_modules_parameters_may_be_primals(seed):
    net = random_network("transformer", seed=seed)
    plain = random_network("transformer", plain_ops, seed)
    args, _ = random_points("transformer", seed)
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    moves = {k: torch.sin(7 * p) for k, p in parameters.items()}
    expected = torch.func.jvp(lambda p: functional_call(plain, p, args), (parameters,), (moves,))
    close(jvp(lambda p: functional_call(net, p, args), (parameters,), (moves,)), expected)


def test_it_works_inside_other_transforms(seed):
    x, t, w = points(seed, (3, 4), (5, 3, 4), (4, 4))
    run = lambda x: layer_norm((x @ w).sin())  # noqa: E731
    plain = lambda x: plain_ops.layer_norm((x @ w).sin())  # noqa: E731
    expected = vmap(lambda t: torch.func.jvp(plain, (x,), (t,))[1])(t)
    close(vmap(lambda t: jvp(run, (x,), (t,))[1])(t), expected)
    through = lambda f, transform, **how: lambda x: transform(f, (x,), (t[0],), **how)[1].sin().sum()  # noqa: E731
    expected = grad(through(plain, torch.func.jvp))(x)
    close(grad(through(run, jvp, tangent_grad=True))(x), expected)
    assert not grad(through(run, jvp))(x).any()
    close(jacfwd(run)(x), jacfwd(plain)(x))


def test_other_transforms_of_plain_operations_work_inside(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))
    for inner in (
        vmap(lambda row: (row @ w).tanh()),
        grad(lambda x: (x @ w).sin().sum()),
        vmap(grad(lambda row: (row @ w).sin().sum())),
    ):
        close(jvp(inner, (x,), (t,)), torch.func.jvp(inner, (x,), (t,)))


def test_a_gradient_of_plain_operations_may_be_taken_inside(seed):
    x, t, w = points(seed, (3, 4), (3, 4), (4, 4))

    def score(x):
        return torch.autograd.grad((x @ w).sin().sum(), x, create_graph=True)[0]

    u, dudt = jvp(score, (x.requires_grad_(),), (t,))
    close((u, dudt), torch.func.jvp(grad(lambda x: (x @ w).sin().sum()), (x.detach(),), (t,)))


NESTED = "jvp inside another jvp or dual level: .* expected a single jvp. For higher orders call torch.func.jvp"
OP_NESTED = "a jvp inside a jvp: .* expected a single jvp around them. For higher orders use PyTorch operations"
OF_GRADIENT = "a jvp of a gradient .* take the gradient outside \\(grad of jvp\\), or use PyTorch operations"
OF_VMAP = "a jvp of a vmap: .* take vmap outside \\(vmap of jvp\\)"

UNPREPARED = "where jvp cannot replace it .* call fullstride.jvp.attention there"
OF_COMPILED = "an autograd.Function without a jvp, or a compiled function; compile the function that calls jvp instead"


class Doubled(torch.autograd.Function):
    """A Function without a jvp."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradient


def _attend(x):
    return attention(x, x, x)


def _twice(f, x):
    return torch.func.jvp(lambda y: torch.func.jvp(f, (y,), (x,))[1], (x,), (x,))


REFUSED = {
    "jvp in jvp": (NESTED, lambda x: jvp(lambda y: jvp(torch.sin, (y,), (y,))[1], (x,), (x,))),
    "torch's in jvp": (NESTED, lambda x: jvp(lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1], (x,), (x,))),
    "op, torch's twice": (OP_NESTED, lambda x: _twice(_attend, x)),
    "op, jvp in torch's": (
        OP_NESTED,
        lambda x: torch.func.jvp(lambda y: jvp(_attend, (y,), (y,))[1], (x,), (x,)),
    ),
    "norm, torch's twice": (OP_NESTED, lambda x: _twice(layer_norm, x)),
    "gradient": (OF_GRADIENT, lambda x: jvp(grad(lambda y: _attend(y).sum()), (x,), (x,))),
    "gradient, torch's": (OF_GRADIENT, lambda x: torch.func.jvp(grad(lambda y: _attend(y).sum()), (x,), (x,))),
    "hessian": (OF_GRADIENT, lambda x: torch.func.hessian(lambda y: _attend(y).sum())(x)),
    "vmap": (OF_VMAP, lambda x: jvp(vmap(_attend), (x[None],), (x[None],))),
    "vmap, torch's": (OF_VMAP, lambda x: torch.func.jvp(vmap(_attend), (x[None],), (x[None],))),
    "norm's vmap": (OF_VMAP, lambda x: jvp(vmap(layer_norm), (x,), (x,))),
    "torch's attention": (
        UNPREPARED,
        lambda x: jvp(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, (x,) * 3, (x.clone(),) * 3),
    ),
    "autograd.Function": (OF_COMPILED, lambda x: jvp(Doubled.apply, (x,), (x,))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_the_remedy(name):
    message, call = REFUSED[name]
    (x,) = points(0, (2, 3, 5, 4))
    with pytest.raises(RuntimeError, match=message):
        call(x)
    close(jvp(_attend, (x,), (x,)), torch.func.jvp(lambda x: plain_ops.attention(x, x, x), (x,), (x,)))


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_encoder_in_eval_mode_takes_no_path_without_a_derivative(padded):
    encoder = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), 1).double().eval()
    )
    prepare(encoder)
    x, v = points(0, (2, 3, 4), (2, 3, 4))
    padding = torch.tensor([[False, False, True], [False, False, False]]) if padded else None
    run = lambda x: encoder(x, src_key_padding_mask=padding)  # noqa: E731
    expected = jvp(run, (x,), (v,), tangent_grad=True)
    with torch.no_grad():
        close(jvp(run, (x,), (v,)), expected)
        close(jvp(run, (x,), (v,), tangent_grad=True), expected)


def test_a_dual_level_around_it_is_refused():
    (x,) = points(0, (3,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=NESTED):
        jvp(torch.sin, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=NESTED):
        jvp(torch.sin, (x,), (x,), tangent_grad=True)


def test_the_flag_and_the_level_are_left_after_an_error():
    (x,) = points(0, (3,))
    seen = []

    def fails(_):
        seen.append(tangent_grad())
        raise KeyError("mine")

    for wanted in (False, True):
        with pytest.raises(KeyError, match="mine"):
            jvp(fails, (x,), (x,), tangent_grad=wanted)
    assert seen == [False, True]
    assert tangent_grad()
    assert forward_ad._current_level == -1
    assert torch.equal(jvp(torch.square, (x,), (x,))[1], 2 * x * x)


WRONG = {
    "lists": (([1.0],), [1.0], "primals and tangents are tuple and list, expected two tuples"),
    "structure": (
        ((torch.ones(2),),),
        (torch.ones(2),),
        "tangents have the structure .*, expected that of",
    ),
    "count": ((torch.ones(2), torch.ones(2)), (torch.ones(2),), "expected that of the primals"),
    "nothing moves": ((torch.ones(2),), (None,), "every tangent is None, expected at least one tensor; .* call fn"),
    "no tensor": ((1.0,), (torch.ones(2),), "a primal and its tangent are float and Tensor, .*pass None"),
    "shape": (
        (torch.ones(2),),
        (torch.ones(3),),
        "a tangent is torch.float32 (3,) on cpu, expected torch.float32 (2,)",
    ),
    "dtype": (
        (torch.ones(2),),
        (torch.ones(2).double(),),
        "a tangent is torch.float64 (2,) on cpu, expected torch.float",
    ),
    "nested": (
        (torch.nested.nested_tensor_from_jagged(torch.ones(3, 2), torch.tensor([0, 1, 3])),),
        (torch.ones(3, 2),),
        "a primal is a nested tensor, which has no tangent in PyTorch; expected its values()",
    ),
    "integers": ((torch.arange(2),), (torch.arange(2),), "a primal with a tangent is torch.int64, expected a floating"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_refused(name):
    primals, tangents, message = WRONG[name]
    with pytest.raises(ValueError, match=message if ".*" in message else re.escape(message)):
        inspect.unwrap(jvp)(lambda *x: x[0], primals, tangents)


def test_an_output_that_is_no_tensor_belongs_into_aux():
    with pytest.raises(ValueError, match="fn returned a int, expected tensors; .*as aux, with has_aux=True"):
        jvp(lambda x: (x, 3), (torch.ones(2),), (torch.ones(2),))
