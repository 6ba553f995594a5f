import torch

from fullstride.step.torch import prefetch


def test_batches_come_in_order_as_they_are(seed):
    torch.manual_seed(seed)
    given = [{"x": torch.randn(n, 3), "n": n} for n in (4, 4, 2)]
    found = list(prefetch(iter(given), torch.device("cpu")))
    assert [b["n"] for b in found] == [4, 4, 2]
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(given, found, strict=True))
    assert not list(prefetch([], torch.device("cpu")))
