import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.func import jvp as torch_jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fullstride.jvp import jvp, modules, partial_jvp, prepare

BATCH = 2


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Attention as users write it: functional, here behind a function of their own."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).split(x.shape[-1], dim=-1))
        return self.out(causal_attention(q, k, v).transpose(1, 2).flatten(2))


class Network(nn.Module):
    """Somebody's network: every kind of norm, three ways of attention, an odd number of everything."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 3, 1)
        self.batch, self.group = nn.BatchNorm2d(12), nn.GroupNorm(4, 12)
        self.rows, self.planes, self.root = nn.LayerNorm(12), nn.LayerNorm([5, 12]), nn.RMSNorm(12)
        self.attention = Attention(12, 2)
        self.heads = nn.MultiheadAttention(12, 3, batch_first=True)
        self.line, self.mlp = nn.Conv1d(12, 12, 3, padding=1), nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.group(self.batch(self.stem(x)))).flatten(2).transpose(1, 2)
        h = h + self.attention(self.rows(h))
        h = h + self.heads(self.root(h), h, h, need_weights=False)[0]
        h = h + F.gelu(self.mlp(F.layer_norm(h, (12,)))) + self.line(h.transpose(1, 2)).transpose(1, 2)
        h = self.planes(h.view(-1, 5, 5, 12)).flatten(1, 2)
        return self.head(h.transpose(1, 2).unflatten(2, (5, 5)))


@pytest.fixture
def pair(seed) -> tuple[Network, Network]:
    """Return a network and a prepared copy, in fp64, with perturbed parameters."""
    torch.manual_seed(seed)
    plain = Network().double()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1 * torch.randn_like(p))
    prepared = copy.deepcopy(plain)
    prepare(prepared)
    return plain, prepared


def expected(network: nn.Module, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Derive by torch's own forward derivatives of PyTorch operations."""
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        u, du = forward_ad.unpack_dual(network(forward_ad.make_dual(x, v)))
    assert du is not None
    return u, du


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 5, 5, dtype=torch.float64), torch.randn(BATCH, 3, 5, 5, dtype=torch.float64)


# torch.func.jvp refuses a module that counts its batches.
@pytest.mark.parametrize(("training", "transform"), [(True, jvp), (False, jvp), (False, torch_jvp)])
def test_output_and_tangent_are_those_of_plain_operations(pair, training, transform):
    plain, prepared = (network.train(training) for network in pair)
    x, v = images()
    u, du = expected(plain, x, v)
    found, tangent = transform(prepared, (x,), (v,))
    torch.testing.assert_close(found, u, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(tangent, du, rtol=1e-11, atol=1e-12)
    assert du.abs().max() > 0.1
    torch.testing.assert_close(prepared.batch.running_var, plain.batch.running_var)


def test_gradients_are_those_of_plain_operations(pair):
    plain, prepared = pair
    x, v = images()
    for network, transform in ((plain, expected), (prepared, lambda f, x, v: jvp(f, (x,), (v,)))):
        u, du = transform(network, x, v)
        (u - du.detach()).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), prepared.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_without_a_tangent_it_is_the_same_network(pair):
    plain, prepared = (network.eval() for network in pair)
    x, _ = images()
    assert torch.equal(prepared(x), plain(x))


def test_many_inputs_go_through_at_once_without_a_tangent(pair):
    plain, prepared = (network.eval() for network in pair)
    many = torch.stack([*images()])
    with sdpa_kernel(SDPBackend.MATH):  # of the others vmap makes a loop, and warns
        torch.testing.assert_close(vmap(prepared)(many), vmap(plain)(many))


def test_keys_classes_and_hooks_stay(pair):
    plain, _ = pair
    keys, seen = list(plain.state_dict()), []
    plain.group.register_forward_hook(lambda *_: seen.append("called"))
    prepare(plain)
    assert list(plain.state_dict()) == keys
    assert isinstance(plain.group, nn.GroupNorm)
    assert isinstance(plain.attention, Attention)
    plain(images()[0])
    assert seen == ["called"]


