"""The MeanFlow objective (arXiv:2505.13447) and flow matching, its case r = t.

Data x sits at t = 0, noise e at t = 1, and z_t = (1 - t) x + t e moves between them at velocity v = e - x.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.meanflow.derivative import Velocity, velocity_and_derivative
from fullstride.meanflow.times import LogitNormalV0, TimeLaw, meanflow_count
from fullstride.meanflow.weighting import adaptive_weight

Metrics = dict[str, Tensor]
SPLITS = ("static", "bernoulli")


def _over_pixels(time: Float[Tensor, " b"]) -> Float[Tensor, "b 1 1 1"]:
    return time[:, None, None, None]


def interpolate(
    x: Float[Tensor, "b c h w"], e: Float[Tensor, "b c h w"], t: Float[Tensor, " b"]
) -> Float[Tensor, "b c h w"]:
    """z_t = (1 - t) x + t e (arXiv:2505.13447, section 3)."""
    return (1 - _over_pixels(t)) * x + _over_pixels(t) * e


def conditional_velocity(
    x: Float[Tensor, "b c h w"], e: Float[Tensor, "b c h w"]
) -> Float[Tensor, "b c h w"]:
    """v = dz_t/dt = e - x."""
    return e - x


def meanflow_target(
    v: Float[Tensor, "b c h w"],
    dudt: Float[Tensor, "b c h w"],
    t: Float[Tensor, " b"],
    r: Float[Tensor, " b"],
) -> Float[Tensor, "b c h w"]:
    """u_tgt = v - (t - r) du/dt, with stop-gradient (arXiv:2505.13447, equations 6 and 10)."""
    return (v - _over_pixels(t - r) * dudt).detach()


def squared_error(
    prediction: Float[Tensor, "b c h w"], target: Float[Tensor, "b c h w"]
) -> Float[Tensor, " b"]:
    """||prediction - target||^2, summed over a sample's elements in fp32 or better."""
    error = prediction - target
    return error.to(torch.promote_types(error.dtype, torch.float32)).square().flatten(1).sum(1)


@dataclass(frozen=True)
class MeanFlowLoss:
    """E[w ||u_theta(z_t, r, t) - sg(u_tgt)||^2] (arXiv:2505.13447, equation 9), callable on a batch.

    Attributes:
        ratio: share of samples with r != t, the ones that need the JVP; the rest are flow matching.
        times: the law of (t, r).
        weighting_power: p of the adaptive weight.
        weighting_eps: c of the adaptive weight.
        split: `static` takes the first round(ratio * batch) samples, so only they pay for the JVP and shapes never
            change; `bernoulli` draws each sample's side and sends the whole batch through the JVP.
        backend: see `derivative.velocity_and_derivative`.
    """

    ratio: float = 0.25
    times: TimeLaw = field(default_factory=LogitNormalV0)
    weighting_power: float = 1.0
    weighting_eps: float = 1e-2
    split: str = "static"
    backend: str = "func"

    def __post_init__(self) -> None:
        """Check what can be checked without a batch.

        Raises:
            ValueError: for a ratio outside [0, 1] or an unknown split.
        """
        meanflow_count(self.ratio, 1)
        if self.split not in SPLITS:
            raise ValueError(f"split is {self.split!r}, expected one of {', '.join(SPLITS)}")

    def __call__(
        self,
        model: Velocity,
        x: Float[Tensor, "b c h w"],
        label: Int[Tensor, " b"] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss of a batch of data `x` and its metrics, all tensors on x's device.

        Metrics: `squared_error`, mean over samples and elements; `squared_error_fm` and `squared_error_mf`, the same
        over the samples with r = t and r != t, where the split is static.
        """
        e = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        t, r = (
            time.to(x.dtype) for time in self.times(x.shape[0], generator=generator, device=x.device)
        )
        z, v = interpolate(x, e, t), conditional_velocity(x, e)
        if self.split == "bernoulli":
            error = self._bernoulli_error(model, z, v, t, r, label, generator)
            metrics: Metrics = {}
        else:
            error, metrics = self._static_error(model, z, v, t, r, label)
        loss = (adaptive_weight(error, self.weighting_power, self.weighting_eps) * error).mean()
        return loss, {"squared_error": error.detach().mean() / x[0].numel()} | metrics

    def _bernoulli_error(self, model, z, v, t, r, label, generator) -> Tensor:
        curved = torch.rand(t.shape, generator=generator, device=t.device) < self.ratio
        r = torch.where(curved, r, t)
        u, dudt = velocity_and_derivative(model, z, r, t, v, label, backend=self.backend)
        return squared_error(u, meanflow_target(v, dudt, t, r))

    def _static_error(self, model, z, v, t, r, label) -> tuple[Tensor, Metrics]:
        n, elements = meanflow_count(self.ratio, len(z)), z[0].numel()
        errors, metrics = [], {}
        if n > 0:
            # Clones: inside torch.compile a primal handed to torch.func.jvp must not be a view.
            head = [a[:n].clone() for a in (z, r, t, v)]
            u, dudt = velocity_and_derivative(
                model, *head, None if label is None else label[:n], backend=self.backend
            )
            errors.append(squared_error(u, meanflow_target(v[:n], dudt, t[:n], r[:n])))
            metrics["squared_error_mf"] = errors[-1].detach().mean() / elements
        if n < len(z):
            u = model(z[n:], t[n:], t[n:], label=None if label is None else label[n:])
            errors.append(squared_error(u, v[n:]))
            metrics["squared_error_fm"] = errors[-1].detach().mean() / elements
        return torch.cat(errors), metrics


def flow_matching_loss(times: TimeLaw | None = None) -> MeanFlowLoss:
    """E||u_theta(z_t, t, t) - v||^2, plain flow matching: every r = t and every weight 1 (arXiv:2210.02747)."""
    return MeanFlowLoss(ratio=0.0, times=times or LogitNormalV0(), weighting_power=0.0)
