"""Muon: momentum whose matrices are made orthogonal (K. Jordan, 2024), for steps that are guarded or captured.

`torch.optim.Muon` has the same update, but no flag on the device that skips a step, rates on the host alone, and no
filters of convolutions.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Of the quintic x -> a x + b x^3 + c x^5, steepest at zero; it takes singular values into about [0.7, 1.2].
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
EPS = 1e-7
# Of the iterations, where it is not bf16: a CPU takes two to three times as long for bf16 products of such sizes.
FORMATS = {"cpu": torch.float32}
# Root mean square of an AdamW update, given to this one so that both share a rate (arXiv:2502.16982, section 2.2).
ADAMW_RMS = 0.2


def orthogonalized(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """U V' of a matrix U S V', roughly: five Newton-Schulz iterations, in bf16, or on a CPU in fp32."""
    x = matrix.to(FORMATS.get(matrix.device.type, torch.bfloat16))
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)
    x = _by_gram(x) if x.dtype == torch.float32 else _iterated(x)
    return x.T if tall else x


def _iterated(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def _by_gram(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Iterate on powers of x x', which is smaller than x; bf16 would lose small singular values there."""
    gram, product = x @ x.T, torch.eye(len(x), dtype=x.dtype, device=x.device)
    for i in range(ITERATIONS):
        factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        factor.diagonal().add_(A)
        product = factor @ product
        if i < ITERATIONS - 1:
            gram = factor @ gram @ factor
    return product @ x


class Muon(torch.optim.Optimizer):
    """Muon for weights of two dimensions or more; a filter is a matrix of its outputs by everything else.

    p <- (1 - lr decay) p - lr 0.2 sqrt(max(m, n)) O(g + momentum (b - g)), where b is the momentum, b <- b + (1 -
    momentum) (g - b), and O is `orthogonalized`: `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, so that a
    learning rate of AdamW's is right.

    As fused optimizers do, it reads `found_inf` (1 there changes nothing) and divides gradients by `grad_scale`.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0):
        """Take the weights.

        Raises:
            ValueError: for a weight of fewer than two dimensions, or a setting out of range.

        """
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(
                f"lr={lr} momentum={momentum} weight_decay={weight_decay}, expected lr >= 0, momentum in [0, 1) and "
                "weight_decay >= 0"
            )
        # What a captured step asks for; nothing of the state is on the host.
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "capturable": False}
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise ValueError(f"a weight of shape {tuple(p.shape)}, expected matrices; give it to AdamW")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step, or none if `found_inf` says so."""
        harmful, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad if scale is None else p.grad / scale
                    self._update(p, grad, group, harmful)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], harmful: Tensor | None) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"]
        taken: Any = 1.0
        if harmful is not None:
            taken = 1 - harmful
            grad = torch.where(harmful > 0, 0.0, grad)  # 0 times infinity would be no number
        momentum = group["momentum"]
        buffer += taken * (1 - momentum) * (grad - buffer)
        matrix = grad.lerp(buffer, momentum).flatten(1)
        adjusted = ADAMW_RMS * math.sqrt(max(matrix.shape))
        p *= 1 - taken * group["lr"] * group["weight_decay"]
        p -= (taken * group["lr"] * adjusted) * orthogonalized(matrix).to(p.dtype).view_as(p)
