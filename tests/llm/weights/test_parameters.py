import threading
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.weights.parameters import Parameters, StoredParameter


@dataclass
class Kept(StoredParameter):
    """A parameter in memory that notes each read."""

    values: np.ndarray
    reads: list
    wait: threading.Barrier | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def kind(self) -> str:
        return "made"

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> np.ndarray:
        self.reads.append((rows, columns))
        if self.wait:
            self.wait.wait(timeout=20)
        part = self.values[rows] if self.values.ndim == 1 else self.values[rows, columns]
        return part.astype(dtype)


@pytest.fixture
def made(seed):
    rng, reads = np.random.default_rng(seed), []
    values = {"a": rng.normal(size=(7, 5)), "b": rng.normal(size=9), "c": rng.normal(size=(2, 3))}
    stored = {name: Kept(value.astype(np.float32), reads) for name, value in values.items()}
    return Parameters(stored, "bfloat16"), stored, reads


def test_nothing_is_read_before_it_is_asked_for(made):
    parameters, stored, reads = made
    assert list(parameters) == ["a", "b", "c"]
    assert (len(parameters), parameters.shape("a"), parameters.kind("a")) == (3, (7, 5), "made")
    assert parameters.nbytes == 2 * (35 + 9 + 6)
    assert "a" in parameters
    assert "d" not in parameters
    assert reads == []
    np.testing.assert_array_equal(parameters["c"], stored["c"].values.astype(ml_dtypes.bfloat16))
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(None, None), (slice(2, 5), None), (None, slice(1, 3)), (slice(-3, None), slice(-2, 99)), (slice(5, 2), None)],
)
def test_a_part_is_read_as_numpy_would_cut_it(made, rows, columns):
    parameters, stored, reads = made
    whole = stored["a"].values.astype(ml_dtypes.bfloat16)
    part = parameters.read("a", rows, columns)
    np.testing.assert_array_equal(part, whole[rows or slice(None), columns or slice(None)])
    assert all(0 <= cut.start <= cut.stop for cut in reads[0])
    np.testing.assert_array_equal(parameters.read("b", slice(3, 5)), stored["b"].values[3:5].astype(ml_dtypes.bfloat16))


def test_a_part_with_gaps_and_a_name_that_is_not_there(made):
    parameters, _, _ = made
    with pytest.raises(ValueError, match="got the step 2"):
        parameters.read("a", rows=slice(0, 6, 2))
    with pytest.raises(KeyError):
        parameters["d"]


def test_values_that_float16_cannot_hold(made):
    _, stored, _ = made
    halves = Parameters(stored, "float16")
    assert np.abs(halves["a"] - stored["a"].values).max() < 1e-2
    stored["a"].values[3, 4] = 1e5
    assert halves.read("a", rows=slice(0, 3)).dtype == np.float16
    with pytest.raises(ConfigError, match="a has values that float16 cannot hold; load it as bfloat16"):
        halves["a"]
    assert float(Parameters(stored, "bfloat16")["a"][3, 4]) == pytest.approx(1e5, rel=1e-2)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_stream_has_every_parameter_in_order(made, threads):
    parameters, stored, _ = made
    streamed = list(parameters.stream(threads))
    assert [name for name, _ in streamed] == list(stored)
    for name, value in streamed:
        np.testing.assert_array_equal(value, parameters[name])


def test_a_stream_reads_side_by_side_and_only_a_little_ahead():
    reads: list = []
    together = threading.Barrier(2)
    stored = {str(i): Kept(np.ones(3, np.float32), reads, together) for i in range(20)}
    stream = Parameters(stored, "float32").stream(threads=2)
    assert next(stream)[0] == "0"
    assert len(reads) <= 6
    assert len(list(stream)) == 19


def test_an_error_while_reading_ends_the_stream(made):
    _, stored, _ = made
    stored["b"].wait = threading.Barrier(1)
    stored["b"].wait.abort()
    with pytest.raises(threading.BrokenBarrierError):
        list(Parameters(stored, "float32").stream())
