"""A small checkpoint laid out as Gsunshine/py-meanflow's is, with weights that a formula gives.

Two levels, 6x6 and 3x3 with attention, of 8 and 16 channels; one block a level; two image channels; three augmentation
labels. The names and shapes are those that its network of that size has, in its order.
"""

import zlib

import torch

# Name, channels in, channels out, attention, resampling.
ENCODER = [
    ("6x6_block0", 8, 8, False, False),
    ("3x3_down", 8, 8, False, True),
    ("3x3_block0", 8, 16, True, False),
]
DECODER = [
    ("3x3_in0", 16, 16, True, False),
    ("3x3_in1", 16, 16, False, False),
    ("3x3_block0", 32, 16, False, False),
    ("3x3_block1", 24, 16, True, False),
    ("6x6_up", 16, 16, False, True),
    ("6x6_block0", 24, 8, False, False),
    ("6x6_block1", 16, 8, False, False),
]
Shapes = dict[str, tuple[int, ...]]


def convolution(name: str, channels_in: int, channels: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (channels, channels_in, kernel, kernel), f"{name}.bias": (channels,)}


def linear(name: str, features: int, out: int) -> Shapes:
    return {f"{name}.weight": (out, features), f"{name}.bias": (out,)}


def norm(name: str, channels: int) -> Shapes:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def block(name: str, channels_in: int, channels: int, attend: bool, resample: bool) -> Shapes:
    def filtered(part: str) -> Shapes:
        return {f"{name}.{part}.resample_filter": (1, 1, 4, 4)} if resample else {}

    shapes = norm(f"{name}.norm0", channels_in) | convolution(f"{name}.conv0", channels_in, channels, 3)
    shapes |= filtered("conv0") | linear(f"{name}.affine", 32, channels) | norm(f"{name}.norm1", channels)
    shapes |= convolution(f"{name}.conv1", channels, channels, 3)
    if resample or channels_in != channels:
        shapes |= convolution(f"{name}.skip", channels_in, channels, 1) | filtered("skip")
    if attend:
        shapes |= norm(f"{name}.norm2", channels) | convolution(f"{name}.qkv", channels, 3 * channels, 1)
        shapes |= convolution(f"{name}.proj", channels, channels, 1)
    return shapes


def network() -> Shapes:
    shapes: Shapes = {"map_augment.weight": (32, 3)} | linear("map_layer0", 32, 32) | linear("map_layer1", 32, 32)
    shapes |= convolution("enc.6x6_conv", 2, 8, 3)
    for side, blocks in (("enc", ENCODER), ("dec", DECODER)):
        for name, channels_in, channels, attend, resample in blocks:
            shapes |= block(f"{side}.{name}", channels_in, channels, attend, resample)
    return shapes | norm("dec.6x6_aux_norm", 8) | convolution("dec.6x6_aux_conv", 8, 2, 3)


def formula(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers between -0.4 and 0.4 without pattern, the same on every machine."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return 0.4 * torch.sin(places.square() * 0.731 + zlib.crc32(name.encode()) % 1000).reshape(shape)


def checkpoint() -> dict[str, torch.Tensor]:
    """The entry "model": the trained network, an average, the number of updates."""
    state = {"num_updates": torch.tensor(16)}
    for prefix in ("net", "net_ema1"):
        state |= {f"{prefix}.{name}": formula(f"{prefix}.{name}", shape) for name, shape in network().items()}
    return state
