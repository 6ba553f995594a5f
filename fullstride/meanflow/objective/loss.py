"""The MeanFlow objective (arXiv:2505.13447) and flow matching, its case r = t.

Data x sits at t = 0, noise e at t = 1, and z_t = (1 - t) x + t e moves between them at velocity v = e - x.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.meanflow.config.objectives import OBJECTIVES, SPLITS, WEIGHTINGS
from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.objective import derivative, guidance, teacher
from fullstride.meanflow.objective.derivative import (
    Conditions,
    Velocity,
    labelled,
    velocity_and_derivative,
    velocity_and_some_derivatives,
)
from fullstride.meanflow.objective.guidance import Guidance, guidance_of
from fullstride.meanflow.objective.shapes import (
    Draw,
    PathBatch,
    check_batch,
    check_conditions,
    check_times,
    like,
    over_elements,
)
from fullstride.meanflow.objective.split import can_share
from fullstride.meanflow.objective.tangent import TangentControl
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.objective.times import LogitNormalV0, TimeLaw, meanflow_count, times_of
from fullstride.meanflow.objective.weighting import weighting_of
from fullstride.settings.fields import AllowedNames, Conflict, NotNegative, Positive, Share, check
from fullstride.settings.overrides import is_import_path, load_object
from fullstride.step.torch import Averages

Metrics = dict[str, Tensor]
SAME_LOSS = ("auto", "static", "shared", "full")  # of which any may be resumed as any other
TOLD_APART = ("auto", "static", "shared")  # whose metrics are those of each side, too
CONFLICTS = (
    Conflict(
        "data.batch_size loss.meanflow_ratio",
        lambda c: (
            c.loss.split in SAME_LOSS
            and 0 < c.loss.meanflow_ratio < 1
            and meanflow_count(c.loss.meanflow_ratio, c.data.batch_size) in (0, c.data.batch_size)
        ),
        "samples with r != t and samples with r = t in each batch; raise data.batch_size, or use loss.split=bernoulli, "
        "which draws each sample's side",
    ),
    Conflict(
        "loss.split loss.jvp_backend loss.jvp_chunk",
        lambda c: c.loss.split == "shared" and (c.loss.jvp_backend != "func" or c.loss.jvp_chunk > 0),
        "loss.jvp_backend=func and loss.jvp_chunk=0, since its tangents share the batch's pass; or loss.split=static",
    ),
    *derivative.CONFLICTS,
    *guidance.CONFLICTS,
    *teacher.CONFLICTS,
)


def interpolate(x: Float[Tensor, "b *s"], e: Float[Tensor, "b *s"], t: Float[Tensor, " b"]) -> Float[Tensor, "b *s"]:
    """z_t = (1 - t) x + t e (arXiv:2505.13447, section 3)."""
    time = over_elements(t, x)
    return (1 - time) * x + time * like(x, e, "noise")


def conditional_velocity(x: Float[Tensor, "b *s"], e: Float[Tensor, "b *s"]) -> Float[Tensor, "b *s"]:
    """v = dz_t/dt = e - x."""
    return e - x


def meanflow_target(
    v: Float[Tensor, "b *s"],
    dudt: Float[Tensor, "b *s"],
    t: Float[Tensor, " b"],
    r: Float[Tensor, " b"],
) -> Float[Tensor, "b *s"]:
    """u_tgt = v - (t - r) du/dt, with stop-gradient (arXiv:2505.13447, equations 6 and 10)."""
    return (v - over_elements(t - r, v) * like(v, dudt, "du/dt")).detach()


def squared_error(prediction: Float[Tensor, "b *s"], target: Float[Tensor, "b *s"]) -> Float[Tensor, " b"]:
    """||prediction - target||^2, summed over a sample's elements in fp32 or better."""
    error = prediction - target
    return error.to(torch.promote_types(error.dtype, torch.float32)).square().reshape(len(error), -1).sum(1)


