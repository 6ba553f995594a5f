"""From raw records to what the network is trained on: decoded, mirrored, augmented, on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fullstride.meanflow.data.dataset import Decode
from fullstride.meanflow.data.edm_augment import EdmAugment
from fullstride.meanflow.data.flip import random_hflip


@dataclass(frozen=True)
class Inputs:
    """Callable on raw records and a generator, from which all randomness comes.

    Attributes:
        decode: the data set's.
        hflip: mirror each picture with probability 1/2.
        augment: EDM's augmentations, or None.

    """

    decode: Decode
    hflip: bool = False
    augment: EdmAugment | None = None

    def __call__(self, raw: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Inputs in fp32, and the augmentation labels for the network if there are any."""
        x = self.decode(raw, generator)
        if self.hflip:
            x = random_hflip(x, generator)
        return (x, None) if self.augment is None else self.augment(x, generator)
