"""du/dt along the path: the average velocity u and its total time derivative, by one of four backends.

A JVP's primal is the prediction, so one pass gives both. `APART` are the backends that take the derivative in passes of
its own, without a graph, and may do so in another number format.

With z_t moving at velocity v, r fixed and t moving at 1, the chain rule gives (arXiv:2505.13447, equation 8)

    du/dt = v . du/dz + du/dt|_z,

the Jacobian-vector product of u at (z, r, t) with tangent (v, 0, 1).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from fullstride.jvp import jvp, partial_jvp
from fullstride.jvp.function_modes import ExplicitZeros
from fullstride.jvp.state import GradientInside, computing
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.objective.shapes import Conditions, like
from fullstride.settings.fields import Conflict

Velocity = Callable[..., Tensor]
Result = tuple[Float[Tensor, "b *o"], Float[Tensor, "b *o"]]  # of the network's output, mostly of z's shape
Points = tuple[Tensor, Tensor, Tensor]  # z, r and t


def labelled(label: Tensor | None) -> dict[str, Tensor]:
    """Keyword of a network's labels; empty without labels, so that a network need not take any."""
    return {} if label is None else {"label": label}


def _func(model: Velocity, points: Points, v: Tensor, conditions: Conditions) -> Result:
    """One pass of `fullstride.jvp.jvp`, which keeps nothing of the tangent; its primal is the prediction."""
    u, dudt = jvp(lambda z, r, t: model(z, r, t, **conditions), points, (v, None, torch.ones_like(points[2])))
    return u, dudt


def _forward_ad(model: Velocity, points: Points, v: Tensor, conditions: Conditions) -> Result:
    """One pass of `torch.autograd.forward_ad` dual tensors; its primal is the prediction."""
    z, r, t = points
    mode = nullcontext() if torch.compiler.is_compiling() else ExplicitZeros()
    with forward_ad.dual_level(), computing(gradients=True, inside=False), mode:
        # Clones: under torch.compile a dual's primal must not be a view.
        pairs = (z.clone(), v.clone()), (t.clone(), torch.ones_like(t))
        dual_z, dual_t = (forward_ad.make_dual(*pair) for pair in pairs)
        try:
            u, dudt = forward_ad.unpack_dual(like(z, model(dual_z, r, dual_t, **conditions)))
        except GradientInside as error:
            raise ValueError("the model computes a gradient itself; use jvp_backend=func for such a model") from error
        if dudt is None:
            raise ValueError(
                "the model's output carries no tangent under forward_ad: it detaches its inputs or runs an operation "
                "without a forward-mode derivative; use jvp_backend=finite_difference for such a model"
            )
        return u, dudt.detach()


def same_randomness(z: Tensor) -> AbstractContextManager:
    """Rewind the RNG afterwards, so that a second pass of the model sees the same dropout masks."""
    if torch.compiler.is_compiling():
        return nullcontext()
    devices = [z.get_device()] if z.is_cuda else []
    return torch.random.fork_rng(devices=devices)