def test_what_was_done_is_listed(pair):
    network = Network()
    network.add_module("other", nn.SyncBatchNorm(3))

    class Mine(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return input / input.norm() * self.weight

    network.add_module("mine", Mine(3))
    done = prepare(network)
    assert done.swapped["group"] == "GroupNorm"
    assert done.swapped["heads"] == "MultiheadAttention"
    assert done.routed == {"": "layer_norm", "attention": "scaled_dot_product_attention"}
    assert set(done.left) == {"other", "mine"}
    assert "SyncBatchNorm has no fused form" in done.left["other"]
    assert "a forward of its own" in done.left["mine"]
    sentence, _, *lines = str(done).splitlines()
    assert sentence == f"Modules: {len(done.swapped)} swapped, 2 routed, 2 left."
    shown = [line.split(maxsplit=2) for line in lines]
    assert ["left", "mine", done.left["mine"]] in shown
    assert ["routed", "(model)", "layer_norm"] in shown
    assert len(shown) == len(done.swapped) + 4
    assert len({line.index(why) for line, (_, _, why) in zip(lines, shown, strict=True)}) == 1
    again = prepare(network)
    assert (again.swapped, again.routed) == ({}, {})
    plain = nn.Sequential(nn.ReLU())
    assert set(prepare(plain).routed) == {""}  # what it may call of functional attention and norms
    assert str(prepare(plain)).startswith("Nothing to prepare: no norm, attention")


class Single(nn.LayerNorm):
    """Attention of one argument, like CLIP's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.float()).type_as(input)


class Coarse(nn.GroupNorm):
    def __init__(self, channels: int):
        super().__init__(2, channels)


@pytest.mark.parametrize(
    ("kind", "base", "call"),
    [(Single, nn.LayerNorm(12), "layer_norm"), (Coarse, nn.GroupNorm(2, 12), "group_norm")],
)
def test_a_subclass_that_takes_its_norms_forward_is_routed(kind, base, call, seed):
    torch.manual_seed(seed)
    norm = kind(12)
    for p, same in zip(norm.parameters(), base.parameters(), strict=True):
        p.data = same.data = torch.randn(12)
    prepare(base)
    done, again = prepare(norm), prepare(norm)
    assert (done.routed, done.left) == ({"": call}, {})
    assert (again.routed, again.left) == ({}, {})
    x, v, w = torch.randn(3, 4, 12)
    pairs = [jvp(model, (x,), (v,), tangent_grad=True) for model in (norm, base)]
    torch.testing.assert_close(pairs[0], pairs[1])
    # Torch's own gradient through this tangent is wrong (docs/explanation/forward-derivatives.md).
    found = [torch.autograd.grad((w * t).sum(), m.weight) for m, (_, t) in zip((norm, base), pairs, strict=True)]
    torch.testing.assert_close(*found)


def test_it_is_copied_and_pickled_as_any_module(pair):
    _, prepared = pair
    prepared.eval()
    x, v = images()
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert type(other.attention) is type(prepared.attention)
        assert torch.equal(jvp(other, (x,), (v,))[1], jvp(prepared, (x,), (v,))[1])


class Holding(nn.Module):
    """Module with a pickle state of its own, like one that holds unpicklable objects."""

    def __init__(self):
        super().__init__()
        self.open = lambda: "open"

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.open = lambda: "again"

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (3,))


def test_what_a_routed_module_keeps_of_itself_is_its_own_choice():
    prepare(module := Holding())
    assert pickle.loads(pickle.dumps(module)).open() == "again"


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="the model is compiled"):
        prepare(torch.compile(nn.Linear(2, 2)))  # pyright: ignore[reportArgumentType]


HEADS = {
    "self": {},
    "lengths first": {"batch_first": False},
    "other widths": {"kdim": 7, "vdim": 5},
    "no bias": {"bias": False},
    "extra key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "added"])
def test_multihead_attention_with_its_options(seed, name, weights, masks):
    torch.manual_seed(seed)
    options = {"batch_first": True} | HEADS[name]
    plain = nn.MultiheadAttention(12, 3, **options).double()
    fused = copy.deepcopy(plain)
    prepare(fused)
    q, k, v = (
        torch.randn(2, 4, 12),
        torch.randn(2, 6, options.get("kdim", 12)),
        torch.randn(2, 6, options.get("vdim", 12)),
    )
    order = (lambda x: x) if options["batch_first"] else (lambda x: x.transpose(0, 1))
    primals = tuple(order(x.double()) for x in (q, k, v))
    tangents = tuple(torch.randn_like(x) for x in primals)
    hidden = torch.ones(4, 6, dtype=torch.bool).triu(3)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    given = {
        "attn_mask": {"causal": hidden, "both": hidden, "added": torch.randn(6, 4, 6).double()}.get(masks),
        "key_padding_mask": padding if masks in ("padding", "both") else None,
        "need_weights": weights,
    }
    call = lambda heads: lambda *x: heads(*x, **given)[0]  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_jvp(call(plain), primals, tangents)
    found = jvp(call(fused), primals, tangents)
    torch.testing.assert_close(tuple(found), tuple(want), rtol=1e-11, atol=1e-12)


class Own(nn.MultiheadAttention):
    """Subclass of torch's attention, like those of other code bases."""

    def forward(self, x: Tensor, weights: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, found = super().forward(x, x, x, need_weights=weights)
        assert (found is not None) == weights
        return out


class Pool(nn.Module):
    """Attention pool like CLIP's: linear layers of its own around torch's function."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, weights: bool) -> Tensor:
        x = x.transpose(0, 1)
        biases = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        given: Any = (x.mean(0, keepdim=True), x, x, 8, 2, None, biases, None, None, False, 0.0)
        given += self.out.weight, self.out.bias
        options: Any = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        options |= {"use_separate_proj_weight": True, "training": self.training, "need_weights": weights}
        out, found = F.multi_head_attention_forward(*given, **options)
        assert (found is not None) == weights
        return out[0]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [lambda: Own(8, 2, batch_first=True), Pool])
def test_attention_of_torchs_in_somebodys_code_is_routed(make, training, weights, seed):
    torch.manual_seed(seed)
    plain = make().double().train(training)
    model = copy.deepcopy(plain)
    assert prepare(model).routed[""] == "multi_head_attention_forward"
    x, v = torch.randn(2, 3, 5, 8).double()
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_jvp(lambda x: plain(x, weights), (x,), (v,))
        want[0].square().sum().backward()
    found = jvp(lambda x: model(x, weights), (x,), (v,))
    found[0].square().sum().backward()  # the tangent has no gradient here
    torch.testing.assert_close(tuple(found), tuple(want), rtol=1e-11, atol=1e-12)
    given = [[p.grad for p in each.parameters()] for each in (model, plain)]
    torch.testing.assert_close(*given, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(model(x, weights), plain(x, weights))


def test_dropout_of_attention_weights_is_kept():
    heads = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    prepare(heads)
    x = torch.randn(2, 9, 8)
    run = lambda x: heads(x, x, x, need_weights=False)[0]  # noqa: E731
    draws = [jvp(run, (x,), (x,))[0] for _ in range(2)]
    assert not torch.equal(*draws)
    heads.eval()
    assert torch.equal(*[jvp(run, (x,), (x,))[0] for _ in range(2)])


def test_dropout_of_functional_attention_is_drawn_and_differentiated(seed):
    torch.manual_seed(seed)
    x, v = torch.randn(2, 2, 3, 7, 8, dtype=torch.float64)
    fused = lambda x: F.scaled_dot_product_attention(x, x, x.sin(), dropout_p=0.4)  # noqa: E731
    written = lambda x: F.dropout((x @ x.mT * 8**-0.5).softmax(-1), 0.4) @ x.sin()  # noqa: E731
    pairs = []
    for transform, f in ((jvp, fused), (torch_jvp, written)):
        torch.manual_seed(seed)
        pairs.append(tuple(transform(f, (x,), (v,))))
    torch.testing.assert_close(*pairs)
    assert pairs[0][0].abs().max() > 0.1


AS_TORCHS: dict[str, tuple[tuple[tuple[int, ...], ...], Any]] = {
    "no heads": (((2, 5, 4), (2, 7, 4), (2, 7, 3)), {"attn_mask": (2, 5, 7)}),
    "one sequence": (((5, 4), (7, 4), (7, 4)), {"attn_mask": (5, 7)}),
    "images": (((2, 3, 2, 5, 4), (2, 3, 2, 7, 4), (2, 3, 2, 7, 4)), {"attn_mask": (3, 1, 5, 7)}),
    "shared keys": (((2, 3, 5, 4), (1, 1, 7, 4), (1, 3, 7, 4)), {"attn_mask": (2, 1, 1, 7)}),
    "shared head": (((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4)), {}),
    "shared queries": (((5, 4), (2, 3, 7, 4), (7, 4)), {"is_causal": True}),
    "grouped": (((2, 4, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)), {"enable_gqa": True, "scale": 0.7}),
}


@pytest.mark.parametrize("name", AS_TORCHS)
def test_functional_attention_takes_the_shapes_that_torchs_takes(name, seed):
    torch.manual_seed(seed)
    shapes, options = AS_TORCHS[name]
    draw = lambda shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    given: Any = {key: draw(value) if key == "attn_mask" else value for key, value in options.items()}

    class Attending(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **given)

    model = Attending()
    primals, tangents = (tuple(map(draw, shapes)) for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_jvp(model, primals, tangents)
    prepare(model)
    torch.testing.assert_close(tuple(jvp(model, primals, tangents)), tuple(want), rtol=1e-11, atol=1e-12)


class Biased(nn.Module):
    """Attention with a learned bias for each head and pair of positions, and fewer heads of keys."""

    def __init__(self):
        super().__init__()
        self.bias, self.out = nn.Parameter(torch.randn(4, 5, 5)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        k = x[:, :2]
        return self.out(F.scaled_dot_product_attention(x, k, k.sin(), attn_mask=self.bias, scale=0.7, enable_gqa=True))


@pytest.mark.parametrize("transform", [jvp, torch_jvp])
def test_a_bias_that_learns_gets_its_gradient(transform: Any, seed):
    torch.manual_seed(seed)
    model = Biased().double()
    x, v = torch.randn(2, 3, 4, 5, 6).double()
    with sdpa_kernel(SDPBackend.MATH):
        wanted, moved, *_ = torch_jvp(copy.deepcopy(model), (x,), (v,))
    prepare(model)
    u, du = transform(model, (x,), (v,))
    torch.testing.assert_close((u, du), (wanted, moved))
    (gradient,) = torch.autograd.grad((u - du.detach()).square().sum(), model.bias)
    with sdpa_kernel(SDPBackend.MATH):
        (exact,) = torch.autograd.grad((model(x) - du.detach()).square().sum(), model.bias)
    torch.testing.assert_close(gradient, exact)
    assert gradient.norm() > 0


def test_functional_ops_are_found_under_another_name():
    class Renamed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sdpa(x, x, x, is_causal=True)

    model = Renamed()
    assert prepare(model).routed == {"": "scaled_dot_product_attention"}
    x = torch.randn(1, 2, 4, 8)
    assert jvp(model, (x,), (x,))[1].abs().max() > 0.1


def test_a_causal_hint_without_the_mask_is_refused():
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    prepare(heads)
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="is_causal=True is given without attn_mask, expected both"):
        jvp(lambda x: heads(x, x, x, need_weights=False, is_causal=True)[0], (x,), (x,))


class Functional(nn.Module):
    """A functional norm over rows that differ from its input's."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, [6]) if self.norm is F.layer_norm else F.rms_norm(x, [6])


@pytest.mark.parametrize(
    "model",
    [
        nn.LayerNorm(6, elementwise_affine=False),
        nn.LayerNorm([6, 2], elementwise_affine=False),
        nn.RMSNorm(6, elementwise_affine=False),
        Functional(F.layer_norm),
        Functional(F.rms_norm),
    ],
)
def test_rows_of_another_width_are_refused(model):
    prepare(model)
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"x is \(2, 3, 4\), expected its last dimensions to be \(6"):
        jvp(model, (x,), (x,))
    with pytest.raises((ValueError, RuntimeError)):
        model(x)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(6, 5), (3, 6)), (nn.Conv2d(6, 5, 3), (2, 6, 4, 4)), (nn.LayerNorm(6), (3, 6))]
)
def test_tangents_of_parameters_are_not_lost(layer, shape, seed):
    torch.manual_seed(seed)
    plain = copy.deepcopy(layer).double()
    fused = copy.deepcopy(plain)
    prepare(fused)
    x = torch.randn(shape, dtype=torch.float64)
    parameters = {key: p.detach() for key, p in plain.named_parameters()}
    moves = {key: torch.randn_like(p) for key, p in parameters.items()}
    primals, tangents = (x, parameters), (torch.ones_like(x), moves)
    want = torch_jvp(lambda x, p: functional_call(plain, p, (x,)), primals, tangents)
    found = jvp(lambda x, p: functional_call(fused, p, (x,)), primals, tangents)
    torch.testing.assert_close(tuple(found), tuple(want), rtol=1e-11, atol=1e-12)


