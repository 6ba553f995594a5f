"""Calls that a chain makes to CUDA's driver, recorded by a fake driver."""

import ctypes
import threading

import numpy as np
import pytest

from fullstride.llm.kernels.cuda import chain, driver
from fullstride.llm.kernels.cuda.xla_ffi import FfiCall


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [(name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared")]
    _fields_ += [("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class Driver:
    """Notes launches; fails with an error where it is told to."""

    def __init__(self, code: int = 0):
        self.code, self.launched, self.allowed = code, [], []
        self.inside = threading.Semaphore(1)

    def cuCtxGetDevice(self, device) -> int:  # noqa: N802
        device._obj.value = 3
        return 0

    def cuKernelSetAttribute(self, attribute, value, kernel, device) -> int:  # noqa: N802
        self.allowed.append((attribute, value, kernel.value, device))
        return 0

    def cuGetErrorString(self, code, text) -> int:  # noqa: N802
        text._obj.value = b"the grid is too large"
        return 0

    def cuLaunchKernelEx(self, config, kernel, parameters, extra) -> int:  # noqa: N802
        assert self.inside.acquire(blocking=False), "two threads launch at once"
        asked = Config.from_buffer_copy(bytes(config._obj))
        threading.Event().wait(0.001)
        values = [ctypes.cast(p, ctypes.POINTER(ctypes.c_uint64)).contents.value for p in parameters]
        early = ctypes.string_at(asked.attributes, 12) if asked.count else b""
        self.launched.append((asked, kernel.value, values, np.frombuffer(early, np.int32).tolist()))
        self.inside.release()
        return self.code


@pytest.fixture
def noted(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "library", lambda: found)
    return found


def launch(kernel: int, early: bool, pointers: int = 2) -> driver.PreparedLaunch:
    return driver.PreparedLaunch(ctypes.c_void_p(kernel), (5, 6, 1), 256, 99_000 + kernel, pointers, early)


def call(name: str, *pointers: int) -> FfiCall:
    return FfiCall(name, list(pointers), lambda: 77)


def test_a_launch_is_what_cuda_h_says(noted):
    launch(40, early=True)(77, [1 << 40, 2])
    ((asked, kernel, values, early),) = noted.launched
    assert ctypes.sizeof(Config) == ctypes.sizeof(driver._Config) == 56
    assert (asked.x, asked.y, asked.z, asked.block_x, asked.block_y, asked.block_z) == (5, 6, 1, 256, 1, 1)
    assert (asked.shared, asked.stream, kernel, values) == (99_040, 77, 40, [1 << 40, 2])
    # Programmatic stream serialization, allowed.
    assert asked.count == 1
    assert early[0] == 6
    assert early[2] == 1
    assert (8, 99_040, 40, 3) in noted.allowed


def test_the_first_of_a_chain_waits_for_what_was_before(noted):
    launch(41, early=False)(77, [1, 2])
    assert noted.launched[0][0].count == 0


def test_what_the_driver_says_is_the_error(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: Driver(code=1))
    with pytest.raises(RuntimeError, match="error 1: the grid is too large"):
        launch(42, early=True)(77, [1, 2])


def test_links_get_the_buffers_of_their_call_in_order(noted, monkeypatch):
    links = [(launch(43, False), ((0, 0), (2, 8))), (launch(44, True), ((2, 0), (1, 4)))]
    monkeypatch.setattr(chain, "_made", {"a": links})
    chain._execute(call("a", 1000, 2000, 3000))
    assert [(kernel, values) for _, kernel, values, _ in noted.launched] == [(43, [1000, 3008]), (44, [3000, 2004])]
    with pytest.raises(KeyError, match="was not created in this process"):
        chain._execute(call("b", 1))


def test_engines_in_threads_do_not_mix_their_buffers(noted, monkeypatch):
    monkeypatch.setattr(chain, "_made", {"a": [(launch(45, True), ((0, 0), (1, 0)))] * 3})
    calls = [call("a", i, 10 * i) for i in range(1, 6)]
    threads = [threading.Thread(target=chain._execute, args=(each,)) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [values for _, _, values, _ in noted.launched]
    assert len(values) == 15
    assert all(second == 10 * first for first, second in values)
