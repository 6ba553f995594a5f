"""The loader on a GPU: its batches are right, and the host never waits for the device."""

import pytest
import torch

from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.latents import DrawLatents
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.order import epoch_order
from fullstride.meanflow.training.step import random_hflip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


class Stored:
    """A store of the rows of a tensor."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.parametrize("workers", [None, 0, 1, 3])
def test_batches_are_those_asked_for_while_the_device_is_busy(seed, workers):
    """Each batch is summed behind much other work, so that memory given back too early would show."""
    torch.manual_seed(seed)
    raw, labels = torch.randint(0, 256, (600, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 9, (600,))
    split = Split(raw if workers is None else Stored(raw), labels)
    orders = [epoch_order(600, steps=18, micro_batches=2, batch_size=16, seed=seed, epoch=e) for e in range(3)]
    busy, got = torch.randn(4096, 4096, device=CUDA), []
    torch.cuda.synchronize()
    with Loader(split, CUDA, workers or 0) as loader:
        for x, y in loader.batches(orders, start=5):
            torch.mm(busy, busy)
            got.append((x.long() * (1 + y)[..., None, None, None]).sum((2, 3, 4)))
    chosen = torch.cat(orders)[5:]
    expected = raw[chosen].long().sum((3, 4, 5)) * (1 + labels[chosen])
    assert torch.equal(torch.stack(got).cpu(), expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("workers", [None, 2])
def test_the_host_does_not_wait_for_the_device(workers):
    raw = torch.randn(96, 4, 8, 8)
    split = Split(raw if workers is None else Stored(raw), torch.arange(96))
    orders = [epoch_order(96, steps=6, micro_batches=2, batch_size=8, seed=0, epoch=e) for e in range(2)]
    generator, decode = torch.Generator(CUDA).manual_seed(0), DrawLatents()
    with Loader(split, CUDA, workers or 0) as loader:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x, _ in loader.batches(orders):
                random_hflip(decode(x[1], generator), generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
