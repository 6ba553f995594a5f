"""Modules of FSDP2 inside a dual level."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def _as_views(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Hand tangents on as views, which a dual level expects of inputs that are handed on; torch's own does not."""
    return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


@contextmanager
def sharded() -> Iterator[None]:
    """Let the function that `fully_shard` calls on a module's inputs hand on their tangents."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if fsdp is None:
        yield
        return
    function = fsdp.RegisterPostBackwardFunction
    before = function.__dict__.get("jvp")
    function.jvp = staticmethod(_as_views)
    try:
        yield
    finally:
        if before is None:
            del function.jvp
        else:
            function.jvp = before
