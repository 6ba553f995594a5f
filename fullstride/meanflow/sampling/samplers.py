"""Samplers: the average velocity crosses [0, 1] in a few long steps, the instantaneous one through an ODE solver.

Both use the same network, u(z, r, t): v(z, t) is u(z, t, t). Noise is at t = 1, images at t = 0.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fullstride.device.precision import matmul_precision
from fullstride.errors import one_of
from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Velocity, labelled
from fullstride.meanflow.objective.shapes import like
from fullstride.meanflow.sampling.graphed import run_by
from fullstride.meanflow.sampling.noise import seeded_labels, seeded_noise
from fullstride.step.torch import prefetch, to_host

IMAGE = 3  # dimensions of one: channels, height, width


@dataclass(frozen=True)
class SampleResult:
    """Result of a sampler.

    Attributes:
        images: the images, at t = 0.
        nfe: evaluations of the network that an image went through; their mean where an adaptive solver took another
            number of steps for another batch.

    """

    images: Float[Tensor, "n *s"]
    nfe: float

    def __str__(self) -> str:
        """`64 images of 3 x 32 x 32, 1 evaluation of the network each`."""
        count, *shape = self.images.shape
        size = " x ".join(map(str, shape)) or "1"
        kind = "images" if len(shape) == IMAGE else "samples"
        return f"{count} {kind} of {size}, {self.nfe:g} evaluation{'s' * (self.nfe != 1)} of the network each"


def _check_steps(sampler: str, steps: int | None) -> int:
    if steps is None or steps < 1:
        raise ValueError(f"steps is {steps}, expected at least 1 for the sampler {sampler!r}; give a number of steps")
    return steps


def meanflow_sample(
    model: Velocity,
    noise: Float[Tensor, "b *s"],
    *,
    steps: int | None = 1,
    label: Int[Tensor, " b"] | None = None,
) -> SampleResult:
    """z_r = z_t - (t - r) u(z_t, r, t) over `steps` equal intervals (arXiv:2505.13447, equation 12, Algorithm 2).

    Raises:
        ValueError: if `steps` is not at least 1.

    """
    steps = _check_steps("meanflow", steps)
    z = noise
    times = [(steps - i) / steps for i in range(steps + 1)]
    for t, r in pairwise(times):
        u = model(z, z.new_full(z.shape[:1], r), z.new_full(z.shape[:1], t), **labelled(label))
        z = z - (t - r) * like(z, u).to(z.dtype)
    return SampleResult(z, float(steps))


class _CountedVelocity:
    """v(z, t) = u(z, t, t) as an ODE solver wants it, counting its evaluations."""

    def __init__(self, model: Velocity, label: Tensor | None, must_be_finite: bool):
        self.model, self.label, self.must_be_finite = model, label, must_be_finite
        self.evaluations = 0

    def __call__(self, t: Tensor, z: Tensor) -> Tensor:
        self.evaluations += 1
        # An adaptive solver's first probe may reach beyond the data end, where the network was never trained.
        times = t.clamp(0, 1).expand(len(z))
        v = like(z, self.model(z, times, times, **labelled(self.label))).to(z.dtype)
        if self.must_be_finite and not v.isfinite().all():
            raise ValueError(
                f"the network's velocity at t = {t.item():.4g} is not finite, so dopri5 cannot choose a step; "
                "check the checkpoint, or use a sampler with a fixed number of steps"
            )
        return v


def worst_sample_rms(x: Float[Tensor, "b *s"]) -> Float[Tensor, ""]:
    """The largest over samples of the root mean square of a sample's elements."""
    return x.reshape(len(x), -1).square().mean(1).sqrt().max()


