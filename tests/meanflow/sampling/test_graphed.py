"""Recorded networks on the host: a stand-in keeps the function and, as a CUDA graph does, where its result lies."""

import random

import pytest
import torch
from torch import nn

from fullstride.device.precision import matmul_precision
from fullstride.errors import ConfigError
from fullstride.meanflow.sampling.graphed import WARM, GraphedNetwork, run_by
from fullstride.meanflow.sampling.samplers import SAMPLERS, evaluating, sample

CPU = torch.device("cpu")


class Tape:
    """A record whose result is not there before it is replayed."""

    made = replayed = 0

    def __init__(self, function, generator):
        assert generator is None
        Tape.made += 1
        self._function = function
        self._result = torch.full_like(function(), float("nan"))

    def replay(self):
        Tape.replayed += 1
        return self._result.copy_(self._function())


class Network(nn.Module):
    """A small network of everything that it is given."""

    def __init__(self, channels=2):
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.label = nn.Embedding(5, channels)
        self.drop = nn.Dropout(0.5)

    def forward(self, z, r, t, label=None):
        h = self.mix(z) * torch.sin(3 * t)[:, None, None, None] + r.exp()[:, None, None, None]
        return self.drop(h if label is None else h * self.label(label)[:, :, None, None])


@pytest.fixture
def network(seed):
    torch.manual_seed(seed)
    Tape.made = Tape.replayed = 0
    return Network()


def drawn(batch, size=5):
    return torch.randn(batch, 2, size, size), torch.rand(batch), torch.rand(batch), torch.randint(5, (batch,))


