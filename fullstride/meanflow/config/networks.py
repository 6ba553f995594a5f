"""The networks by name: the keys of each family, and its presets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

from fullstride.settings.fields import LATER, AllowedNames, BelowOne, Conflict, Count, Counts, Natural, Positive, Rule

Channels = Annotated[int, Rule("an even number, at least 2", lambda x: x >= 2 and x % 2 == 0)]
Sizes = Annotated[list[int], Rule("numbers of at least 1", lambda xs: all(x >= 1 for x in xs))]


@dataclass
class ModelConfig:
    """Keys of every network; each family adds its own.

    Attributes:
        network: import path of the class, which is made as `Network(channels, image_size, num_classes=0, **keys)`.
        augmented: whether it takes `augment_dim` and EDM's augmentation labels.
        conditioned: whether it takes `condition_shape` and conditions.
        convolutional: whether channels_last changes the memory order of its weights.
        any_shape: whether it takes samples that are no square pictures, made with the sizes after the channels.
        image_shape: (channels, height, width) of the inputs of its published runs and its benchmarks.

    """

    network: ClassVar[str] = ""
    augmented: ClassVar[bool] = False
    conditioned: ClassVar[bool] = False
    convolutional: ClassVar[bool] = True
    any_shape: ClassVar[bool] = False
    image_shape: ClassVar[tuple[int, ...]] = (3, 32, 32)

    name: str = ""
    class_conditional: bool = False  # the network sees labels; sampling can choose a class
    # output of the network: the velocity, or an image from which it follows
    prediction: Annotated[str, AllowedNames(("velocity", "x")), LATER] = "velocity"
    recompute: bool = False  # the blocks' activations anew in the backward pass: less memory, a forward pass more


@dataclass
class UNetConfig(ModelConfig):
    """`model=unet`: the 52M U-Net; `model=unet_tiny`: a preset for the CPU."""

    network: ClassVar[str] = "fullstride.meanflow.models.unet:UNet"

    name: str = "unet"
    channels: Channels = 128  # width of the first level
    channel_mult: Counts = field(default_factory=lambda: [1, 2, 3])  # width of each level in units of channels
    num_blocks: Count = 3  # residual blocks a level on the way down
    attention_resolutions: Sizes = field(default_factory=lambda: [16])  # feature map sizes with attention
    dropout: BelowOne = 0.0  # in the residual blocks
    # radians a unit of time
    time_max_frequency: Annotated[float, Rule("a finite number, at least 1", lambda x: 1 <= x < math.inf)] = 64.0


@dataclass
class SongUNetConfig(ModelConfig):
    """`model=song_unet`: the CIFAR-10 MeanFlow network, 55.9M weights."""

    network: ClassVar[str] = "fullstride.meanflow.models.song_unet:SongUNet"
    augmented: ClassVar[bool] = True

    name: str = "song_unet"
    channels: Channels = 128  # width of the first level
    channel_mult: Counts = field(default_factory=lambda: [2, 2, 2])  # width of each level in units of channels
    num_blocks: Count = 4  # residual blocks a level on the way down
    attention_resolutions: Sizes = field(default_factory=lambda: [16])  # feature map sizes with attention
    dropout: BelowOne = 0.2  # in the residual blocks


@dataclass
class DiTConfig(ModelConfig):
    """`model=dit_b4`, ..., `model=dit_xl2`: diffusion transformers."""

    network: ClassVar[str] = "fullstride.meanflow.models.dit:DiT"
    convolutional: ClassVar[bool] = False
    image_shape: ClassVar[tuple[int, ...]] = (4, 32, 32)

    name: str = "dit_b2"
    patch_size: Count = 2  # side of the squares that become tokens
    width: Count = 768  # features of a token
    depth: Count = 12  # blocks
    heads: Count = 12  # of attention
    qk_norm: bool = False  # normalize queries and keys
    decoupled_blocks: Annotated[Natural, LATER] = 0  # last blocks that see r, the others t; 0: each sees t and t - r
    # what times are multiplied by before they are embedded; 1000 for weights of DiT
    time_scale: Annotated[Positive, LATER] = 1.0


@dataclass
class TokenDiTConfig(ModelConfig):
    """`model=token_dit`: a transformer for samples of any rank, 7.6M weights."""

    network: ClassVar[str] = "fullstride.meanflow.models.token_dit:TokenDiT"
    conditioned: ClassVar[bool] = True
    convolutional: ClassVar[bool] = False
    any_shape: ClassVar[bool] = True

    name: str = "token_dit"
    patch_sizes: Counts = field(default_factory=lambda: [1])  # length of a patch along each axis, or one for all
    width: Count = 256  # features of a token
    depth: Count = 6  # blocks
    heads: Count = 4  # of attention
    qk_norm: bool = False  # normalize queries and keys


@dataclass
class MiTConfig(ModelConfig):
    """`model=mit_b2`, ..., `model=mit_xl2`: the transformers of improved MeanFlow, for loss=imf_whole."""

    network: ClassVar[str] = "fullstride.meanflow.models.mit:MiT"
    convolutional: ClassVar[bool] = False
    image_shape: ClassVar[tuple[int, int, int]] = (4, 32, 32)

    name: str = "mit_b2"
    patch_size: Count = 2  # side of the squares that become tokens
    width: Count = 768  # features of a token
    depth: Count = 12  # blocks that u goes through
    heads: Count = 12  # of attention
    head_blocks: Count = 8  # the last of the blocks, which v has of its own


def _mit(name: str, width: int, depth: int, heads: int, head_blocks: int = 8) -> Callable[..., ModelConfig]:
    return partial(MiTConfig, name=name, width=width, depth=depth, heads=heads, head_blocks=head_blocks)


def _dit(name: str, patch_size: int, width: int, depth: int, heads: int) -> Callable[..., ModelConfig]:
    return partial(DiTConfig, name=name, patch_size=patch_size, width=width, depth=depth, heads=heads)


# Sizes of the DiT family: arXiv:2212.09748, table 1; M: arXiv:2505.13447, appendix A.
MODELS: dict[str, Callable[..., ModelConfig]] = {
    "unet": UNetConfig,
    "unet_tiny": partial(
        UNetConfig, name="unet_tiny", channels=24, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[]
    ),
    "unet_medium": partial(
        UNetConfig, name="unet_medium", channels=96, channel_mult=[1, 2, 2], num_blocks=2, attention_resolutions=[16]
    ),
    "song_unet": SongUNetConfig,
    "song_unet_tiny": partial(
        SongUNetConfig, name="song_unet_tiny", channels=24, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[]
    ),
    "dit_b4": _dit("dit_b4", 4, 768, 12, 12),
    "dit_b2": _dit("dit_b2", 2, 768, 12, 12),
    "dit_m2": _dit("dit_m2", 2, 1024, 16, 16),
    "dit_l2": _dit("dit_l2", 2, 1024, 24, 16),
    "dit_xl2": _dit("dit_xl2", 2, 1152, 28, 16),
    "dit_tiny": _dit("dit_tiny", 2, 96, 4, 3),
    # Sizes of Lyy-iiis/imeanflow, the code of arXiv:2512.02012.
    "mit_b2": _mit("mit_b2", 768, 12, 12),
    "mit_m2": _mit("mit_m2", 768, 24, 12),
    "mit_l2": _mit("mit_l2", 1024, 32, 16),
    "mit_xl2": _mit("mit_xl2", 1024, 48, 16),
    "mit_tiny": _mit("mit_tiny", 96, 4, 3, 2),
    "token_dit": TokenDiTConfig,
}
AUGMENTED = [name for name, make in MODELS.items() if make().augmented]
CONFLICTS = (
    Conflict(
        "model loss",
        lambda c: hasattr(c.model, "head_blocks") and c.loss.name != "imf_whole" and ":" not in c.loss.name,
        "loss=imf_whole, which trains the network's head for v",
    ),
    Conflict(
        "channels_last model",
        lambda c: c.channels_last and not c.model.convolutional,
        "a network of convolutions, or channels_last=false",
    ),
    Conflict(
        "data.augment",
        lambda c: c.data.augment > 0 and not c.model.augmented,
        f"model={' or '.join(AUGMENTED)}, the networks that take augmentation labels",
    ),
)