def _in_format(precision: str | None, z: Tensor) -> AbstractContextManager:
    """Autocast as the derivative's format has it, or as it is around."""
    if precision is None:
        return nullcontext()
    return torch.autocast(z.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def _two_pass(
    model: Velocity, points: Points, v: Tensor, conditions: Conditions, precision: str | None = None
) -> Result:
    """A JVP without graph for the target, then a separate forward pass for the prediction."""
    with torch.no_grad(), same_randomness(v), _in_format(precision, v):
        _, dudt = _func(model, points, v, conditions)
    return model(*points, **conditions), dudt


# The central difference of an fp32 network: truncation falls as h^2, rounding grows as 1e-7/h; they meet near 5e-3.
FINITE_DIFFERENCE_STEP = 5e-3


def _finite_difference(
    model: Velocity, points: Points, v: Tensor, conditions: Conditions, precision: str | None = None
) -> Result:
    """Central difference along (v, 0, 1); needs no forward derivative of any operation."""
    z, r, t = points
    h = FINITE_DIFFERENCE_STEP
    with torch.no_grad(), _in_format(precision, z):
        with same_randomness(z):
            ahead = like(z, model(z + h * v, r, t + h, **conditions))
        with same_randomness(z):
            behind = model(z - h * v, r, t - h, **conditions)
    return model(z, r, t, **conditions), (ahead - behind) / (2 * h)


JVP_BACKENDS: dict[str, Callable[..., Result]] = {
    "func": _func,
    "forward_ad": _forward_ad,
    "two_pass": _two_pass,
    "finite_difference": _finite_difference,
}
APART = ("two_pass", "finite_difference")


def compiled(config: TrainConfig) -> bool:
    """Tell whether a run's steps are compiled, or may be."""
    return "compile" in config.backend or (config.backend == "auto" and not config.guard.check_step)


CONFLICTS = (
    Conflict(
        "loss.jvp_precision loss.jvp_backend",
        lambda c: c.loss.jvp_precision != "same" and c.loss.jvp_backend not in APART,
        f"loss.jvp_backend={' or '.join(APART)}; the other backends compute derivative and prediction in one pass",
    ),
    # Products of fp32 are the process's: only what autocast rounds can be another inside a step.
    Conflict(
        "loss.jvp_precision precision",
        lambda c: c.loss.jvp_precision != "same" and "bf16" not in (c.loss.jvp_precision, c.precision),
        "bf16 for one of them, or loss.jvp_precision=same",
    ),
    # A compiled step draws dropout anew in each pass of the network: the passes would be of different networks.
    Conflict(
        "backend loss.jvp_backend model.dropout",
        lambda c: (
            compiled(c)
            and c.loss.jvp_backend in APART
            and c.loss.meanflow_ratio > 0
            and getattr(c.model, "dropout", 0) > 0
        ),
        "loss.jvp_backend=func, backend=eager or model.dropout=0: when compiled, each pass of this derivative would "
        "drop different units",
    ),
)


def velocity_and_derivative(
    model: Velocity,
    z: Float[Tensor, "b *s"],
    r: Float[Tensor, " b"],
    t: Float[Tensor, " b"],
    v: Float[Tensor, "b *s"],
    conditions: Conditions | None = None,
    *,
    backend: str = "func",
    chunk: int = 0,
    precision: str | None = None,
) -> Result:
    """u(z, r, t), differentiable in the parameters, and du/dt = v du/dz + du/dt|_z, detached.

    Args:
        model: the average-velocity network, called as `model(z, r, t, **conditions)`.
        z: points z_t on the path.
        r: the earlier time of each interval.
        t: the later time, at which z is.
        v: the velocity of z, dz/dt.
        conditions: further arguments of the network, such as `{"label": label}`.
        backend: `func` (fullstride.jvp.jvp), `forward_ad` (dual tensors), `two_pass` (JVP without graph, then a forward
            pass), or `finite_difference` (central, step 5e-3).
        chunk: most samples that are differentiated at once, to bound the memory of their tangents; 0 takes all.
        precision: `bf16` (autocast), `tf32` or `fp32` (no autocast) of a derivative that is taken apart from the
            prediction, by one of `APART`; None is the prediction's own.

    Raises:
        ValueError: for a backend of another name, a negative chunk, or a precision of a derivative that shares its
            pass with the prediction.

    """
    if backend not in JVP_BACKENDS:
        raise ValueError(f"jvp_backend is {backend!r}, expected one of {', '.join(JVP_BACKENDS)}")
    if chunk < 0:
        raise ValueError(f"chunk is {chunk}, expected a number of samples, or 0 for all at once")
    if precision is not None and backend not in APART:
        raise ValueError(f"precision is {precision!r} for jvp_backend={backend}, expected one of {', '.join(APART)}")
    options = {} if precision is None else {"precision": precision}
    run, given = functools.partial(JVP_BACKENDS[backend], **options), conditions or {}
    if not 0 < chunk < len(z):
        return run(model, (z, r, t), v, given)
    cuts = [slice(start, start + chunk) for start in range(0, len(z), chunk)]
    results = [run(model, (z[c], r[c], t[c]), v[c], {k: x[c] for k, x in given.items()}) for c in cuts]
    u, dudt = (torch.cat(x) for x in zip(*results, strict=True))
    return u, dudt


def velocity_and_some_derivatives(
    model: Velocity,
    z: Float[Tensor, "b *s"],
    r: Float[Tensor, " b"],
    t: Float[Tensor, " b"],
    v: Float[Tensor, "n *s"],
    conditions: Conditions | None = None,
) -> tuple[Float[Tensor, "b *o"], Float[Tensor, "n *o"]]:
    """u(z, r, t) of all samples, differentiable in the parameters, and du/dt of the first n, in one pass, detached.

    The primal pass is the one without a derivative, each layer once over all samples; the tangents are the only work
    that is added (`fullstride.jvp.partial_jvp`).

    Args:
        model: the network, as for `velocity_and_derivative`, built from operations with a rule in `partial_jvp`.
        z: points z_t on the path.
        r: the earlier time of each interval.
        t: the later time.
        v: the velocities of the first n points.
        conditions: further arguments of the network.

    Raises:
        ValueError: for a network with an operation that has no rule.
        AttributeError: for a network that calls a tensor method that has no rule.

    """
    fn = lambda z, r, t: model(z, r, t, **(conditions or {}))  # noqa: E731
    return partial_jvp(fn, (z, r, t), (v, None, torch.ones_like(t[: len(v)])))
