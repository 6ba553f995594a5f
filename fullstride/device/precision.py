"""Number formats of a training step: the named format is the one that runs."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fullstride.errors import ConfigError, one_of

if TYPE_CHECKING:
    import torch

# fp32 is IEEE single throughout; tf32 rounds the factors of CUDA's fp32 products to 11 bits; bf16 is autocast.
# Weights, loss and optimizer are fp32 in each.
PRECISIONS = ("fp32", "tf32", "bf16")


def check_precision(name: str, device: "torch.device", key: str = "precision") -> None:
    """Check that the device supports a precision, before anything is computed.

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
    check_precision(name, device)
    if device.type == "cuda":
        _round(name != "fp32")


def _round(allowed: bool) -> None:
    """Switch TF32 for fp32 products and convolutions on or off, so that both of PyTorch's interfaces agree."""
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    cudnn: Any = torch.backends.cudnn
    for place in (cudnn.conv, cudnn.rnn):  # else they follow torch.backends.fp32_precision
        place.fp32_precision = "tf32" if allowed else "ieee"


def rounds_products() -> bool:
    """Return whether CUDA's fp32 products use TF32, set by either of PyTorch's two interfaces.

    `torch.get_float32_matmul_precision()` raises once the other interface was used.
    """
    import torch

    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def rounds_convolutions() -> bool:
    """Return whether cuDNN's fp32 convolutions use TF32."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return cudnn.conv.fp32_precision == "tf32"


def rounds_recurrences() -> bool:
    """Return whether cuDNN's fp32 recurrent layers use TF32."""
    import torch

    cudnn: Any = torch.backends.cudnn
    return cudnn.rnn.fp32_precision == "tf32"


def process_precision(precision: str, derivative: str) -> str:
    """Return the setting of fp32 products for a step whose derivative may have a format of its own.

    It applies to the process, not to a region: with bf16 autocast the derivative's format decides it.
    """
    return derivative if derivative in ("fp32", "tf32") else precision


def current_formats(device: "torch.device") -> tuple[object, ...]:
    """Return a key of the formats that a device's products use now, by the process's settings and autocast."""
    import torch

    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return rounds_products(), rounds_convolutions(), cast


def autocast(name: str, device: "torch.device") -> contextlib.AbstractContextManager:
    """The context of a forward pass in that precision.

    Autocast keeps no cast weights: one that is cast inside a JVP belongs to its level and must not outlive it.
    """
    import torch

    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if name in formats:
        return torch.autocast(device.type, formats[name], cache_enabled=False)
    return contextlib.nullcontext()


def uncached(device: "torch.device") -> contextlib.AbstractContextManager:
    """Disable the surrounding autocast's cache of cast weights, which a captured graph would outlive."""
    import torch

    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)


def exact_fp32(device: "torch.device") -> contextlib.AbstractContextManager[None]:
    """Use exact fp32 on a device inside the context, and the process's own setting again afterwards.

    For metrics and sampling: rounded factors would change the metric, and the images with the batch size.
    """
    return matmul_precision("fp32", device)


@contextlib.contextmanager
def matmul_precision(name: str, device: "torch.device") -> Iterator[None]:
    """Use a precision inside the context, and the process's own setting again afterwards.

    Raises:
        ConfigError: for an unknown name, or tf32 without CUDA.

    """
    import torch

    before = _Settings()
    try:
        # Also on a CPU, which might round by default.
        _round(False)
        set_precision(name, device)
        with autocast(name, device) if name == "bf16" else torch.autocast(device.type, enabled=False):
            yield
    finally:
        before.restore()


class _Settings:
    """Saved fp32 settings of both of PyTorch's interfaces, to be restored: the older one's setters write both."""

    def __init__(self) -> None:
        import torch

        backends: Any = torch.backends
        self._places = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
        self._newer = [place.fp32_precision for place in self._places]
        try:
            self._older = torch.get_float32_matmul_precision()
        except RuntimeError:  # the newer interface allows TF32 and the older one was left at its default
            self._older = "highest"
        try:
            self._convolutions = torch.backends.cudnn.allow_tf32
        except RuntimeError:  # convolutions and recurrent layers have different settings
            self._convolutions = None

    def restore(self) -> None:
        import torch

        torch.set_float32_matmul_precision(self._older)
        if self._convolutions is not None:
            torch.backends.cudnn.allow_tf32 = self._convolutions
        for place, value in zip(self._places, self._newer, strict=True):
            if place.fp32_precision != value:
                place.fp32_precision = value


@contextlib.contextmanager
def unsearched_convolutions() -> Iterator[None]:
    """Let cuDNN choose algorithms without a search: the same each time, and deterministic ones.

    For work that runs once, so that a search takes longer than it saves, and for results that must be reproducible.
    """
    import torch

    backend = torch.backends.cudnn
    before = backend.benchmark, backend.deterministic
    backend.benchmark, backend.deterministic = False, True
    try:
        yield
    finally:
        backend.benchmark, backend.deterministic = before
