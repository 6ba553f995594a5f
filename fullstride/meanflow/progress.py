"""The progress bar of a training run; nothing where nobody looks."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class TrainingProgress:
    """Steps done of all, squared error, images/s, s/step, time left; quiet when not a terminal."""

    def __init__(self, total: int, done: int, console: Console | None = None):
        """Make the bar of a run of `total` steps, `done` of them made before."""
        console = console or Console()
        self.bar = Progress(
            # A narrow terminal is to shorten the bar, not what follows.
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=total, completed=done, status="")

    def __enter__(self) -> "TrainingProgress":
        """Show the bar."""
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it is."""
        self.bar.stop()

    def at(self, step: int) -> None:
        """The run has made `step` steps."""
        self.bar.update(self.task, completed=step)

    def report(self, squared_error: float, images_per_second: float, seconds_per_step: float) -> None:
        """What the last steps were like."""
        status = f"sq. error {squared_error:.4f}, {images_per_second:.0f} images/s, {seconds_per_step:.3g} s/step"
        self.bar.update(self.task, status=status)
