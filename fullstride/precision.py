"""Number formats of a training step: what is named is what runs."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fullstride.errors import ConfigError, one_of

if TYPE_CHECKING:
    import torch

# fp32 is IEEE single throughout; tf32 rounds the factors of CUDA's fp32 products to 11 bits; bf16 is autocast.
# Weights, loss and optimizer are fp32 in each.
PRECISIONS = ("fp32", "tf32", "bf16")


def check_precision(name: str, device: "torch.device", key: str = "precision") -> None:
    """Check that products can be taken so, before anything is.

    Raises:
        ConfigError: for an unknown name, or tf32 without CUDA, naming the setting `key`.

    """
    one_of(key, name, PRECISIONS)
    if name == "tf32" and device.type != "cuda":
        raise ConfigError(f"{key}=tf32: TF32 is CUDA's, the device is {device.type}; use fp32 or bf16")


def set_precision(name: str, device: "torch.device") -> None:
    """Set the process's treatment of fp32 products and convolutions to that of `name`.

    PyTorch's own default on CUDA is neither: products in fp32, convolutions in TF32.

    Raises:
        ConfigError: for an unknown name, or tf32 without CUDA.

    """
    import torch

    check_precision(name, device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = name != "fp32"


def of_process(precision: str, derivative: str) -> str:
    """The treatment of fp32 products that a step needs whose derivative may have a format of its own.

    It is the process's, not a region's: beside bf16 autocast it is the derivative's that counts.
    """
    return derivative if derivative in ("fp32", "tf32") else precision


def formats(device: "torch.device") -> tuple[object, ...]:
    """What the process's settings and autocast take the products of a device in now: equal where that is the same."""
    import torch

    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, cast


def autocast(name: str, device: "torch.device") -> contextlib.AbstractContextManager:
    """The context of a forward pass in that precision.

    Autocast keeps no cast weights: one that is cast inside a JVP belongs to its level and must not outlive it.
    """
    import torch

    if name == "bf16":
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return contextlib.nullcontext()


def uncached(device: "torch.device") -> contextlib.AbstractContextManager:
    """The autocast around it, if there is one, without its cache of cast weights, which a record would outlive."""
    import torch

    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def ieee(device: "torch.device") -> contextlib.AbstractContextManager[None]:
    """Plain fp32 on a device, whatever the process trains in, and the process's own treatment again afterwards.

    For what is measured or drawn: rounded factors would make another measure, and other images for another batch size.
    """
    return treated("fp32", device)


@contextlib.contextmanager
def treated(name: str, device: "torch.device") -> Iterator[None]:
    """A precision, whatever the process trains in, and the process's own treatment again afterwards.

    Raises:
        ConfigError: for an unknown name, or tf32 without CUDA.

    """
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        # On a CPU, too, what it would round by default.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        set_precision(name, device)
        with autocast(name, device) if name == "bf16" else torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextlib.contextmanager
def unsearched_convolutions() -> Iterator[None]:
    """Let cuDNN take the algorithms that it knows of, the same each time and of those that add in one order.

    For what runs once, where a search takes longer than it saves, and for what must come out the same again.
    """
    import torch

    backend = torch.backends.cudnn
    before = backend.benchmark, backend.deterministic
    backend.benchmark, backend.deterministic = False, True
    try:
        yield
    finally:
        backend.benchmark, backend.deterministic = before
