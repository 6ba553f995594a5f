"""Losses along tangents of weights and targets, which PyTorch takes for constants, against differences in fp64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp import jvp

STEP = 1e-6


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, classes of which one is ignored, and shares."""
    torch.manual_seed(seed)
    classes = torch.randint(4, (5, 3))
    classes[0, 1] = -100
    return torch.randn(5, 4, 3, dtype=torch.float64), classes, torch.rand(5, 4, 3, dtype=torch.float64)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of logits, classes, shares and what moves
WEIGHTS: dict[str, Loss] = {
    "cross_entropy": lambda x, y, p, w: F.cross_entropy(x, y, w),
    "smoothed": lambda x, y, p, w: F.cross_entropy(x, y, w, label_smoothing=0.2),
    "shares": lambda x, y, p, w: F.cross_entropy(x, p, w),
    "each": lambda x, y, p, w: F.cross_entropy(x, y, w, reduction="none"),
    "of one sample": lambda x, y, p, w: F.cross_entropy(x[0, :, 0], y[0, 0], w, reduction="sum"),
    "by a module": lambda x, y, p, w: torch.nn.NLLLoss(w, reduction="sum")(x, y),
    "nll_loss": lambda x, y, p, w: F.nll_loss(x, y.clamp(min=0), w, ignore_index=1),
    "binary": lambda x, y, p, w: F.binary_cross_entropy(p, p.flip(0), w[:, None]),
    "of logits": lambda x, y, p, w: F.binary_cross_entropy_with_logits(x, p, pos_weight=w[:, None]),
    "two weights": lambda x, y, p, w: F.binary_cross_entropy_with_logits(
        x, p, w[:, None], pos_weight=1 + w[:, None], reduction="none"
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("tangent_grad", [False, True])
def test_a_loss_moves_with_its_weight(name, tangent_grad, seed):
    x, classes, shares = drawn(seed)
    w, t = torch.rand(4, dtype=torch.float64) + 0.3, torch.randn(4, dtype=torch.float64)
    loss = lambda w: WEIGHTS[name](x, classes, shares, w)  # noqa: E731
    out, tangent = jvp(loss, (w,), (t,), tangent_grad=tangent_grad)
    torch.testing.assert_close(out, loss(w))
    torch.testing.assert_close(tangent, (loss(w + STEP * t) - loss(w - STEP * t)) / (2 * STEP), rtol=1e-6, atol=1e-8)
    assert tangent.abs().max() > 1e-4


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_loss_moves_with_its_logits_and_its_weight(name, seed):
    x, classes, shares = drawn(seed)
    w, t, of_x = torch.rand(4, dtype=torch.float64) + 0.3, torch.randn(4).double(), torch.randn_like(x)
    loss = lambda x, w: WEIGHTS[name](x, classes, shares, w)  # noqa: E731
    tangent = jvp(loss, (x, w), (of_x, t))[1]
    ahead, behind = (loss(x + h * of_x, w + h * t) for h in (STEP, -STEP))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * STEP), rtol=1e-6, atol=1e-8)


def test_a_margin_moves_with_its_target(seed):
    x, _, target = drawn(seed)
    t = torch.randn_like(x)
    loss = lambda y: F.soft_margin_loss(x, y)  # noqa: E731
    tangent = jvp(loss, (target,), (t,))[1]
    torch.testing.assert_close(tangent, (loss(target + STEP * t) - loss(target - STEP * t)) / (2 * STEP))


def test_a_tangent_of_a_target_has_its_gradient(seed):
    x, _, target = drawn(seed)
    x, t, target = x.sigmoid(), torch.randn_like(x), target.requires_grad_()
    tangent = jvp(lambda y: F.binary_cross_entropy(x, y, reduction="sum"), (target.sin(),), (t,), tangent_grad=True)[1]
    torch.testing.assert_close(tangent, (t * ((1 - x).log() - x.log())).sum())
    squared = jvp(
        lambda y: F.binary_cross_entropy(x * y.exp() / 9, y, reduction="sum"), (target,), (t,), tangent_grad=True
    )
    (found,) = torch.autograd.grad(squared[1], target)
    z = x * target.exp() / 9
    by_hand = (t * ((1 - z).log() - z.log() - target + (1 - target) * z / (1 - z))).sum()
    torch.testing.assert_close(squared[1], by_hand)
    torch.testing.assert_close(found, torch.autograd.grad(by_hand, target)[0])


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has none")
def test_a_loss_in_chunks_has_its_whole_tangent(seed):
    x, classes, _ = drawn(seed)
    x, y, matrix = x.mT[0], classes[0].clamp(min=0), torch.randn(6, 4, dtype=torch.float64)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    t = torch.randn_like(x)
    found = jvp(lambda x: F.linear_cross_entropy(x, matrix, y, options=options), (x,), (t,))
    expected = torch.func.jvp(lambda x: F.cross_entropy(x @ matrix.T, y), (x,), (t,))
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="linear_cross_entropy's weight"):
        jvp(
            lambda w: F.linear_cross_entropy(x, matrix, y, weight=w),
            (torch.ones(6).double(),),
            (torch.ones(6).double(),),
        )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (torch.special.bessel_j0, "bessel_j0"),
        (lambda x: torch.special.legendre_polynomial_p(x, torch.tensor(3)), "legendre_polynomial_p"),
        (
            lambda x: torch.native_batch_norm(x[None], None, None, x.flip(0), x, False, 0.1, 1e-5)[0],
            "native_batch_norm",
        ),
        (lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), x, "prod"), "scatter_reduce with 'prod'"),
    ],
)
def test_what_pytorch_derives_wrongly_is_refused_by_name(call, named):
    x, t = torch.rand(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"no right forward derivative of {named}"):
        jvp(call, (x,), (t,))
    assert jvp(lambda x: x * call(x.detach()), (x,), (t,))[1].abs().max() > 0
