"""Functions whose derivative in PyTorch is wrong or absent, in operations whose derivatives are right."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.state import tangent_grad


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:  # noqa: A002
    """Compute `torch.cholesky_inverse`, whose forward derivative in PyTorch (2.13) is wrong."""
    one = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device).expand_as(input)
    first, second = (input.mH, input) if upper else (input, input.mH)
    half = torch.linalg.solve_triangular(first, one, upper=False)
    return torch.linalg.solve_triangular(second, half, upper=True)


def triangular_solve(
    b: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `torch.triangular_solve`, whose forward derivative in PyTorch (2.13) reads the other triangle, too."""
    half = A.mT if transpose else A
    found = torch.linalg.solve_triangular(half, b, upper=upper != transpose, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((found, A.clone()))


def glu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    """Compute `F.glu`, whose tangent has no gradient in PyTorch."""
    if not tangent_grad():
        return F.glu(input, dim)
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    """Compute `F.hardsigmoid`, whose tangent has no gradient in PyTorch."""
    if not tangent_grad():
        return F.hardsigmoid(input, inplace)
    out = F.relu6(input + 3) / 6
    return input.copy_(out) if inplace else out


def _of_a_copy(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a copy, but its argument's own tangent, which in-place operations on the copy change."""
    return lambda input, *args, **kwargs: func(input.clone(), *args, **kwargs)  # noqa: A006


_VIEWS = ("alias", "expand", "permute", "squeeze", "t", "transpose", "unfold", "unsqueeze", "view")
_SHARED = (torch.frac, Tensor.frac, *(getattr(torch, f"{name}_copy") for name in _VIEWS))
ROUTES: dict[Any, Callable[..., Any]] = {
    torch.cholesky_inverse: cholesky_inverse,
    Tensor.cholesky_inverse: cholesky_inverse,
    F.glu: glu,
    F.hardsigmoid: hardsigmoid,
    **{owner.triangular_solve: triangular_solve for owner in (torch, Tensor) if hasattr(owner, "triangular_solve")},
    **{func: _of_a_copy(func) for func in _SHARED},
}
