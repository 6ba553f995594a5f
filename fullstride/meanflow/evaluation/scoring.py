"""Several samplers of one network, scored one after the other, with progress on stderr."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor, nn

from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.evaluation.scores import SamplerScore
from fullstride.meanflow.sampling.samplers import EVALUATIONS
from fullstride.runs.atomic_files import note

# Seconds after which a line shows progress where there is no terminal.
LINE_EVERY = 30.0


def evaluations(sampler: str, steps: int) -> int:
    """Network evaluations of an image by a sampler of fixed steps."""
    return EVALUATIONS[sampler] * steps


class ScoringProgress:
    """A bar on a terminal, which counts network evaluations; lines elsewhere. Each sampler gets a line in both."""

    def __init__(self, rows: Sequence[tuple[str, int]], num: int, console: Console | None = None):
        """Begin.

        Args:
            rows: samplers and their steps.
            num: images that this process makes with each.
            console: where to; stderr unless given.

        """
        self.rows, self.num = rows, num
        self.place, self._said = 0, time.monotonic()
        console = console or Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,  # it would end up on stderr
        )
        self.task = self.bar.add_task("scoring", total=self._made_by(len(rows)))

    def _made_by(self, place: int) -> int:
        """Evaluations of all images by the first samplers."""
        return self.num * sum(evaluations(*row) for row in self.rows[:place])

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """A block in which evaluations of the network are counted; one replayed by a CUDA graph counts at the end."""
        handle = model.register_forward_hook(lambda _, __, output: self._evaluated(len(output)))
        try:
            with self.bar:
                yield
        finally:
            handle.remove()

    def begin(self, place: int) -> None:
        """Sampler `place` of the rows begins, from 0 on."""
        self.place = place
        name, steps = self.rows[place]
        self.bar.update(self.task, description=f"{place + 1}/{len(self.rows)} {name} {steps}")

    def _evaluated(self, images: int) -> None:
        self.bar.advance(self.task, images)
        if self.bar.disable and time.monotonic() - self._said > LINE_EVERY:
            done = (self.bar.tasks[self.task].completed - self._made_by(self.place)) / self.num
            name, steps = self.rows[self.place]
            self._say(f"{name} {steps}: {done:.0f} of {evaluations(name, steps)} evaluations made")

    def scored(self, score: SamplerScore) -> None:
        """The sampler that began last has its score."""
        self.bar.update(self.task, completed=self._made_by(self.place + 1))
        plural = "s" if score.nfe != 1 else ""
        made = f"{score.score.num_samples} samples of {score.nfe:g} evaluation{plural} each"
        self._say(f"{score.name}: {made}, {score.seconds:.1f} s")

    def _say(self, line: str) -> None:
        note(f"{self.place + 1} of {len(self.rows)}, {line}")
        self._said = time.monotonic()


def score_samplers(
    evaluator: Evaluator,
    model: nn.Module,
    rows: Sequence[tuple[str, int]],
    num_classes: int,
    keep: Callable[[Tensor], None] = lambda images: None,
) -> list[SamplerScore]:
    """The scores of samplers, of which the first process shows the progress. Collective.

    Args:
        evaluator: scores them.
        model: the network.
        rows: samplers and their steps.
        num_classes: of the network; 0 without labels.
        keep: takes the images of each sampler on the first process.

    """
    score = lambda sampler, steps: evaluator.sampler_score(model, sampler, steps, num_classes, keep)  # noqa: E731
    if not evaluator.processes.leads:
        return [found for row in rows if (found := score(*row))]
    scores, progress = [], ScoringProgress(rows, max(1, len(evaluator.processes.part(evaluator.num))))
    with progress.watching(model):
        for place, row in enumerate(rows):
            progress.begin(place)
            if found := score(*row):
                scores.append(found)
                progress.scored(found)
    return scores
