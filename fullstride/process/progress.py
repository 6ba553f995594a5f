"""Progress of long work: one line that fits the terminal, or plain lines, a minute apart, in logs and pipes."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

EVERY = 60.0  # seconds between two plain lines
NARROWEST, WIDEST = 4, 40  # columns of the bar


def fraction(done: int, total: int | None) -> str:
    """Count in the form `3/10`; when the total is unknown, `3`, or nothing for 0."""
    return f"{done}/{total}" if total is not None else str(done or "")


def duration(seconds: float) -> str:
    """Format a time as `0:07`, `12:34`, `1h23m` or `2d03h`."""
    minutes, hours = int(seconds / 60), int(seconds / 3600)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}h{minutes % 60:02}m" if hours else f"{minutes}:{int(seconds) % 60:02}"


class Progress:
    """Progress of one piece of work; a context, which shows it.

    A terminal gets one line that is never wrapped or cut: first the bar shrinks, then whole parts are left out, the
    least important ones first. Anything else gets plain lines: one at the start, one a minute, one at the end.

    Attributes:
        done: units of work that are done.
        total: all units, None when unknown.
        status: what the work measures, the most important value first.

    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        done: int = 0,
        *,
        console: Console | None = None,
        count: Callable[[int, int | None], str] = fraction,
        brief: bool = False,
        shown: bool = True,
    ):
        """Prepare to show work of which `done` units were made before.

        Args:
            title: what is done.
            total: all units of work, None when unknown.
            done: units that are done at the start.
            console: console to show it on; stderr by default.
            count: formats `done` and `total`.
            brief: the work usually takes seconds: its bar vanishes at the end, and logs and pipes get no line for its
                first minute.
            shown: False shows nothing anywhere.

        """
        self.title, self.total, self.done = title, total, done
        self.status: tuple[str, ...] = ()
        self._console = console or Console(stderr=True)
        self._count, self._brief = count, brief
        self._shown = shown and not self._console.quiet
        self._live: Live | None = None
        self._begun = self._told = time.monotonic()
        self._paced: tuple[float, int] | None = None  # when the time left is estimated from, and what was done then

    def __enter__(self) -> "Progress":
        """Show it; time counts from here."""
        self._begun = self._told = time.monotonic()
        # FORCE_COLOR makes rich take a log for a terminal; a dumb terminal cannot rewrite a line.
        if self._shown and self._console.file.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(
                self,
                console=self._console,
                transient=self._brief or self.total is None,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        elif not self._brief:
            self._tell()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the line as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif not self._brief or self._told > self._begun:
            self._tell(ended=True)

    def at(self, done: int, total: int | None = None) -> None:
        """Take note that `done` units are done, of `total` if that has changed."""
        if self._paced is None or done < self.done:
            # Not before the first unit, which may include compilation; anew after steps that were taken back.
            self._paced = time.monotonic(), done
        self.done = done
        self.total = self.total if total is None else total
        if self._live is None and time.monotonic() - self._told >= EVERY:
            self._tell()

    def _left(self) -> str:
        if self._paced is None or self.total is None or not self._paced[1] < self.done < self.total:
            return ""
        start, first = self._paced
        return f"{duration((time.monotonic() - start) * (self.total - self.done) / (self.done - first))} left"

    def _tell(self, ended: bool = False) -> None:
        self._told = time.monotonic()
        count = self._count(self.done, self.total)
        if self.total and self.done < self.total:
            count += f" ({self.done / self.total:.0%})"
        span = f"in {duration(self._told - self._begun)}" if ended else self._left()
        line = ": ".join(part for part in (self.title, ", ".join(filter(None, (count, span, *self.status)))) if part)
        if self._shown:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe must not end the work
                print(line, file=self._console.file, flush=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Draw the line in the width that there is."""
        text = self._fitted(options.max_width)
        room = options.max_width - cell_len(text) - 1
        row = Table.grid(padding=(0, 1, 0, 0))
        if room < NARROWEST:
            row.add_row(Text(text, no_wrap=True))
        else:
            bar = ProgressBar(total=self.total, completed=self.done, width=min(room, WIDEST))
            row.add_row(bar, Text(text, no_wrap=True))
        yield row

    def _fitted(self, width: int) -> str:
        """Return the line with as many parts as fit, by importance."""
        chosen: list[str] = []
        count, first, rest = self._count(self.done, self.total), self.status[:1], self.status[1:]
        for part in filter(None, (count, *first, self._left(), *rest, self.title)):
            spare = NARROWEST + 1 if part == self.title else 0  # the title gives way to the bar
            if cell_len(self._line([*chosen, part])) + spare <= width:
                chosen.append(part)
        return self._line(chosen)

    def _line(self, parts: list[str]) -> str:
        status = ", ".join(part for part in self.status if part in parts)
        ahead = [part for part in parts if part not in self.status and part != self.title]
        return " ".join(filter(None, [self.title if self.title in parts else "", *ahead, status]))
