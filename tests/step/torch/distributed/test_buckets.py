import torch
from torch import nn

from fullstride.step.torch.distributed import buckets
from fullstride.step.torch.distributed.buckets import ALIGNED, BucketLayout, filled


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_tensors_lie_apart_in_their_own_memory_order():
    image = nn.Parameter(torch.randn(3, 5, 2, 2).to(memory_format=torch.channels_last))
    given = [*parameters((7, 9), (1,), ()), image]
    layout = BucketLayout(given, parts=3)
    flat = torch.full((layout.size,), torch.nan)
    views = layout.views(flat)
    for view, tensor in zip(views, given, strict=True):
        view.copy_(tensor.detach())
        assert view.stride() == tensor.stride()
        assert view.storage_offset() % ALIGNED == 0
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, given, strict=True))
    assert layout.size % (3 * ALIGNED) == 0
    gaps = layout.gaps(flat)
    assert sum(gap.numel() for gap in gaps) + sum(p.numel() for p in given) == layout.size
    assert all(bool(gap.isnan().all()) for gap in gaps)


def test_buckets_are_full_of_one_dtype_and_in_order(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40)
    given = parameters((5,), (6,), (3,), (2,), (1,))
    given[3] = nn.Parameter(given[3].detach().double())
    assert [[len(p) for p in bucket] for bucket in filled(given)] == [[5, 6], [3], [2], [1]]
    assert list(filled([])) == []
