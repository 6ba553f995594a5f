import os
import signal
import time

import pytest

from fullstride.errors import ConfigError
from fullstride.runs.lock import LOCK, hold, locked, release


def refused_elsewhere(run) -> bool:
    """Return whether another process is refused the run."""
    pid = os.fork()
    if pid == 0:
        try:
            hold(run)
        except ConfigError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_run_is_one_processs_until_it_lets_go(tmp_path):
    assert not refused_elsewhere(tmp_path)  # and the end of that process gave it back
    hold(tmp_path)
    assert refused_elsewhere(tmp_path)
    hold(tmp_path)  # again in the same process, as for a run that is resumed in it
    assert refused_elsewhere(tmp_path)
    release(tmp_path)
    assert not refused_elsewhere(tmp_path)
    release(tmp_path)


def test_the_message_says_who_and_what_to_do(tmp_path, monkeypatch):
    def taken(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("fcntl.lockf", taken)
    with pytest.raises(ConfigError, match="another process is training this run; wait for its end, or choose"):
        hold(tmp_path)


def test_without_locks_or_room_for_one_the_run_goes_on(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    hold(tmp_path)
    hold(tmp_path / "absent")
    assert (tmp_path / LOCK).exists()


def test_a_folder_is_its_first_users_until_that_one_is_done(tmp_path):
    with locked(tmp_path) as first, locked(tmp_path) as second:
        assert (first, second) == (True, False)
        if (pid := os.fork()) == 0:  # it has the first's file open, and lives on
            time.sleep(60)
            os._exit(0)
    try:
        with locked(tmp_path) as again:
            assert again
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_where_there_are_no_locks_everybody_is_alone(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with locked(tmp_path) as alone:
        assert alone
