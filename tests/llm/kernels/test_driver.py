"""Memory of several GPUs that a process reaches, before a driver of ours."""

import pytest

from fullstride.llm.kernels.cuda import driver


class Driver:
    """Notes whose context is current while what is asked for."""

    def __init__(self, apart: set[tuple[int, int]], enabled: int = 0):
        self.apart, self.enabled = apart, enabled
        self.contexts, self.done = [], []

    def cuDeviceCanAccessPeer(self, can, own, other) -> int:  # noqa: N802
        can._obj.value = (own, other) not in self.apart
        return 0

    def cuDevicePrimaryCtxRetain(self, context, ordinal) -> int:  # noqa: N802
        context._obj.value = 100 + ordinal
        return 0

    def cuCtxPushCurrent_v2(self, context) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxEnablePeerAccess(self, context, flags) -> int:  # noqa: N802
        self.done.append(("reach", self.contexts[-1], context.value))
        return self.enabled

    def cuMemAlloc_v2(self, found, count) -> int:  # noqa: N802
        found._obj.value = 1 << 40
        self.done.append(("allocate", self.contexts[-1], count.value))
        return 0

    def cuMemsetD8_v2(self, address, value, count) -> int:  # noqa: N802
        self.done.append(("set", address.value, value.value, count.value))
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        self.done.append(("wait", self.contexts[-1]))
        return 0

    def cuGetErrorString(self, code, text) -> int:  # noqa: N802
        text._obj.value = b"peer access is not supported"
        return 0


@pytest.fixture
def driven(monkeypatch):
    def take(found: Driver) -> Driver:
        monkeypatch.setattr(driver, "library", lambda: found)
        driver._context.cache_clear()
        return found

    yield take
    driver._context.cache_clear()


@pytest.mark.parametrize("enabled", [0, driver.ENABLED_ALREADY])
def test_each_of_some_gpus_may_write_into_all_others(driven, enabled):
    found = driven(Driver(set(), enabled))
    assert driver.reach_each_other((0, 2, 3))
    pairs = [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]
    assert found.done == [("reach", 100 + own, 100 + other) for own, other in pairs]
    assert found.contexts == []


def test_one_that_cannot_keeps_all_as_they_are(driven):
    found = driven(Driver({(2, 0)}))
    assert not driver.reach_each_other((0, 2))
    assert found.done == []


def test_what_the_driver_says_of_access_is_the_error(driven):
    found = driven(Driver(set(), 217))
    with pytest.raises(RuntimeError, match="error 217: peer access is not supported"):
        driver.reach_each_other((0, 1))
    assert found.contexts == []


def test_memory_is_the_gpus_and_zero_before_anybody_has_it(driven):
    found = driven(Driver(set()))
    assert driver.zeros(3, 4096) == 1 << 40
    assert found.done == [("allocate", 103, 4096), ("set", 1 << 40, 0, 4096), ("wait", 103)]
