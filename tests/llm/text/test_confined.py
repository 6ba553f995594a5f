"""Functions in a process of their own: results, refusals, limits, and the end of what nobody waits for."""

import ctypes
import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.text.confined import AbandonedError, FairLock, IsolatedFunction, TooCostlyError

HERE = "tests.llm.text.test_confined:"


def steps(setup):
    """A function of a name and a value that counts its calls."""
    calls = []

    def work(asked):
        name, value = asked
        calls.append(name)
        return {"pid": os.getpid(), "calls": len(calls), "made": DOES[name](value), "setup": setup}

    return work


DOES = {
    "echo": lambda value: value,
    "busy": lambda _: sum(1 for _ in iter(int, 1)),
    "bytes": lambda size: len(bytearray(size)),
    "abort": lambda _: os.abort(),
    "crash": lambda _: ctypes.string_at(0),
    "refuse": lambda why: (_ for _ in ()).throw(ConfigError(why)),
    "exit": lambda _: (_ for _ in ()).throw(SystemExit(3)),
    "sleep": time.sleep,
}


@pytest.fixture(scope="module")
def confined():
    return IsolatedFunction(HERE + "steps", {"set": "up"}, seconds=0.3, memory=64 << 20)


def test_results_come_back_from_one_process_of_its_own(confined, seed):
    value = [f"é\ud800{seed}", None, {"a": [1.5, True]}]
    first, second = confined(("echo", value)), confined(("echo", value))
    assert first["made"] == second["made"] == value
    assert first["setup"] == {"set": "up"}
    assert first["pid"] == second["pid"] != os.getpid()
    assert second["calls"] == first["calls"] + 1


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("busy", None, "more than 0.3 s of computing"),
        ("bytes", 1 << 40, "more memory than is allowed"),
        ("bytes", 65 << 20, "more memory than is allowed"),
        ("abort", None, "more than 64 MiB of memory"),
        ("crash", None, "more than 64 MiB of memory"),
    ],
)
def test_what_takes_too_much_ends_and_the_next_call_is_served(confined, name, value, why):
    with pytest.raises(TooCostlyError, match=why):
        confined((name, value))
    assert confined(("echo", 1))["made"] == 1


def test_what_stays_within_its_limits_is_done_however_often(confined):
    pids = {confined(("bytes", 30 << 20))["pid"] for _ in range(20)}
    assert len(pids) == 1


def test_a_refusal_keeps_the_process(confined):
    before = confined(("echo", 1))["pid"]
    for name, why in (("refuse", "no such thing"), ("exit", "3")):
        with pytest.raises(ConfigError, match=why):
            confined((name, why))
    with pytest.raises(ConfigError, match="expected plain values"):
        confined(("echo", threading.Lock()))
    try:
        raise KeyError
    except KeyError:  # of whoever calls
        assert confined(("echo", 1))["pid"] == before


def test_what_nobody_waits_for_is_ended(confined):
    wanted, pid = threading.Event(), confined(("echo", 1))["pid"]
    wanted.set()
    timer = threading.Timer(0.2, wanted.clear)
    timer.start()
    with pytest.raises(AbandonedError):
        confined(("sleep", 1000), wanted.is_set)
    assert not psutil.pid_exists(pid)
    assert confined(("echo", 2))["made"] == 2


def test_callers_come_in_the_order_in_which_they_asked():
    lock, seen = FairLock(), []

    def often(name):
        for _ in range(3):
            with lock.next(lambda: True):
                seen.append(name)
                time.sleep(0.01)

    threads = [threading.Thread(target=often, args=(name,)) for name in "ab"]
    with lock.next(lambda: True):
        for waiting, thread in enumerate(threads, 2):
            thread.start()
            while len(lock._queue) < waiting:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert seen[:2] == ["a", "b"]  # though "a" asked again at once
    assert len(seen) == 6


def test_nothing_is_imported_from_the_folder_that_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('of a stranger')\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    assert IsolatedFunction(HERE + "steps", seconds=5.0, memory=64 << 20)(("echo", 3))["made"] == 3


def test_it_ends_with_whom_it_belongs_to():
    own = IsolatedFunction(HERE + "steps", seconds=5.0, memory=64 << 20)
    pid = own(("echo", 1))["pid"]
    del own
    assert not psutil.pid_exists(pid)
