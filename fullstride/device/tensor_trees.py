"""Trees of tensors, opened and cut: pytree's, and also dataclasses and `UserDict`s, such as tokenizers return."""

import copy
import dataclasses
import itertools
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree


def _parts(x: Any) -> dict[Any, Any] | None:
    """Contents by name of a container that pytree takes for a leaf; None for a leaf."""
    if isinstance(x, UserDict):
        return x.data
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}
    return None


def flattened(tree: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of a tree, and its structure, which can be compared."""
    leaves, structure = [], []
    given, spec = pytree.tree_flatten(tree)
    structure.append(spec)
    for leaf in given:
        if (parts := _parts(leaf)) is None:
            leaves.append(leaf)
            continue
        more, inner = flattened(list(parts.values()))
        leaves += more
        structure += [len(leaves), type(leaf), list(parts), inner]
    return leaves, structure


def mapped(change: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A tree of the same structure with each leaf changed."""

    def each(leaf: Any) -> Any:
        if (parts := _parts(leaf)) is None or (is_leaf is not None and is_leaf(leaf)):
            return change(leaf)
        made = copy.copy(leaf)
        for name, part in parts.items():
            if isinstance(made, UserDict):
                made.data[name] = mapped(change, part, is_leaf)
            else:
                object.__setattr__(made, name, mapped(change, part, is_leaf))
        return made

    return pytree.tree_map(each, tree, is_leaf=is_leaf)


def in_memory(x: Any) -> Any:
    """Return a leaf, or a copy of a tensor that PyTorch negates or conjugates when read, or of zeros without memory.

    Kernels and Inductor's code read memory as it is (pytorch#145093).
    """
    return x.clone() if isinstance(x, Tensor) and (x.is_neg() or x.is_conj() or x._is_zerotensor()) else x


def batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its tensors and arrays, apart from scalars.

    Raises:
        ValueError: if they disagree, or there is none, or no sample.

    """
    leading = {tuple(x.shape[:1]) for x in flattened(batch)[0] if _dimensions(x)}
    if len(leading) != 1 or not (sizes := next(iter(leading))) or not sizes[0]:
        found = sorted(leading) or "none"
        raise ValueError(f"the batch's tensors have first dimensions {found}, expected one size for all, 1 or more")
    return sizes[0]


def micro_batches(batch: Any, count: int) -> list[tuple[Any, float]]:
    """The batch cut into at most `count` parts along the first dimension, as equal as can be, with their shares.

    A list or tuple of strings or numbers, one for each sample, is cut too. A batch that is not cut may have any shapes.

    Raises:
        ValueError: for a batch without samples, and for one that is to be cut and has no size.

    """
    if count == 1:
        sized = [x for x in flattened(batch)[0] if _dimensions(x)]
        if sized and all(0 in x.shape for x in sized):
            raise ValueError(
                f"the batch's tensors have shapes {[tuple(x.shape) for x in sized]}, expected 1 sample or more"
            )
        return [(batch, 1.0)]
    size = batch_size(batch)
    count = min(count, size)
    bounds = [size * i // count for i in range(count + 1)]
    if count == 1:
        return [(batch, 1.0)]
    plain = str, bytes, int, float, complex
    one_each = lambda x: type(x) in (list, tuple) and len(x) == size and all(isinstance(y, plain) for y in x)  # noqa: E731
    cut = lambda a, b: mapped(lambda x: x[a:b] if _dimensions(x) or one_each(x) else x, batch, one_each)  # noqa: E731
    return [(cut(a, b), (b - a) / size) for a, b in itertools.pairwise(bounds)]


def _dimensions(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0
