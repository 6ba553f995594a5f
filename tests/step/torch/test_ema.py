import pytest
import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.step.torch import SINGLE, Averages, Shards


def walk(model: nn.Module, ema: Averages, seed: int, steps: int) -> list[torch.Tensor]:
    """The weights after each of some random steps, which the averages follow."""
    generator, weights = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
        ema.update(step)
        weights.append(next(model.parameters()).detach().double().clone())
    return weights


@pytest.mark.parametrize("period", [1, 3])
def test_each_average_follows_its_recurrence(period, seed):
    model = nn.Linear(3, 2)
    ema = Averages(model, [0.8, 0.5], period, warmup=False)
    start = model.weight.detach().double().clone()
    weights = walk(model, ema, seed, 20)
    for decay, average in ema.models.items():
        expected = start
        for weight in weights[period - 1 :: period]:
            expected = decay**period * expected + (1 - decay**period) * weight
        torch.testing.assert_close(average.weight.detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert ema.model is ema.models[0.8]


def test_warming_up_lets_the_initial_weights_fade(seed):
    model = nn.Linear(3, 2)
    ema = Averages(model, [0.9])
    expected = model.weight.detach().double().clone()
    for step, weight in enumerate(walk(model, ema, seed, 30)):
        kept = min(0.9, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * weight
    torch.testing.assert_close(ema.model.weight.detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_period_changes_the_cost_and_not_the_pace():
    """Weights that jump once: both averages are as far from them after as many steps."""
    gaps = []
    for period in (1, 4):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        ema = Averages(model, [0.95], period, warmup=False)
        nn.init.ones_(model.weight)
        for step in range(1, 41):
            ema.update(step)
        gaps.append(1 - ema.model.weight.item())
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-4)
    assert gaps[0] == pytest.approx(0.95**40, rel=1e-4)


def test_a_decay_or_a_period_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"decays are \[1.0, -0.1\], expected shares in \[0, 1\)"):
        Averages(nn.Linear(1, 1), [1.0, 0.5, -0.1])
    with pytest.raises(ValueError, match="period is 0, expected a number of steps"):
        Averages(nn.Linear(1, 1), [0.5], 0)


def test_the_average_is_its_own_copy_without_gradients():
    model = nn.BatchNorm1d(2)
    ema = Averages(model, [0.5])
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    model(torch.randn(8, 2) + 5)
    assert ema.model.running_mean is not None
    assert ema.model.running_mean.abs().max() == 0
    ema.update(1)
    torch.testing.assert_close(ema.model.running_mean, model.running_mean, rtol=0, atol=0)


@pytest.mark.parametrize("moved", [lambda model: model.double(), lambda model: model.append(nn.Linear(1, 1))])
@pytest.mark.parametrize("before", [0, 2])
def test_weights_that_are_no_longer_the_networks_are_refused(moved, before):
    model = nn.Sequential(nn.Linear(2, 2))
    averages = Averages(model, [0.9])
    for step in range(1, 1 + before):
        averages.update(step)
    moved(model)
    with pytest.raises(ConfigError, match=r"make Averages\(model, ...\) after model.to"):
        averages.update(1 + before)
    Averages(model, [0.9]).update(1)


def test_a_buffer_that_is_put_in_anothers_place_is_followed():
    model = nn.BatchNorm1d(2)
    ema = Averages(model, [0.5])
    model.running_mean = torch.ones(2)
    ema.update(1)
    assert ema.model.running_mean is not None
    assert ema.model.running_mean.tolist() == [1, 1]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_averages_of_16_bit_weights_move_at_every_decay(half, seed):
    """Kept in bf16 an average of 0.9999 would stay where it began: its spacing is 80 times what a step moves."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(half)
    ema = Averages(model, [0.9999, 0.99], warmup=False)
    start = next(model.parameters()).detach().double().clone()
    weights = walk(model, ema, seed, 30)
    for decay in (0.9999, 0.99):
        average, expected = ema.models[decay], start
        for weight in weights:
            expected = decay * expected + (1 - decay) * weight
        assert {x.dtype for x in average.state_dict().values()} == {torch.float32, torch.int64}
        torch.testing.assert_close(average.state_dict()["0.weight"].double(), expected, rtol=0, atol=1e-6)
    assert ema.model(torch.randn(5, 3)).dtype == torch.float32


def test_an_average_that_was_kept_in_16_bits_is_loaded_and_goes_on_in_fp32():
    model = nn.Linear(3, 2).bfloat16()
    ema, old = Averages(model, [0.9999], warmup=False), {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    ema.load(0.9999, old)
    torch.testing.assert_close(ema.model.weight, old["weight"].float(), rtol=0, atol=0)
    ema.update(1)
    expected = torch.lerp(old["weight"].double(), model.weight.detach().double(), 1e-4)
    torch.testing.assert_close(ema.model.weight.double(), expected, rtol=0, atol=1e-7)


def test_only_what_is_in_16_bits_is_widened():
    """A network's fp32 norms and fp64 layers stay as they are, and weights that two layers share are shared."""
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.LayerNorm(3), nn.Linear(3, 3).double())
    model.append(nn.Linear(3, 3).bfloat16())
    model[3].weight = model[0].weight
    average = Averages(model, [0.9]).model
    kinds = [layer.weight.dtype for layer in average]
    assert kinds == [torch.float32, torch.float32, torch.float64, torch.float32]
    assert average[3].weight is average[0].weight
    assert model[0].weight.dtype == torch.bfloat16


def test_averages_of_16_bit_weights_are_shared_out_in_fp32():
    model = nn.Linear(3, 2).bfloat16()
    ema = Averages(model, [0.9999], warmup=False)
    Shards(model, torch.optim.AdamW(model.parameters()), SINGLE, ema)
    kept = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    ema.load(0.9999, kept)
    with ema.whole(0.9999) as average:
        torch.testing.assert_close(dict(average.state_dict()), kept, rtol=0, atol=0)
    ema.update(1)
    with ema.whole(0.9999) as average:
        expected = torch.lerp(kept["weight"].double(), model.weight.detach().double(), 1e-4)
        torch.testing.assert_close(average.weight.double(), expected, rtol=0, atol=1e-7)