def test_every_evaluation_is_the_networks_at_the_points_of_the_call(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for _ in range(WARM + 5):
            z, r, t, label = drawn(7)
            torch.testing.assert_close(recorded(z, r, t, label=label), network(z, r, t, label=label), rtol=0, atol=0)
    assert Tape.made == 1


class Refusing:
    """Capture that fails, as for a network that waits for the device or when memory is full."""

    def __init__(self, error):
        self.error, self.asked = error, 0

    def __call__(self, function, generator):
        self.asked += 1
        raise self.error


REFUSALS = [RuntimeError("operation not permitted when stream is capturing"), torch.OutOfMemoryError("no memory")]


@pytest.mark.parametrize("error", REFUSALS, ids=["it waits", "no memory"])
def test_what_cannot_be_recorded_runs_as_it_is_where_a_record_is_not_required(network, error, capsys):
    record = Refusing(error)
    recorded = GraphedNetwork(network, record=record, required=False).eval()
    with torch.no_grad():
        for _ in range(WARM + 6):
            z, r, t, label = drawn(7)
            assert torch.equal(recorded(z, r, t, label=label), network(z, r, t, label=label))
    assert record.asked == 1
    said = capsys.readouterr().err
    assert said.count("cannot be captured in a CUDA graph") == 1
    assert str(error) in said


@pytest.mark.parametrize("error", REFUSALS, ids=["it waits", "no memory"])
def test_a_record_that_is_required_and_cannot_be_is_an_error(network, error):
    recorded = GraphedNetwork(network, record=Refusing(error)).eval()
    expected = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else ConfigError
    with torch.no_grad():
        for _ in range(WARM):
            recorded(*drawn(3))
        with pytest.raises(expected):
            recorded(*drawn(3))


def test_what_was_returned_stays_as_it_is(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        given = [drawn(3) for _ in range(WARM + 4)]
        found = [recorded(z, r, t, label=label) for z, r, t, label in given]
        for (z, r, t, label), u in zip(given, found, strict=True):
            assert torch.equal(u, network(z, r, t, label=label))


def test_the_inputs_stay_as_they_are(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for _ in range(WARM + 3):
            given = drawn(3)
            before = [x.clone() for x in given]
            recorded(*given).zero_()
            assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("classes", [0, 5])
def test_samplers_cannot_tell_it_from_the_network(network, sampler, classes):
    count, batch = random.randrange(5, 17), random.randrange(2, 5)
    steps = None if sampler == "dopri5" else 3
    asked = {"sampler": sampler, "steps": steps, "num": count, "shape": (2, 4, 4), "seed": 3, "num_classes": classes}
    right = sample(network, batch_size=batch, **asked)
    found = sample(GraphedNetwork(network, record=Tape), batch_size=batch, **asked)
    assert torch.equal(found.images, right.images)
    assert found.nfe == right.nfe
    assert Tape.replayed >= Tape.made > 0


def test_other_forms_run_as_they_are_until_they_come_often(network):
    recorded = GraphedNetwork(network, record=Tape).eval()

    def held(z, r, t, label=None):
        assert torch.equal(recorded(z, r, t, label=label), network(z, r, t, label=label))

    with torch.no_grad():
        for _ in range(WARM + 1):
            held(*drawn(4))
        for batch in (3, 4, 1, 2):
            z, r, t, label = drawn(batch)
            for given in ((z, r, t, label), (z, r, t), (z[..., :4], r, t, label)):
                held(*given)
        assert (Tape.made, Tape.replayed) == (1, 2)
        for _ in range(WARM + 4):
            held(*drawn(3))
        assert (Tape.made, Tape.replayed) == (2, 2 + 4)
        for _ in range(3):  # not in a row: the record stays
            held(*drawn(3))
            held(*drawn(4))
    assert (Tape.made, Tape.replayed) == (2, 2 + 4 + 3)


def test_another_memory_order_is_no_other_form(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for place in range(WARM + 4):
            z, r, t, label = drawn(4)
            z = z.contiguous(memory_format=torch.channels_last) if place % 2 else z
            torch.testing.assert_close(recorded(z, r, t, label=label), network(z, r, t, label=label))
    assert (Tape.made, Tape.replayed) == (1, 4)


def test_the_networks_own_mode_counts(network):
    recorded = GraphedNetwork(network, record=Tape)
    with torch.no_grad():
        network.eval()
        for _ in range(WARM + 2):
            recorded(*drawn(3))
        assert Tape.replayed == 2
        network.train()
        recorded(*drawn(3))
    assert Tape.replayed == 2


def test_what_inference_mode_recorded_serves_outside_it(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.inference_mode():
        for _ in range(WARM + 2):
            recorded(*drawn(3))
    with torch.no_grad():
        z, r, t, label = drawn(3)
        assert torch.equal(recorded(z, r, t, label=label), network(z, r, t, label=label))
    assert (Tape.made, Tape.replayed) == (1, 3)


def test_no_cache_of_autocast_is_recorded(network):
    """It holds cast weights that are gone once autocast ends, where a record would still read."""
    seen = []
    network.mix.register_forward_hook(lambda _, x, y: seen.append((y.dtype, torch.is_autocast_cache_enabled())))
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for _ in range(WARM + 2):
            with torch.autocast("cpu", torch.bfloat16):
                recorded(*drawn(3))
                assert torch.is_autocast_cache_enabled()
    assert set(seen) == {(torch.bfloat16, False)}
    assert Tape.replayed == 2


def test_a_record_is_of_one_number_format(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for precision in ("fp32",) * (WARM + 1) + ("bf16", "fp32", "bf16"):
            z, r, t, label = drawn(4)
            with matmul_precision(precision, CPU):
                found, right = recorded(z, r, t, label=label), network(z, r, t, label=label)
            assert found.dtype == right.dtype
            assert torch.equal(found, right)
    assert Tape.made == 1


def test_gradients_and_training_go_through_the_network_itself(network):
    recorded = GraphedNetwork(network, record=Tape)
    z, r, t, label = drawn(4)
    with torch.no_grad():
        dropped = [recorded(z, r, t, label=label) for _ in range(WARM + 3)]
        assert len({tuple(u.flatten().tolist()) for u in dropped}) == len(dropped)
    with evaluating(recorded):
        for _ in range(WARM + 3):
            (gradient,) = torch.autograd.grad(recorded(z, r, t, label=label).sum(), network.mix.weight)
            assert gradient.any()
    assert Tape.made == 0
    assert network.training


def test_weights_that_are_written_into_count(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for _ in range(WARM + 3):
            network.mix.weight.normal_()
            z, r, t, label = drawn(4)
            assert torch.equal(recorded(z, r, t, label=label), network(z, r, t, label=label))


def test_expanded_times_are_taken_for_what_they_are(network):
    recorded = GraphedNetwork(network, record=Tape).eval()
    with torch.no_grad():
        for _ in range(WARM + 3):
            z, _, t, label = drawn(4)
            times = t[:1].expand(4)
            assert torch.equal(recorded(z, times, times, label=label), network(z, times, times, label=label))
    assert Tape.made == 1


def _refuses(error):
    def record(function, generator):
        raise error

    return record


def test_a_network_that_cannot_be_recorded_is_named(network):
    error = RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
    recorded = GraphedNetwork(network, record=_refuses(error)).eval()
    said = r"\(operation not permitted when stream is capturing\), expected one that never waits .* backend=eager"
    with torch.no_grad():
        for _ in range(WARM):
            recorded(*drawn(2))
        with pytest.raises(ConfigError, match=f"the network cannot be captured in a CUDA graph {said}"):
            recorded(*drawn(2))


def test_memory_that_runs_out_is_no_fault_of_the_network(network):
    recorded = GraphedNetwork(network, record=_refuses(torch.OutOfMemoryError("CUDA out of memory"))).eval()
    with torch.no_grad():
        for _ in range(WARM):
            recorded(*drawn(2))
        with pytest.raises(torch.OutOfMemoryError):
            recorded(*drawn(2))


def test_backends_by_name(network):
    assert run_by("eager", network, CPU) is network
    assert run_by("auto", network, CPU) is network
    for name in ("auto", "graph"):
        found = run_by(name, network, torch.device("cuda"))
        assert isinstance(found, GraphedNetwork)
        assert found._required == (name == "graph")
    with pytest.raises(
        ConfigError, match="backend=graph: CUDA graphs are CUDA's, the device is cpu; use eager or auto"
    ):
        sample(network, sampler="meanflow", steps=1, num=2, shape=(2, 4, 4), seed=0, backend="graph")
    with pytest.raises(ConfigError, match="backend=grahp: expected one of .*; did you mean graph"):
        run_by("grahp", network, CPU)
