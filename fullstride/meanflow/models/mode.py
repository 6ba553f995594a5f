"""Training and evaluation mode of a network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluating(model: Callable[..., Tensor]) -> Iterator[None]:
    """Eval mode for the model and everything in it; afterwards each module's own mode again, error or not."""
    modes = {m: m.training for m in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
