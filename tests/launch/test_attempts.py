import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fullstride.launch import attempts
from fullstride.launch.attempts import Attempt, Outcome, attempt_all, exit_code
from fullstride.process import exit_codes
from tests.launch.commands import attempts_in, ending

TRAIN = ["meanflow", "train", "epochs=3", "overwrite=true"]
RESUMED = ["meanflow", "train", "epochs=3", "resume=true"]


def run(folder, *ends: str, words=TRAIN, retries=3, seconds=0.0, again=False) -> Outcome:
    return attempt_all(list(words), ending(folder, *ends), retries=retries, delay=0.0, seconds=seconds, again=again)


@pytest.mark.parametrize("first", ["75", "1", "killed", "42"])
def test_what_may_end_otherwise_is_attempted_again_and_goes_on(tmp_path, first, capfd):
    ended = run(tmp_path, first, "75", "0")
    assert (ended.code, ended.again) == (0, False)
    assert attempts_in(tmp_path) == [TRAIN, RESUMED, RESUMED]
    said = capfd.readouterr().err
    assert f"attempt 1 of 4 ended with exit code {-9 if first == 'killed' else first}" in said
    assert "attempt 2 of 4 ended with exit code 75: stuck, and ended by its watchdog" in said


@pytest.mark.parametrize("code", sorted(exit_codes.FINAL))
def test_what_would_end_the_same_is_attempted_once(tmp_path, code):
    assert run(tmp_path, str(code)).code == code
    assert attempts_in(tmp_path) == [TRAIN]


def test_attempts_are_as_many_as_retries_and_one(tmp_path, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(attempts, "_waits", lambda seconds: waited.append(seconds) is None)
    ended = attempt_all(TRAIN, ending(tmp_path, "1"), retries=5, delay=30.0, seconds=0.0)
    assert (ended.code, ended.again) == (1, True)
    assert len(attempts_in(tmp_path)) == 6
    assert waited == [30.0] * 5


def test_a_stop_ends_the_wait_for_the_next_attempt_at_once():
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert not attempts._waits(600.0)
    assert signal.getsignal(signal.SIGTERM) == before
    assert attempts._waits(0.2)


def test_a_stop_between_attempts_passes_the_end_of_the_last_one_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(attempts, "_waits", lambda _: False)
    ended = run(tmp_path, "75", "0")
    assert (ended.code, ended.told, ended.again) == (75, True, False)
    assert exit_code(ended) == 75
    assert attempts_in(tmp_path) == [TRAIN]
    assert "SIGTERM: no further attempt" in capfd.readouterr().err


def test_a_launch_that_began_before_goes_on_from_its_first_attempt(tmp_path):
    run(tmp_path, "0", again=True)
    assert attempts_in(tmp_path) == [RESUMED]


def test_an_attempt_whose_time_is_up_saves_and_the_next_one_goes_on(tmp_path):
    ended = run(tmp_path, "saves", "0", seconds=1.0)
    assert ended.code == 0
    assert attempts_in(tmp_path) == [TRAIN, RESUMED]
    assert exit_code(Outcome(0, "", late=True)) == exit_codes.STUCK


def test_what_does_not_end_when_told_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "SAVING", 0.3)
    attempt = Attempt(ending(tmp_path, "hangs")(TRAIN))
    wait_for(tmp_path / "ready")
    attempt.end(0.3)
    ended = attempt.wait()
    assert ended.code == -signal.SIGKILL
    assert exit_code(ended) == 137


def wait_for(path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_from_outside_is_passed_on_and_nothing_follows(tmp_path, number):
    def stop() -> None:
        wait_for(tmp_path / "ready")
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    before = signal.getsignal(signal.SIGTERM)
    ended = run(tmp_path, "saves")
    assert (ended.code, ended.told, ended.again) == (0, True, False)
    assert len(attempts_in(tmp_path)) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_handler_may_end_the_attempt_that_is_waited_for(tmp_path):
    attempt = Attempt(ending(tmp_path, "saves")(TRAIN))
    signal.signal(signal.SIGUSR1, lambda *_: attempt.end(10.0))
    wait_for(tmp_path / "ready")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    start = time.monotonic()
    assert attempt.wait().code == 0
    assert time.monotonic() - start < 10
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_slurms_warning_does_not_kill_the_attempt(tmp_path):
    attempt = Attempt(ending(tmp_path, "saves")(TRAIN))
    wait_for(tmp_path / "ready")
    attempt._process.send_signal(signal.SIGUSR2)
    assert subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"]).returncode == 0
    attempt.end(10.0)
    assert attempt.wait().code == 0


def test_the_environment_and_the_folder_are_the_given_ones(tmp_path):
    line = [
        sys.executable,
        "-c",
        "import os; assert os.environ['GIVEN'] == 'x' and os.environ['PATH']; open('here', 'w')",
    ]
    assert Attempt(line, {"GIVEN": "x"}, str(tmp_path)).wait().code == 0
    assert (tmp_path / "here").exists()
