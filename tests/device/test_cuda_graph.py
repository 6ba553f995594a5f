import torch

from fullstride.device.cuda_graph import copy_into, static_input, without_gaps


def test_a_view_with_gaps_is_copied_and_nothing_else():
    whole = torch.randn(4, 6)
    batch = {"gaps": whole[:, ::2], "same": whole[:1].expand(3, 6), "turned": whole.T, "whole": whole, "n": 3}
    found = without_gaps(batch)
    for name in ("gaps", "same"):
        assert torch.equal(found[name], batch[name])
        assert found[name].is_contiguous()
    for name in ("turned", "whole", "n"):
        assert found[name] is batch[name]


def test_a_record_reads_its_place_into_which_batches_are_written():
    whole = torch.randn(4, 6)
    batch = {"a": whole[:, ::2], "b": (whole[0], None), "n": 3}
    place = static_input(batch)
    copy_into(place, {"a": torch.ones(4, 3), "b": (torch.zeros(6), None), "n": 3})
    assert (place["a"] == 1).all()
    assert not place["b"][0].any()
    assert place["b"][1] is None
    assert whole.std() > 0  # the batch itself is none of it
    assert not (whole == 1).any()
