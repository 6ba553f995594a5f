import json
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.experiments import gpu_pool
from benchmarks.experiments.gpu_pool import Task, run_side_by_side, shares
from benchmarks.harness.time_limit import Limit
from fullstride.errors import PeerError, Preempted

NONE = Limit()

# Writes down where and when it ran, and ends as its words say.
SCRIPT = """
import json, os, signal, sys, time
out, words = sys.argv[1], sys.argv[2:]
start = time.monotonic()
cores = 0
while time.monotonic() < start + 1 and not cores:
    cores = len(os.sched_getaffinity(0))
end = [0]
if "waits" in words:
    signal.signal(signal.SIGTERM, lambda *_: end.append(1))
    open(out + ".ready", "w").close()
    while len(end) == 1 and time.monotonic() < start + 30:
        time.sleep(0.02)
else:
    time.sleep(1.5 if "long" in words else 0.3)
seen = {"words": words, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "start": start, "end": time.monotonic(),
        "cores": sorted(os.sched_getaffinity(0)), "saved": len(end) > 1}
with open(out, "w") as file:
    json.dump(seen, file)
if "killed" in words:
    signal.raise_signal(signal.SIGKILL)
print("a word of", words[0])
if "fails" in words:
    print("error: the disk is full", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch, tmp_path):
    def line(words):
        return [sys.executable, "-S", "-c", SCRIPT, str(tmp_path / f"{words[0]}.json"), *words]

    monkeypatch.setattr(gpu_pool, "single_command", line)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def seen(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def tasks(*names: str, **given) -> list[Task]:
    return [Task(name, [name], **given) for name in names]


def test_every_task_has_a_gpu_and_its_cores_to_itself(tmp_path, capfd):
    names = [f"task{i}" for i in range(5)]
    run_side_by_side(tasks(*names), ["3", "GPU-ab"], tmp_path / "logs", NONE)
    found = [seen(tmp_path, name) for name in names]
    assert {one["gpu"] for one in found} == {"3", "GPU-ab"}
    assert [one["gpu"] for one in found[:2]] == ["3", "GPU-ab"]
    for gpu in ("3", "GPU-ab"):
        on = sorted((one["start"], one["end"]) for one in found if one["gpu"] == gpu)
        assert all(end <= start for (_, end), (start, _) in pairwise(on))
    assert all(set(one["cores"]) in [set(share) for share in shares(2)] for one in found)
    assert found[0]["start"] < found[1]["end"]
    assert found[1]["start"] < found[0]["end"]
    assert (tmp_path / "logs" / "task4.log").read_text() == "a word of task4\n"
    assert "task4: done after" in capfd.readouterr().err


def test_nothing_to_do_is_done(tmp_path):
    assert run_side_by_side([], ["0", "1"], tmp_path / "logs", NONE) == []


def test_one_that_fails_is_told_after_the_others_have_ended(tmp_path):
    given = [Task("bad", ["bad", "fails"]), *tasks("good", "better")]
    with pytest.raises(PeerError, match=r"^bad: failed.* \(.*bad\.log: error: the disk is full\); run the same"):
        run_side_by_side(given, ["0", "1"], tmp_path / "logs", NONE)
    assert [seen(tmp_path, name)["gpu"] for name in ("good", "better")] == ["1", "1"]  # it may be the GPU's fault


def test_without_a_gpu_that_works_nothing_more_is_begun(tmp_path):
    with pytest.raises(PeerError, match="bad: failed.*; not begun: good, better; run the same command to resume"):
        run_side_by_side([Task("bad", ["bad", "fails"]), *tasks("good", "better")], ["0"], tmp_path / "logs", NONE)
    assert not (tmp_path / "good.json").exists()


def test_the_reason_is_of_this_attempt(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "bad.log").write_text("error: another time\n")
    with pytest.raises(PeerError, match=r"bad: killed \(SIGKILL\).*: no output\)"):
        run_side_by_side([Task("bad", ["bad", "killed"])], ["0"], tmp_path / "logs", NONE)


def test_what_is_left_of_the_limit_is_passed_on_and_nothing_begins_that_does_not_fit(tmp_path):
    assert run_side_by_side(tasks("first"), ["0"], tmp_path / "logs", Limit.of(100.0)) == []
    every = [*tasks("long", least=1e4), *tasks("second"), *tasks("third", least=89.8)]  # once it would have fitted
    assert run_side_by_side(every, ["0"], tmp_path / "logs", Limit.of(100.0)) == ["long", "third"]
    for name in ("first", "second"):
        given, option, seconds = seen(tmp_path, name)["words"]
        assert (given, option) == (name, "--limit")
        assert 90 < int(seconds) <= 97  # of the ten reserved seconds a fourth is this process's
    assert not (tmp_path / "long.json").exists()


def test_what_has_not_left_by_the_end_is_killed_and_no_failure_of_its_gpu(tmp_path, capfd):
    start = time.monotonic()
    assert run_side_by_side([Task("one", ["one", "waits"])], ["0"], tmp_path / "logs", Limit.of(4.0)) == []
    assert time.monotonic() - start < 15  # it would have gone on for 30
    assert (tmp_path / "one.json.ready").exists()
    assert not (tmp_path / "one.json").exists()
    assert "one: out of time, killed because it did not exit" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_passed_on_to_those_that_run_and_nothing_begins_after_it(tmp_path, number, raised):
    def tell():
        while not all((tmp_path / f"{name}.json.ready").exists() for name in ("one", "two")):
            time.sleep(0.02)
        os.kill(os.getpid(), number)
        if number == signal.SIGINT:  # the stand-ins know SIGTERM alone
            os.kill(os.getpid(), signal.SIGTERM)

    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    threading.Thread(target=tell, daemon=True).start()
    given = [Task(name, [name, "waits"]) for name in ("one", "two", "three")]
    with pytest.raises(raised, match="stopped; not begun: three; run the same command to resume"):
        run_side_by_side(given, ["0", "1"], tmp_path / "logs", NONE)
    if number == signal.SIGTERM:
        assert seen(tmp_path, "one")["saved"]
        assert seen(tmp_path, "two")["saved"]
    assert not (tmp_path / "three.json").exists()
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_none_is_left_behind_where_another_cannot_be_started(tmp_path, monkeypatch):
    line = gpu_pool.single_command

    def second_fails(words):
        if words[0] == "two":
            while not (tmp_path / "one.json.ready").exists():
                time.sleep(0.02)
            return ["/nowhere/python"]
        return line(words)

    monkeypatch.setattr(gpu_pool, "single_command", second_fails)
    with pytest.raises(FileNotFoundError):
        run_side_by_side([Task("one", ["one", "waits"]), *tasks("two")], ["0", "1"], tmp_path / "logs", NONE)
    assert seen(tmp_path, "one")["saved"]


def test_one_that_could_not_save_is_told_though_all_were_stopped(tmp_path):
    def tell():
        while not (tmp_path / "one.json.ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(PeerError, match="one: failed.*the disk is full"):
        run_side_by_side([Task("one", ["one", "waits", "fails"])], ["0"], tmp_path / "logs", NONE)


def test_cores_are_shared_out_without_rest():
    mine = os.sched_getaffinity(0)
    for count in range(1, len(mine) + 1):
        parts = shares(count)
        assert set().union(*parts) == mine
        assert sum(map(len, parts)) == len(mine)
    assert shares(len(mine) + 1) == [frozenset(mine)] * (len(mine) + 1)


def test_a_gpu_that_is_named_twice_runs_two_at_a_time(tmp_path):
    run_side_by_side(tasks("a", "b", "c"), ["0", "0"], tmp_path / "logs", NONE)
    a, b, c = (seen(tmp_path, name) for name in "abc")
    assert a["gpu"] == b["gpu"] == c["gpu"] == "0"
    assert max(a["start"], b["start"]) < min(a["end"], b["end"])
    assert c["start"] >= min(a["end"], b["end"])


def test_every_gpu_has_one_before_any_has_two(tmp_path):
    run_side_by_side(tasks("a", "b", "c"), ["0", "0", "0", "1", "1"], tmp_path / "logs", NONE)
    assert [seen(tmp_path, name)["gpu"] for name in "abc"] == ["0", "1", "0"]


def test_where_one_has_failed_no_other_is_begun_on_the_same_gpu(tmp_path):
    every = [Task("a", ["a", "fails"]), Task("b", ["b", "long"]), *tasks("c")]
    with pytest.raises(PeerError, match="a: .*not begun: c"):
        run_side_by_side(every, ["0", "0"], tmp_path / "logs", NONE)
    assert seen(tmp_path, "a")["end"] < seen(tmp_path, "b")["end"]
    assert not (tmp_path / "c.json").exists()
