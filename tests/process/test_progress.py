import io
import random
import re

import pytest
from rich.console import Console

from fullstride.process import progress
from fullstride.process.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    return made


def console(file: io.StringIO, width: int = 80) -> Console:
    return Console(file=file, width=width, color_system="standard", legacy_windows=False, _environ={"TERM": "xterm"})


def last_line(file: io.StringIO) -> str:
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return [line for line in re.split("[\r\n]", plain) if line.strip()][-1]


STATUS = ("sq. error 1.6592", "15634 images/s", "0.0164 s/step")


def shown(clock: Clock, width: int, status: tuple[str, ...] = STATUS) -> str:
    """The line of a run that has made 40 of 480,000 steps in 0.8 seconds, as a terminal has it."""
    out = Terminal()
    with Progress("training", 480_000, 12_305, console=console(out, width)) as bar:
        for step in range(12_306, 12_346):
            clock.now += 0.02
            bar.at(step)
        bar.status = status
    return last_line(out)


@pytest.mark.parametrize(
    ("width", "parts", "absent"),
    [
        (40, ["12345/480000 2h35m left sq. error 1.6592"], ["images", "training", "━"]),
        (60, ["12345/480000 2h35m left sq. error 1.6592, 15634 images/s"], ["s/step", "…"]),
        (80, ["━━━", "12345/480000 2h35m left sq. error 1.6592, 15634 images/s, 0.0164 s/step"], ["training", "…"]),
        (120, ["━━━", "training 12345/480000 2h35m left sq. error 1.6592, 15634 images/s, 0.0164 s/step"], ["…"]),
    ],
)
def test_a_narrow_terminal_gets_a_shorter_bar_and_then_fewer_parts(clock, width, parts, absent):
    line = shown(clock, width)
    assert all(part in line for part in parts), line
    assert not any(part in line for part in absent), line
    assert len(line.rstrip()) <= width


def test_no_part_is_ever_cut_or_wrapped(clock):
    chosen = random.Random(0)
    for width in range(12, 130, 7):
        status = tuple("".join(chosen.choices("abcdef ", k=chosen.randint(1, 30))).strip() for _ in range(4))
        line = shown(clock, width, status).strip(" ━╸╺")
        assert len(line) <= width
        words = {"training", "12345/480000", "left", "2h35m"} | {word for part in status for word in part.split()}
        assert {word.rstrip(",") for word in line.split()} <= words


def test_a_log_gets_a_line_at_the_start_each_minute_and_at_the_end_without_control_characters(clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with Progress("training", 1000, 100, console=Console(file=out)) as bar:
        for step in range(101, 401):
            clock.now += 0.5
            bar.at(step)
            bar.status = (f"loss {step}",)
    assert out.getvalue().splitlines() == [
        "training: 100/1000 (10%)",
        "training: 220/1000 (22%), 6:30 left, loss 219",
        "training: 340/1000 (34%), 5:30 left, loss 339",
        "training: 400/1000 (40%), in 2:30, loss 400",
    ]


def test_a_dumb_terminal_gets_plain_lines(clock):
    out = Terminal()
    with Progress("training", 3, console=Console(file=out, _environ={"TERM": "dumb"})) as bar:
        bar.at(3)
    assert out.getvalue() == "training: 0/3 (0%)\ntraining: 3/3, in 0:00\n"


@pytest.mark.parametrize(("seconds", "lines"), [(59.0, 0), (61.0, 2)])
def test_brief_work_is_silent_in_a_log_unless_it_takes_minutes(clock, seconds, lines):
    out = io.StringIO()
    with Progress("generating", 7, console=console(out), brief=True) as bar:
        clock.now += seconds
        bar.at(3)
    assert len(out.getvalue().splitlines()) == lines


def test_the_time_left_does_not_count_the_first_unit_and_survives_going_back(clock):
    out = io.StringIO()
    with Progress("training", 100, console=console(out)) as bar:
        for seconds, done in ((500.0, 1), (60.0, 11), (60.0, 5), (60.0, 15)):
            clock.now += seconds
            bar.at(done)
    left = [re.search(r", (\S+) left", line) for line in out.getvalue().splitlines()]
    assert [found and found[1] for found in left] == [None, None, "8:54", None, "8:30", None]


def test_work_of_unknown_size_and_without_a_display(clock):
    out = io.StringIO()
    with Progress("compiling", console=console(out)) as bar:
        clock.now += 3
        bar.at(2, 12)
    assert out.getvalue() == "compiling\ncompiling: 2/12 (17%), in 0:03\n"
    quiet = io.StringIO()
    with Progress("compiling", console=Console(file=quiet, quiet=True)), Progress("x", 1, shown=False):
        pass
    assert quiet.getvalue() == ""


def test_a_reader_that_is_gone_ends_nothing(clock):
    out = io.StringIO()
    with Progress("training", 5, console=console(out)) as bar:
        out.close()
        clock.now += 100
        bar.at(2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (59.9, "0:59"), (754.0, "12:34"), (3599.9, "59:59"), (4980.0, "1h23m"), (183_700.0, "2d03h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
