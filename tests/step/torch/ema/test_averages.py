import pytest
import torch

from fullstride.step.torch.ema.lerp_kernel import BLOCK, LerpTable


def draw(seed: int, *lead: int) -> list[torch.Tensor]:
    """Tensors of several sizes, one of more than a block, one in channels_last."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(3,), (1,), (BLOCK + 7,), (4, 3, 5, 5)]
    found = [torch.randn(*lead, *shape, generator=g) for shape in shapes]
    found[3] = found[3].contiguous(memory_format=torch.channels_last)
    return found


def test_all_averages_go_their_own_share_of_the_way(seed):
    weights, averages = draw(seed), [draw(seed + 100 * n) for n in (1, 2, 3)]
    moved = torch.tensor([0.25, 1e-4, 1.0], dtype=torch.float64)
    expected = [
        [torch.lerp(a.double(), w.double(), m) for a, w in zip(own, weights, strict=True)]
        for own, m in zip(averages, moved, strict=True)
    ]
    before = [w.clone() for w in weights]
    LerpTable(weights, averages)(moved)
    for own, wanted in zip(averages, expected, strict=True):
        # Two roundings of numbers up to 4.
        torch.testing.assert_close([a.double() for a in own], wanted, rtol=0, atol=5e-7)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float64])
def test_averages_are_computed_in_their_own_format(kept, seed):
    """Those of 16-bit weights in fp32: a ten-thousandth of the way is less than bf16 tells apart."""
    averaged, atol = (torch.float64, 1e-15) if kept == torch.float64 else (torch.float32, 5e-7)
    weights = [w.to(kept) for w in draw(seed)]
    own = [a.to(averaged) for a in draw(seed + 100)]
    expected = [torch.lerp(a.double(), w.double(), 1e-4) for a, w in zip(own, weights, strict=True)]
    LerpTable(weights, [own])(torch.tensor([1e-4], dtype=torch.float64))
    torch.testing.assert_close([a.double() for a in own], expected, rtol=0, atol=atol)


def test_averages_that_would_round_away_what_moves_them_are_refused():
    weight = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="of 32 bits or more"):
        LerpTable([weight], [[weight.clone()]])


def test_another_memory_order_is_refused():
    weight = torch.ones(2, 3, 4, 4)
    with pytest.raises(ValueError, match="expected the strides of the weight"):
        LerpTable([weight], [[weight.contiguous(memory_format=torch.channels_last)]])
