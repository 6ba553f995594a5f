"""Noise and labels of generated images, each image's own: a function of (seed, index) and of nothing else.

So the same seed gives the same images for any batch size, any count and any device.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.device.select import cores_each

NOISE, LABELS = 0, 1
# Numbers that a thread draws in about a millisecond, beside which starting it is nothing.
SHARE = 2**17


class _Streams:
    """Philox keyed by the seed, at a counter of its own for each (kind, index).

    The streams are disjoint by construction. A torch.Generator for each image would not be: on the CPU it keeps 32
    bits of its seed, so that among 50,000 images a pair with the same noise turns up in one run of four.
    """

    def __init__(self, kind: int, seed: int):
        self._bits = np.random.Philox(key=seed, counter=kind << 192)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, index: int) -> np.random.Generator:
        """One generator for all, set to the beginning of a stream: to make one takes as long as to draw an image."""
        self._start["state"]["counter"][2] = index
        self._bits.state = self._start
        return self._generator


def _check(seed: int, start: int, count: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}, expected an integer in [0, 2**64)")
    if start < 0 or count < 0:
        raise ValueError(f"start is {start} and count {count}, expected neither to be negative")


def seeded_noise(
    seed: int,
    start: int,
    count: int,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> Float[Tensor, "n *s"]:
    """Standard normal noise of the images start, ..., start + count - 1, in fp32.

    Drawn on the CPU, so that every device sees the same bits, by as many of its cores as there is work for.

    Args:
        seed: seed of the whole set of images.
        start: index of the first image.
        count: number of images.
        shape: of one image, (c, h, w).
        device: the device of the noise.
        pinned: draw into pinned memory, from which it goes to a CUDA device without a detour.

    Raises:
        ValueError: for a seed outside [0, 2**64), or a negative start or count.

    """
    _check(seed, start, count)
    noise = torch.empty((count, *shape), dtype=torch.float32, device="cpu", pin_memory=pinned)
    images = noise.numpy()
    threads = max(1, min(cores_each(), count, noise.numel() // SHARE))
    first = [count * k // threads for k in range(threads + 1)]

    def part(k: int) -> None:
        streams = _Streams(NOISE, seed)
        for i in range(first[k], first[k + 1]):
            streams.at(start + i).standard_normal(dtype=np.float32, out=images[i : i + 1])

    if threads == 1:
        part(0)
    else:  # each image has a stream of its own, and numpy draws without Python's lock
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))  # which raises what a thread did
    return noise.to(device)


def seeded_labels(seed: int, start: int, count: int, num_classes: int) -> Int[Tensor, " n"]:
    """Balanced labels of the images start, ..., start + count - 1, on the CPU.

    The images k C, ..., k C + C - 1 share out the C classes in a random order that depends on (seed, k) alone.

    Raises:
        ValueError: for a seed outside [0, 2**64), a negative start or count, or fewer than one class.

    """
    _check(seed, start, count)
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}, expected at least 1; without classes use no labels")
    first, last = start // num_classes, (start + count - 1) // num_classes
    streams = _Streams(LABELS, seed)
    rounds = [streams.at(k).permutation(num_classes) for k in range(first, last + 1)]
    labels = np.concatenate([np.empty(0, dtype=np.int64), *rounds])
    return torch.from_numpy(labels[start - first * num_classes :][:count])