@dataclass(frozen=True)
class MeanFlowLoss:
    """E[w ||u_theta(z_t, r, t) - sg(u_tgt)||^2] (arXiv:2505.13447, equation 9), callable on a batch.

    Attributes:
        ratio: share of samples with r != t, the ones that need the JVP; the rest are flow matching.
        times: the law of (t, r).
        weighting_power: p of the adaptive weight.
        weighting_eps: c of the adaptive weight.
        split: `auto` is `shared` where the network and the derivative allow it, which is tried once on a copy of the
            network and said on stderr, and `static` where not, under `torch.compile` and for what is no `nn.Module`;
            `static`, which any network can do, takes the first round(ratio * batch) samples, so only they pay for
            the JVP and shapes never change, and runs the network twice; `shared` takes the same ones in one pass over
            the batch, in which they alone carry a tangent; `full` takes the same ones and sends the whole batch through
            the JVP, as the derivative is multiplied by t - r = 0 elsewhere; all four have one loss. `bernoulli` is
            `full` with the side of each sample drawn, those with r != t first.
        backend, chunk, precision: how u and du/dt are computed; see `derivative.velocity_and_derivative`.
        guidance: replaces the velocity of class-conditional samples by a guided one; None leaves it.
        weighting: how samples are weighed by their errors; one of `WEIGHTINGS`.
        teacher: a pretrained flow whose velocity replaces a sample's own; None leaves it.
        tangent: how much of du/dt enters the target.

    """

    # Settings that exclude each other by this objective.
    conflicts: ClassVar[tuple[Conflict, ...]] = CONFLICTS
    # Forward passes without gradient of each sample that is differentiated, beside guidance's.
    more_passes: ClassVar[int] = 0

    ratio: Share = 0.25
    times: TimeLaw = field(default_factory=LogitNormalV0)
    weighting_power: NotNegative = 1.0
    weighting_eps: Positive = 1e-2
    split: Annotated[str, AllowedNames(SPLITS)] = "auto"
    backend: str = "func"
    guidance: Guidance | None = None
    chunk: int = 0
    precision: str | None = None
    weighting: Annotated[str, AllowedNames(WEIGHTINGS)] = "adaptive"
    teacher: Teacher | None = None
    tangent: TangentControl = field(default_factory=TangentControl)
    _weigh: Callable[..., Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check what can be checked without a batch.

        Raises:
            ValueError: for a ratio outside [0, 1], an unknown split or weighting, or a split that cannot take the
                derivative so.

        """
        check(self)
        object.__setattr__(self, "_weigh", weighting_of(self.weighting).weigh)
        if self.split == "shared" and not self._derives_in_the_pass:
            given = f"jvp_backend={self.backend} jvp_chunk={self.chunk} jvp_precision={self.precision or 'same'}"
            raise ValueError(
                f"split=shared with {given}, expected jvp_backend=func, jvp_chunk=0 and jvp_precision=same, since its "
                "tangents share the batch's pass; set these, or use split=static"
            )

    @classmethod
    def build(
        cls, config: LossConfig, num_classes: int = 0, averages: Averages | None = None, **own: Any
    ) -> "MeanFlowLoss":
        """The objective of a configuration.

        Args:
            config: the configuration of the objective.
            num_classes: number of classes of the data.
            averages: averages of the network's weights, for an objective that needs them.
            own: what an objective adds to these settings; of another package what it adds is in the configuration.

        """
        common = {each.name for each in fields(LossConfig)}
        own = {key: value for key, value in vars(config).items() if key not in common} | own
        return cls(
            ratio=config.meanflow_ratio,
            times=times_of(config),
            weighting=config.weighting,
            weighting_power=config.weighting_power,
            weighting_eps=config.weighting_eps,
            split=config.taken_split,
            backend=config.jvp_backend,
            guidance=guidance_of(config, num_classes),
            chunk=config.jvp_chunk,
            precision=None if config.jvp_precision == "same" else config.jvp_precision,
            tangent=TangentControl(config.tangent_warmup, config.tangent_limit),
            **own,
        )

    @property
    def scheduled(self) -> bool:
        """Tell whether the loss changes over a run, so that it needs the share of it that is done."""
        return self.tangent.warmup > 0

    def form_at(self, progress: float) -> "MeanFlowLoss":
        """The loss for that part of a run: itself, or one of another form, for which a step is built anew."""
        return self

    def __call__(
        self,
        model: Velocity,
        x: Float[Tensor, "b *s"],
        label: Int[Tensor, " b"] | None = None,
        *,
        conditions: Conditions | None = None,
        generator: torch.Generator | None = None,
        progress: float | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss of a batch of data `x` (b, ...) with fresh noise, times and dropped labels; see `at`.

        A sample has any rank: a row of a table, a sound, a picture, a film. `conditions` are further arguments of the
        network by keyword. `progress` is the share of the run that is done, for a loss that is `scheduled`.

        Raises:
            ValueError: for an empty or integer batch, labels that are not one for each sample, or a network whose
                output is not of its input's shape.

        """
        drawn = self.draw(x, generator)
        given = dict(conditions or {}) | self.draw_inputs(x, drawn[1], drawn[2], generator)
        done = None if progress is None else x.new_full(x.shape[:1], progress)
        return self.at(model, x, *drawn, self.drop_labels(label, generator), conditions=given, progress=done)

    def draw(
        self, x: Float[Tensor, "b *s"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "b *s"], Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Noise e, times t and r for a batch; r = t for the samples of the flow-matching part, which are the last."""
        check_batch(x)
        batch, device = x.shape[0], x.device
        e = torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype)
        t, r = (time.to(x.dtype) for time in self.times(batch, generator=generator, device=device))
        if self.split == "bernoulli":  # sides by their number, as labels are dropped from the end
            count = (torch.rand(batch, generator=generator, device=device) < self.ratio).sum()
        else:
            count = meanflow_count(self.ratio, batch)
        return e, t, torch.where(torch.arange(batch, device=device) < count, r, t)

    def draw_inputs(
        self,
        x: Float[Tensor, "b *s"],
        t: Float[Tensor, " b"],
        r: Float[Tensor, " b"],
        generator: torch.Generator | None = None,
    ) -> dict[str, Float[Tensor, " b"]]:
        """Further random arguments of the network, by name; none of most objectives."""
        return {}

    def drop_labels(
        self, label: Int[Tensor, " b"] | None, generator: torch.Generator | None = None
    ) -> Int[Tensor, " b"] | None:
        """The labels to train with: some are dropped where there is guidance."""
        return label if self.guidance is None or label is None else self.guidance.drop(label, generator)

    def at(
        self,
        model: Velocity,
        x: Float[Tensor, "b *s"],
        e: Float[Tensor, "b *s"],
        t: Float[Tensor, " b"],
        r: Float[Tensor, " b"],
        label: Int[Tensor, " b"] | None = None,
        *,
        conditions: Conditions | None = None,
        progress: Float[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss at given noise and times: a deterministic function, free of host synchronisation.

        `label` and `conditions`, further arguments by keyword with an entry for each sample, go to the network where
        they are given; `progress` is the share of the run that is done, for a loss that is `scheduled`.

        Metrics, on x's device: `squared_error`, mean over samples and elements; with the static and the shared split
        also `squared_error_fm` and `squared_error_mf`, the same over the samples with r = t and with r != t.
        """
        check_batch(x)
        check_times(x, t, r)
        given = labelled(label) | dict(conditions or {})
        check_conditions(x, given)
        return self._value(model, Draw(x, e, t, r, given, progress))

    def _value(self, model: Velocity, drawn: Draw) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss, and its metrics, at what was drawn and checked."""
        x, t, given = drawn.x, drawn.t, drawn.conditions
        n = meanflow_count(self.ratio, len(x)) if self.split in TOLD_APART else len(x)
        z, v = interpolate(x, drawn.e, t), conditional_velocity(x, drawn.e)
        if self.guidance is not None:
            v = self.guidance.velocity(model, z, t, v, given)
        if self.teacher is not None:
            v = self.teacher.velocity(z, t, given)
        path = PathBatch(x, drawn.e, t, drawn.r, given, drawn.progress, z, v, n)
        errors = self._errors(model, path)
        loss = self._weighted(errors, path).mean()
        reported = {"squared_error": (error := errors[0].detach())}
        if self.split in TOLD_APART:
            sides = {"squared_error_mf": error[:n], "squared_error_fm": error[n:]}
            reported |= {name: side for name, side in sides.items() if len(side)}
        return loss, {name: part.mean() / x[0].numel() for name, part in reported.items()}

    def velocity_and_derivative(
        self, model: Velocity, z: Tensor, r: Tensor, t: Tensor, v: Tensor, conditions: Conditions
    ) -> tuple[Tensor, Tensor]:
        """u and du/dt in this loss's way."""
        options = {"backend": self.backend, "chunk": self.chunk, "precision": self.precision}
        return velocity_and_derivative(model, z, r, t, v, conditions, **options)

    @property
    def _derives_in_the_pass(self) -> bool:
        return (self.backend, self.chunk, self.precision) == ("func", 0, None)

    def _shares(self, model: Velocity, z: Tensor, r: Tensor, t: Tensor, v: Tensor, given: Conditions, n: int) -> bool:
        """Return whether the first n samples carry their tangents through one pass over the whole batch.

        Where that is every sample there is nothing to share: compiled, the derivative of the whole is one graph in
        either way; not compiled, the rules of the shared pass run each layer once, where dual tensors go through
        `torch.func` operation by operation.
        """
        if self.split == "auto":
            # With all of them moving, any network goes through `torch.func`.
            return self._derives_in_the_pass and 0 < n < len(z) and can_share(model, z, r, t, v, given)
        return self.split == "shared" and n > 0 and (n < len(z) or not torch.compiler.is_compiling())

    def _moving(self, model: Velocity, z: Tensor, t: Tensor, v: Tensor, conditions: Conditions) -> Tensor:
        """The velocity along which u is differentiated at these points: the target's own, e - x or the guided one."""
        return v

    def _errors(self, model: Velocity, path: PathBatch) -> tuple[Float[Tensor, " b"], ...]:
        """Squared errors of each sample, differentiable in the network's weights: of u, then what is added to it."""
        return (squared_error(*self._predicted(model, path)),)

    def _weighted(self, errors: tuple[Float[Tensor, " b"], ...], path: PathBatch) -> Float[Tensor, " b"]:
        """The loss of each sample: its errors, weighted."""
        weights = [self._weigh(e, path.t, path.r, self.weighting_power, self.weighting_eps) for e in errors]
        return torch.stack([w * e for w, e in zip(weights, errors, strict=True)]).sum(0)

    def _predicted(self, model: Velocity, path: PathBatch) -> tuple[Tensor, Tensor]:
        """u of each sample, differentiable in the network's weights, and its target."""
        z, v, t, r, given, n = path.z, path.v, path.t, path.r, path.conditions, path.count
        return (self._together if self._shares(model, z, r, t, v, given, n) else self._apart)(model, path)

    def _target(self, path: PathBatch, dudt: Tensor) -> Tensor:
        """The target of the samples with a derivative."""
        control = self.tangent
        taken = control(dudt, path.t - path.r, path.progress) if control.warmup or control.limit else dudt
        return meanflow_target(path.v, taken, path.t, path.r)

    def _apart(self, model: Velocity, path: PathBatch) -> tuple[Tensor, Tensor]:
        """By a pass over the first n samples with a derivative, and one over the rest without."""
        parts, n = [], path.count
        if n > 0:
            head = path.part(slice(n))
            moving = self._moving(model, head.z, head.t, head.v, head.conditions)
            u, dudt = self.velocity_and_derivative(model, head.z, head.r, head.t, moving, head.conditions)
            parts.append((like(head.z, u), self._target(head, like(head.z, dudt, "du/dt"))))
        if n < len(path.z):
            rest = path.part(slice(n, None))
            parts.append((like(rest.z, model(rest.z, rest.t, rest.t, **rest.conditions)), rest.v))
        return torch.cat([u for u, _ in parts]), torch.cat([target for _, target in parts])

    def _together(self, model: Velocity, path: PathBatch) -> tuple[Tensor, Tensor]:
        """By one pass, in which the first n samples carry a tangent."""
        n = path.count
        head, r = path.part(slice(n)), torch.cat([path.r[:n], path.t[n:]])
        moving = self._moving(model, head.z, head.t, head.v, head.conditions)
        u, dudt = velocity_and_some_derivatives(model, path.z, r, path.t, moving, path.conditions)
        return like(path.z, u), torch.cat([self._target(head, dudt), path.v[n:]])


def loss_of(config: LossConfig) -> type[MeanFlowLoss]:
    """The class of a configuration's objective."""
    return load_object(config.name if is_import_path(config.name) else OBJECTIVES[config.name].loss, "loss")