IN_PLACE = {
    "group_norm": (nn.GroupNorm(2, 6), (2, 6, 4, 4)),
    "layer_norm": (nn.LayerNorm(6), (3, 6)),
    "planes": (nn.LayerNorm([3, 6]), (2, 3, 6)),
    "rms_norm": (nn.RMSNorm(6), (3, 6)),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("transform", ["detached", "through", "torch"])
def test_an_activation_in_place_may_follow(name, transform, seed):
    torch.manual_seed(seed)
    norm, shape = IN_PLACE[name]
    x, v = torch.randn(2, *shape, dtype=torch.float64)
    plain = nn.Sequential(copy.deepcopy(norm), nn.SiLU(inplace=True)).double()
    fused = copy.deepcopy(plain)
    prepare(fused)
    taken = {"detached": jvp, "torch": torch_jvp, "through": lambda *a: jvp(*a, tangent_grad=True)}[transform]
    (u, du), (want, dwant, *_) = taken(fused, (x,), (v,)), torch_jvp(plain, (x,), (v,))
    torch.testing.assert_close((u, du), (want, dwant), rtol=1e-11, atol=1e-12)
    found, expect = (torch.autograd.grad(y.sin().sum(), list(m.parameters())) for y, m in ((u, fused), (want, plain)))
    torch.testing.assert_close(found, expect, rtol=1e-11, atol=1e-12)


def test_attention_whose_weights_move_alone(seed):
    torch.manual_seed(seed)
    plain = nn.MultiheadAttention(12, 3, batch_first=True).double()
    fused = copy.deepcopy(plain)
    prepare(fused)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    parameters = {key: p.detach() for key, p in plain.named_parameters()}
    moves = {key: torch.randn_like(p) for key, p in parameters.items()}
    call = lambda heads: lambda p: functional_call(heads, p, (x, x, x), {"need_weights": False})[0]  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_jvp(call(plain), (parameters,), (moves,))
    torch.testing.assert_close(tuple(jvp(call(fused), (parameters,), (moves,))), tuple(want), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("kind", "shape"), [(nn.InstanceNorm1d, (3, 4, 7)), (nn.InstanceNorm2d, (2, 3, 5, 3))])
@pytest.mark.parametrize("transform", [jvp, torch_jvp])
def test_instance_norms_are_group_norms(kind, shape, affine, transform: Any, seed):
    torch.manual_seed(seed)
    norm = kind(shape[1], affine=affine, eps=1e-3).double()
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    x, v = torch.randn(2, *shape, dtype=torch.float64)
    wanted = expected(norm, x, v)
    exact = norm(x.requires_grad_()).sin().sum()
    gradients = torch.autograd.grad(exact, (x, *norm.parameters()))
    prepare(norm)
    u, du = transform(norm, (x,), (v,))
    torch.testing.assert_close((u, du), wanted)
    torch.testing.assert_close(torch.autograd.grad(u.sin().sum(), (x, *norm.parameters())), gradients)
    # Of some samples alone, and of none.
    some = partial_jvp(norm, (x.detach(),), (v[:1],))
    torch.testing.assert_close(some, (wanted[0], wanted[1][:1]))
    assert transform(norm, (x[:0],), (v[:0],))[1].shape == v[:0].shape
    # What torch does otherwise stays torch's: no batch, running statistics.
    counting = kind(shape[1], track_running_stats=True).double()
    prepare(counting)
    torch.testing.assert_close(jvp(counting, (x[0],), (v[0],)), expected(kind(shape[1]).double(), x[0], v[0]))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_the_format_of_its_input(training, seed):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(3).train(training)
    expected = copy.deepcopy(norm)
    prepare(norm)
    x, v = torch.randn(2, 4, 3, 5, 5).bfloat16()
    u, du = jvp(norm, (x,), (v,))
    assert u.dtype == du.dtype == expected(x).dtype == torch.bfloat16
    torch.testing.assert_close(u, expected(x), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_in_short_formats_is_computed_in_fp32(dtype, seed):
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(4).train()
    prepare(norm)
    x, v = torch.randn(64, 4).mul(400).to(dtype), torch.randn(64, 4).to(dtype)
    exact = functools.partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    expected = torch.func.jvp(exact, (x.double(),), (v.double(),))
    for got, want in zip(jvp(norm, (x,), (v,)), expected, strict=True):
        assert (got.double() - want).norm() < torch.finfo(dtype).eps * want.norm()


def test_every_swap_is_a_subclass_of_what_it_replaces():
    for kind in (modules.GroupNorm, modules.LayerNorm, modules.RMSNorm, modules.Linear, modules.BatchNorm3d):
        assert issubclass(kind, getattr(nn, kind.__name__))
