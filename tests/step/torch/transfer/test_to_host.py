import torch

from fullstride.step.torch import HostCopy, to_host


def test_tensors_come_in_their_order(seed):
    torch.manual_seed(seed)
    given = [torch.randn(n, 3) for n in (4, 1, 7)]
    assert all(torch.equal(a, b) for a, b in zip(to_host(iter(given)), given, strict=True))
    assert not list(to_host([]))


def test_the_next_one_is_made_before_this_one_is_handed_over():
    made = []

    def making():
        for i in range(4):
            made.append(i)
            yield torch.tensor([i])

    counts = [(x.item(), len(made)) for x in to_host(making())]
    assert counts == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_a_copy_is_of_the_tensor_as_it_was_sent():
    x = torch.arange(4)
    sent = HostCopy(x)
    x.zero_()
    assert sent.arrived().tolist() == [0, 1, 2, 3]
    sent.arrived().fill_(7)
    assert not x.any()
