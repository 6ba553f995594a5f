"""Laws of the two times (t, r) of a MeanFlow sample, 0 <= r <= t <= 1, where t = 1 is noise.

Sources: the MeanFlow paper (arXiv:2505.13447, section 4.3) draws both times from one law and orders them ("v0");
the authors' later CIFAR-10 recipe gives t and r a law each ("v1").
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.config.objectives import TIME_LAWS
from fullstride.meanflow.config.schema import LossConfig
from fullstride.settings.fields import Conflict
from fullstride.settings.overrides import load_object

Device = torch.device | str
Times = tuple[Float[Tensor, " b"], Float[Tensor, " b"]]


@runtime_checkable
class TimeLaw(Protocol):
    """Draws `batch` pairs (t, r) with r <= t."""

    def __call__(self, batch: int, *, generator: torch.Generator | None = None, device: Device = "cpu") -> Times: ...


def logit_normal(
    batch: int, mean: float, std: float, *, generator: torch.Generator | None = None, device: Device = "cpu"
) -> Float[Tensor, " b"]:
    """sigmoid(mean + std n) with n standard normal: the density of `scipy.stats.norm` in logit(t)."""
    return torch.sigmoid(torch.randn(batch, generator=generator, device=device) * std + mean)


@dataclass(frozen=True)
class LogitNormalV0:
    """Two draws of one logit-normal law; t is the larger, r the smaller."""

    mean: float = -0.4
    std: float = 1.0

    def __call__(self, batch: int, *, generator: torch.Generator | None = None, device: Device = "cpu") -> Times:
        """Draw `batch` pairs."""
        a = logit_normal(batch, self.mean, self.std, generator=generator, device=device)
        b = logit_normal(batch, self.mean, self.std, generator=generator, device=device)
        return torch.maximum(a, b), torch.minimum(a, b)


@dataclass(frozen=True)
class LogitNormalV1:
    """A logit-normal law each for t and r; r is capped by t, so that t keeps its law exactly."""

    mean: float = -0.6
    std: float = 1.6
    r_mean: float = -4.0
    r_std: float = 1.6

    def __call__(self, batch: int, *, generator: torch.Generator | None = None, device: Device = "cpu") -> Times:
        """Draw `batch` pairs."""
        t = logit_normal(batch, self.mean, self.std, generator=generator, device=device)
        r = logit_normal(batch, self.r_mean, self.r_std, generator=generator, device=device)
        return t, torch.minimum(r, t)


@dataclass(frozen=True)
class Uniform:
    """Two uniform draws; t is the larger (density 2t), r the smaller (density 2 - 2r)."""

    def __call__(self, batch: int, *, generator: torch.Generator | None = None, device: Device = "cpu") -> Times:
        """Draw `batch` pairs."""
        a, b = torch.rand(2, batch, generator=generator, device=device)
        return torch.maximum(a, b), torch.minimum(a, b)


@dataclass(frozen=True)
class BatchTime:
    """One pair (t, r) of `law` shared by the whole batch, as the deterministic overfitting runs use it."""

    law: TimeLaw

    def __call__(self, batch: int, *, generator: torch.Generator | None = None, device: Device = "cpu") -> Times:
        """Draw one pair and repeat it `batch` times."""
        t, r = self.law(1, generator=generator, device=device)
        return t.repeat(batch), r.repeat(batch)


def meanflow_count(ratio: float, batch: int) -> int:
    """Number of samples with r != t in a batch: round(ratio * batch), halves up.

    Fixed per batch, so that the JVP's part is a static slice: no host synchronisation, one captured graph.

    Raises:
        ValueError: if `ratio` is outside [0, 1].

    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"meanflow_ratio is {ratio}, expected a share in [0, 1]; 0.25 is ImageNet's, 0.75 CIFAR-10's")
    return int(ratio * batch + 0.5)


# Settings by the parameter of a law that they are.
_SETTINGS = {
    "mean": "logit_normal_mean",
    "std": "logit_normal_std",
    "r_mean": "r_logit_normal_mean",
    "r_std": "r_logit_normal_std",
}


def _reads(law: str, parameter: str) -> bool:
    return parameter in inspect.signature(load_object(TIME_LAWS[law], "loss.time_law")).parameters


def times_of(config: LossConfig) -> TimeLaw:
    """The law of (t, r) of a configuration."""
    settings = {p: getattr(config, key) for p, key in _SETTINGS.items() if _reads(config.time_law, p)}
    law = load_object(TIME_LAWS[config.time_law], "loss.time_law")(**settings)
    return BatchTime(law) if config.use_batch_time else law


def conflicts_of(config: LossConfig) -> Iterator[Conflict]:
    """Conflicts with settings of the times that the chosen law does not read."""
    for parameter, key in _SETTINGS.items():
        if getattr(config, key) != getattr(LossConfig, key) and not _reads(config.time_law, parameter):
            laws = " or ".join(name for name in TIME_LAWS if _reads(name, parameter))
            remedy = f"loss.time_law={laws}, since the other laws have no {key}; or leave it out"
            yield Conflict(f"loss.{key} loss.time_law", lambda _: True, remedy)
