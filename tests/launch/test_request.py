import dataclasses

import pytest

from fullstride.errors import ConfigError
from fullstride.launch.request import BACKENDS, OPTIONS, Request, check


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_defaults_of_every_backend_can_be(backend):
    request = check(Request(backend))
    assert request.attempts_after == 5
    assert request.delay == 30.0
    assert request.seconds == (0.0 if backend in ("local", "torchrun") else 12 * 3600.0)


def test_an_option_of_another_backend_is_refused_with_its_owner():
    with pytest.raises(ConfigError, match="--partition gpu: --backend modal has no such option; only slurm has it$"):
        check(Request("modal", partition="gpu"))
    with pytest.raises(ConfigError, match="--volume a:/b: --backend skypilot has no such option; only modal has it$"):
        check(Request("skypilot", volume=("a:/b",)))
    with pytest.raises(ConfigError, match="--gpus 4: .* no such option; only slurm, modal and skypilot have it$"):
        check(Request("local", gpus=4))
    with pytest.raises(ConfigError, match="--backend=kubernetes: expected one of"):
        check(Request("kubernetes"))


def test_every_option_is_somebodys():
    fields = {field.name for field in dataclasses.fields(Request)}
    assert set.union(*OPTIONS.values()) == fields - {"backend", "name", "retries", "retry_delay", "time"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", "A run"),
        ("name", "-a"),
        ("retries", -1),
        ("retry_delay", -0.5),
        ("time", float("inf")),
        ("time", float("nan")),
        ("gpus", -1),
        ("nodes", 0),
        ("cpus", 0),
        ("memory", -1.0),
    ],
)
def test_a_value_that_cannot_be_is_named(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} .*expected "):
        check(dataclasses.replace(Request("slurm"), **{option: value}))
