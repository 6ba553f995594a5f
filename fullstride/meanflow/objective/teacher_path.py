"""`loss=cmt`: mid-training on the paths of a teacher's ODE (arXiv:2509.24526).

A solver carries noise along the teacher's flow through x(1), x(1 - 1/n), ..., x(0). For two of these times r < t the
average velocity is known, whatever the network does:

    u(x(t), r, t) -> (x(t) - x(r)) / (t - r).

No derivative is taken, and no data are seen but for their shape and labels. It makes a start for MeanFlow by the same
teacher; u(z, t, t) is not trained.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.objective.derivative import Conditions, Velocity
from fullstride.meanflow.objective.loss import MeanFlowLoss, Metrics, squared_error
from fullstride.meanflow.objective.shapes import Draw, check_batch, like, over_elements
from fullstride.meanflow.objective.teacher import CONFLICTS, Teacher
from fullstride.settings.fields import Conflict, Count
from fullstride.step.torch import Averages

_UNREAD = (
    "tangent", "time_law", "logit_normal_mean", "logit_normal_std", "use_batch_time", "weighting", "split",
    "jvp_backend", "jvp_chunk", "jvp_precision", "tangent_warmup", "tangent_limit",
)  # fmt: skip


@dataclass(frozen=True)
class TeacherPath(MeanFlowLoss):
    """The mean squared error against average velocities of a teacher's paths.

    Attributes:
        path_steps: steps of Heun's method from noise to data, each of two evaluations of the teacher.
        path_pairs: samples that share a path, each with a pair of times of its own.

    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *CONFLICTS,
        Conflict("loss loss.teacher", lambda c: not c.loss.teacher, "loss.teacher=RUN, whose paths it learns"),
        *(
            Conflict(
                f"loss loss.{key}",
                lambda c, key=key: getattr(c.loss, key) != getattr(LossConfig, key),
                "none, as the teacher's paths are all that is read; leave it out",
            )
            for key in _UNREAD
        ),
        *(
            Conflict(f"loss loss.{key}", lambda c, key=key: getattr(c.loss, key) != 0, "0; leave it out")
            for key in ("meanflow_ratio", "weighting_power", "label_dropout")
        ),
        Conflict(
            "loss data.augment",
            lambda c: c.data.augment > 0,
            "data.augment=0, as no data are seen",
        ),
    )

    path_steps: Count = 8
    path_pairs: Count = 4

    @classmethod
    def build(
        cls, config: LossConfig, num_classes: int = 0, averages: Averages | None = None, **own: Any
    ) -> "MeanFlowLoss":
        """Build as `MeanFlowLoss.build`; only the teacher and its paths are read."""
        common = vars(LossConfig())
        own = {key: value for key, value in vars(config).items() if key not in common} | own
        return cls(ratio=0.0, weighting_power=0.0, **own)

    def draw(
        self, x: Float[Tensor, "b *s"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "b *s"], Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Noise, and two different times of the grid for each sample, all pairs alike."""
        check_batch(x)
        n, b = self.path_steps, len(x)
        e = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        first = torch.randint(n + 1, (b,), generator=generator, device=x.device)
        other = torch.randint(n, (b,), generator=generator, device=x.device)
        other = other + (other >= first)
        times = torch.stack([first, other]).to(x.dtype) / n
        return e, times.amax(0), times.amin(0)

    def _value(self, model: Velocity, drawn: Draw) -> tuple[Float[Tensor, ""], Metrics]:
        """The loss at times of the grid; noise and conditions of the first samples are those of paths.

        Raises:
            ValueError: without a teacher.

        """
        if self.teacher is None:
            raise ValueError("loss=cmt without a teacher, expected one, whose paths it learns")
        x, t, r = drawn.x, drawn.t, drawn.r
        count = -(-len(x) // self.path_pairs)
        each = torch.arange(len(x), device=x.device) % count
        given = {name: value[each] for name, value in drawn.conditions.items()}
        path = self.paths(self.teacher, drawn.e[:count], {name: value[:count] for name, value in given.items()})
        later, earlier = (path[(time * self.path_steps).round().long(), each] for time in (t, r))
        target = (later - earlier) / over_elements(t - r, x)
        error = squared_error(like(later, model(later, r, t, **given)), target)
        return error.mean(), {"squared_error": error.detach().mean() / x[0].numel()}

    @torch.no_grad()
    def paths(self, teacher: Teacher, noise: Float[Tensor, "m *s"], given: Conditions) -> Float[Tensor, "n m *s"]:
        """Points of the teacher's paths at times 0, 1/n, ..., 1, by Heun's method."""
        n, points = self.path_steps, [noise]
        time = lambda i: noise.new_full(noise.shape[:1], i / n)  # noqa: E731
        for i in range(n, 0, -1):
            z = points[-1]
            first = teacher.velocity(z, time(i), given)
            second = teacher.velocity(z - first / n, time(i - 1), given)
            points.append(z - (first + second) / (2 * n))
        return torch.stack(points[::-1])
