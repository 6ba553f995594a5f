"""Requirements on the parts of a step together."""

import torch
import torch.distributed as dist

from fullstride.device.precision import PRECISIONS, check_precision
from fullstride.errors import ConfigError, one_of
from fullstride.step.torch.body import Body
from fullstride.step.torch.optimizers import Optimizers, check_skips, members
from fullstride.step.torch.passes import ONE


def check_body(body: Body, backend: str) -> None:
    """Check that the parts of a step fit together, and to its backend.

    Raises:
        ConfigError: for a precision that cannot run here, for a guard whose optimizer would not skip a step, and for
            parts that exclude each other.
        ValueError: for a model without parameters.

    """
    if next(body.model.parameters(), None) is None:
        raise ValueError(f"a {type(body.model).__name__} without parameters, expected a model that can be trained")
    one_of("precision", body.precision, (*PRECISIONS, "fp16"))
    if body.precision != "fp16":
        check_precision(body.precision, body.device)
    name = type(body.optimizer).__name__
    if body.passes != ONE and (given := "guard" if body.guard else "scaler" if body.scaler else ""):
        raise ConfigError(f"{given}: {name} steps by {body.passes}, which cannot be skipped; leave {given} out")
    for each in members(body.optimizer):
        if getattr(each, "scaler", None) is not None:
            raise ConfigError(
                f"{type(each).__name__} scales the loss by a scaler of its own, expected the optimizer that it wraps, "
                "and its scaler as scaler="
            )
    if body.guard is not None:
        check_skips(body.optimizer, "guard")
    if body.shards is not None and isinstance(body.optimizer, Optimizers):
        raise ConfigError("shards: a list of optimizers, expected the one whose state is sharded")
    if body.scaler is not None:
        _check_scaler(body)
    if body.groups:
        _check_wrapped(body, backend)


def _check_wrapped(body: Body, backend: str) -> None:
    name = type(body.model).__name__
    if body.processes.size > 1 or body.shards is not None:
        raise ConfigError(f"processes: {name} averages gradients already, expected a model without a wrapper")
    if "graph" in backend:
        raise ConfigError(
            f"backend={backend}: {name} meets other processes from the host, expected a model without a wrapper and "
            "processes=, or backend=eager or compile"
        )


def _check_scaler(body: Body) -> None:
    if body.guard is not None:
        raise ConfigError("guard and scaler (precision=fp16) both skip steps, expected one of them")
    if body.shards is not None:
        raise ConfigError("shards: each process would skip by its own part, expected no scaler; use precision=bf16")
    own = {id(p) for group in body.optimizer.param_groups for p in group["params"]}
    for name, p in body.model.named_parameters():
        if p.requires_grad and id(p) not in own:
            raise ConfigError(
                f"scaler: {name} is not in the optimizer and its gradient would stay scaled; expected all that are "
                "trained: give a list of optimizers, or requires_grad_(False)"
            )


def unclipped(body: Body) -> str:
    """Return which gradients another optimizer has to clip, if there are any."""
    if body.clip is None or body.shards is not None:
        return ""
    own = {id(p) for group in body.optimizer.param_groups for p in group["params"]}
    others = [name for name, p in body.model.named_parameters() if p.requires_grad and id(p) not in own]
    if not others:
        return ""
    more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
    return f"clip: {others[0]}{more} not in the optimizer: they are neither clipped nor in grad_norm"


def unaveraged(body: Body) -> str:
    """Return a warning if there are several processes, and nothing that is seen here averages their gradients."""
    alone = body.processes.size == 1 and body.shards is None and not body.groups
    count = dist.get_world_size() if alone and dist.is_available() and dist.is_initialized() else 1
    if count == 1:
        return ""
    return (
        f"torch.distributed has {count} processes, but neither processes= nor a wrapper of the "
        f"{type(body.model).__name__} averages their gradients: each trains alone"
    )


def default_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the scaler of a precision whose small gradients would be 0 without one."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
