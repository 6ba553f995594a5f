import pytest

from fullstride.errors import ConfigError
from fullstride.launch.request import LAUNCHERS, SlurmRequest


@pytest.mark.parametrize(("backend", "request_"), [(name, options) for name, (options, _) in LAUNCHERS.items()])
def test_the_defaults_of_every_backend_can_be(backend, request_):
    request = request_()
    assert request.backend == backend
    assert request.retries == 5
    assert request.delay == 30.0
    assert request.seconds == (0.0 if backend in ("local", "torchrun") else 12 * 3600.0)


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
        SlurmRequest(**{option: value})