# Hundreds are plenty for a trained network; a field that wants more would keep dopri5 busy for hours.
MAX_ADAPTIVE_STEPS = 10_000
ODE_METHODS = ("euler", "midpoint", "heun", "rk4", "dopri5")
# Of the network, in a step of fixed size.
EVALUATIONS = {"meanflow": 1, "euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}
# Where torchdiffeq has another name.
THEIRS = {"heun": "heun2"}


def ode_sample(
    model: Velocity,
    noise: Float[Tensor, "b *s"],
    *,
    method: str,
    steps: int | None = None,
    label: Int[Tensor, " b"] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> SampleResult:
    """Solve dz/dt = u(z, t, t) from t = 1 to t = 0 through torchdiffeq.

    euler, midpoint, heun (the trapezoidal one) and rk4 (the 3/8 rule) take `steps` equal steps of 1, 2, 2 and 4
    evaluations. dopri5 chooses its steps for the batch as a whole such that the worst sample's error, the root mean
    square over its elements of error / (atol + rtol |z|), stays below 1 in each step: an easy sample's images therefore
    agree between batches within the tolerance, not to the last bit.

    Args:
        model: the network, called as `model(z, t, t)`, with `label=label` where labels are given.
        noise: z at t = 1.
        method: euler, midpoint, heun, rk4 or dopri5.
        steps: number of equal steps; None for dopri5.
        label: class labels, or None.
        rtol: relative tolerance of dopri5.
        atol: absolute tolerance of dopri5.

    Raises:
        ValueError: for an unknown method; steps that are missing, below 1, or given to dopri5; tolerances that are not
            positive, below the rounding of the noise's dtype or out of reach; under dopri5, a velocity that is not
            finite.

    """
    from torchdiffeq import odeint  # with SciPy's solvers, a long import

    one_of("method", method, ODE_METHODS)
    adaptive = method == "dopri5"
    if adaptive:
        if steps is not None:
            raise ValueError(f"steps is {steps}, but dopri5 chooses its own; leave steps out, or use rk4")
        if not (rtol >= (eps := torch.finfo(noise.dtype).eps) and atol > 0):
            raise ValueError(
                f"rtol is {rtol:g} and atol {atol:g}, expected rtol >= {eps:.2g} (the rounding of {noise.dtype}) and "
                "atol > 0"
            )
        end = torch.zeros(1, dtype=noise.dtype, device=noise.device)
        # step_t makes the last step end at t = 0; otherwise it would overshoot and be interpolated. dtype is that of
        # the times, fp64 unless told, which MPS does not have.
        options = {"norm": worst_sample_rms, "step_t": end, "dtype": noise.dtype, "max_num_steps": MAX_ADAPTIVE_STEPS}
    else:
        # A step size of 1/steps would not do: rounded, it can make one step more (in fp32, 61 become 62).
        grid = torch.linspace(1, 0, _check_steps(method, steps) + 1, dtype=noise.dtype, device=noise.device)
        options = {"grid_constructor": lambda func, y0, t: grid}
    v = _CountedVelocity(model, label, must_be_finite=adaptive)
    ends = torch.tensor([1.0, 0.0], dtype=noise.dtype, device=noise.device)
    try:
        solver = THEIRS.get(method, method)
        path: Tensor = odeint(v, noise, ends, method=solver, rtol=rtol, atol=atol, options=options)  # pyright: ignore[reportAssignmentType]
    except AssertionError as error:
        # The solver asserts that its step does not underflow and that it gets there within max_num_steps.
        raise ValueError(
            f"dopri5 cannot keep rtol={rtol:g}, atol={atol:g} in {noise.dtype} ({error}); loosen them, "
            "or use a sampler with a fixed number of steps"
        ) from error
    return SampleResult(path[-1], float(v.evaluations))


Sampler = Callable[..., SampleResult]
SAMPLERS: dict[str, Sampler] = {
    "meanflow": meanflow_sample,
    **{method: partial(ode_sample, method=method) for method in ODE_METHODS},
}


class GuidedNetwork(nn.Module):
    """u(z, r, t) without class, plus `scale` times the way from there to u of the class (arXiv:2207.12598, equation 6).

    At r = t this is classifier-free guidance of the velocity. Over a longer interval it guides the average velocity,
    which is not the average of the guided one.
    """

    def __init__(self, network: Velocity, scale: float):
        """Take a network that was trained with dropped labels."""
        super().__init__()
        self.network, self.scale = network, scale

    def forward(
        self, z: Float[Tensor, "b *s"], r: Float[Tensor, " b"], t: Float[Tensor, " b"], label: Int[Tensor, " b"]
    ) -> Float[Tensor, "b *s"]:
        """Evaluate the network twice."""
        free = self.network(z, r, t)
        return free + self.scale * (self.network(z, r, t, label=label) - free)


class ConditionedNetwork(nn.Module):
    """u(z, r, t) under one condition for each sample, which the network takes as `condition`."""

    def __init__(self, network: Velocity, condition: Float[Tensor, "b *k"]):
        """Take the conditions of a batch."""
        super().__init__()
        self.network, self.condition = network, condition

    def forward(
        self,
        z: Float[Tensor, "b *s"],
        r: Float[Tensor, " b"],
        t: Float[Tensor, " b"],
        label: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b *s"]:
        """Evaluate the network."""
        return self.network(z, r, t, condition=self.condition, **labelled(label))


def _labels(
    label: int | Int[Tensor, " n"] | None, seed: int, start: int, num: int, num_classes: int
) -> Int[Tensor, " n"] | None:
    if label is None:
        return seeded_labels(seed, start, num, num_classes) if num_classes else None
    labels = torch.full((num,), label) if isinstance(label, int) else label.cpu()
    if len(labels) != num:
        raise ValueError(f"label has {len(labels)} entries, expected num = {num}, one for each image")
    if not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(
            f"label is in [{labels.min()}, {labels.max()}], but num_classes is {num_classes}; "
            "expected labels from 0 to num_classes - 1, or label=None"
        )
    return labels


def sample(
    model: Velocity,
    *,
    sampler: str,
    steps: int | None,
    num: int,
    shape: tuple[int, ...],
    seed: int,
    start: int = 0,
    label: int | Int[Tensor, " n"] | None = None,
    num_classes: int = 0,
    guidance: float = 1.0,
    condition: Float[Tensor, "n *k"] | None = None,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    backend: str = "eager",
) -> SampleResult:
    """Generate `num` images without gradients and in eval mode; image i depends on (seed, i) alone.

    Across batch sizes images agree to the rounding of the precision, those of dopri5 to its tolerance (see
    `ode_sample`).

    Args:
        model: the network u(z, r, t), on `device`.
        sampler: a name in `SAMPLERS`.
        steps: number of steps; None for dopri5.
        num: number of images.
        shape: of one image, (c, h, w), or of a sample of another rank.
        seed: seed of the noise and of the labels.
        start: index i of the first image; several processes generate a set in parts.
        label: one class for all images, a class for each, or None: balanced labels from the seed.
        num_classes: number of classes; 0 generates without labels, of a network with classes as 'no class'.
        guidance: scale of classifier-free guidance, for every sampler; 1 leaves the network as it is, any other
            evaluates it twice (see `GuidedNetwork`).
        condition: a condition for each image, which the network takes as `condition`; such a network runs eagerly.
        batch_size: images of one forward pass.
        device: the network's device.
        precision: precision of the network's products: fp32, tf32 or bf16. Steps are always fp32.
        backend: backend of the network: eager; graph, one launch for each evaluation of a whole batch (see
            `GraphedNetwork`); or auto, which is graph on CUDA unless the network cannot be captured.

    Returns:
        The images in fp32 on the CPU, not clipped to [-1, 1], and the evaluations that an image took.

    Raises:
        ValueError: for an unknown sampler; num or batch_size below 1; labels outside [0, num_classes) or not one for
            each image; a negative seed; guidance without classes, or by a scale that is not finite; and what the
            sampler itself refuses.
        ConfigError: for an unknown precision or backend, tf32 or graph without CUDA, or a network that cannot be
            recorded.

    """
    one_of("sampler", sampler, SAMPLERS)
    if num < 1 or batch_size < 1:
        raise ValueError(f"num is {num} and batch_size {batch_size}, expected both at least 1")
    place = torch.device(device)
    labels = _labels(label, seed, start, num, num_classes)
    if not math.isfinite(guidance) or (guidance != 1 and labels is None):
        raise ValueError(
            f"guidance is {guidance:g} with num_classes {num_classes}, expected a number, and 1 without classes"
        )
    passes = 1 if guidance == 1 else 2
    if condition is not None and (backend == "graph" or len(condition) != num):
        raise ValueError(f"{len(condition)} conditions with backend={backend}, expected {num} with eager or auto")
    whole = model if passes == 1 else GuidedNetwork(model, guidance)
    network = run_by(backend if condition is None else "eager", whole, place)
    evaluations: list[float] = []

    def given() -> Iterator[tuple[Tensor, Tensor | None]]:
        for done in range(0, num, batch_size):
            noise = seeded_noise(seed, start + done, min(batch_size, num - done), shape, pinned=place.type == "cuda")
            yield noise, None if labels is None else labels[done : done + batch_size]

    def made() -> Iterator[Tensor]:
        done = 0
        for noise, own in prefetch(given(), place):
            by: Velocity = network
            if condition is not None:
                by = ConditionedNetwork(model, condition[done : done + len(noise)].to(place))
                by = by if passes == 1 else GuidedNetwork(by, guidance)
            done += len(noise)
            result = SAMPLERS[sampler](by, noise, steps=steps, label=own)
            evaluations.append(passes * result.nfe * len(noise))
            yield result.images.float()

    images = torch.empty(num, *shape, dtype=torch.float32, device="cpu")
    with torch.no_grad(), matmul_precision(precision, place), evaluating(network):
        for part, batch in zip(images.split(batch_size), to_host(made()), strict=True):
            part.copy_(batch)
    return SampleResult(images, sum(evaluations) / num)
