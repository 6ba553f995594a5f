import torch

from fullstride.recording import dense


def test_a_view_with_gaps_is_copied_and_nothing_else():
    whole = torch.randn(4, 6)
    batch = {"gaps": whole[:, ::2], "same": whole[:1].expand(3, 6), "turned": whole.T, "whole": whole, "n": 3}
    found = dense(batch)
    for name in ("gaps", "same"):
        assert torch.equal(found[name], batch[name])
        assert found[name].is_contiguous()
    for name in ("turned", "whole", "n"):
        assert found[name] is batch[name]
