"""Several samplers of one network, scored one after the other, with progress on stderr."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.evaluation.scores import SamplerScore
from fullstride.meanflow.sampling.samplers import EVALUATIONS
from fullstride.process.progress import Progress
from fullstride.runs.atomic_files import note


def evaluations(sampler: str, steps: int) -> int:
    """Network evaluations of an image by a sampler of fixed steps."""
    return EVALUATIONS[sampler] * steps


def score_samplers(
    evaluator: Evaluator,
    model: nn.Module,
    rows: Sequence[tuple[str, int]],
    num_classes: int,
    keep: Callable[[Tensor], None] = lambda images: None,
) -> list[SamplerScore]:
    """The scores of samplers, of which the first process shows the progress, a line for each. Collective.

    Args:
        evaluator: scores them.
        model: the network.
        rows: samplers and their steps.
        num_classes: of the network; 0 without labels.
        keep: takes the images of each sampler on the first process.

    """
    processes, scores, made = evaluator.processes, list[SamplerScore](), 0
    num = max(1, len(processes.part(evaluator.num)))
    total = num * sum(evaluations(*row) for row in rows)
    # An evaluation that a CUDA graph replays counts when its sampler ends.
    counted = model.register_forward_hook(lambda _, __, output: progress.at(progress.done + len(output)))
    try:
        with Progress("scoring", total, brief=True, shown=processes.leads) as progress:
            for place, row in enumerate(rows, 1):
                progress.status = (f"{place}/{len(rows)} {row[0]} {row[1]}",)
                score = evaluator.sampler_score(model, *row, num_classes, keep)
                made += num * evaluations(*row)
                progress.at(made)
                if score is not None:
                    scores.append(score)
                    if processes.leads:
                        plural = "s" if score.nfe != 1 else ""
                        told = f"{score.score.num_samples} samples of {score.nfe:g} evaluation{plural} each"
                        note(f"{place} of {len(rows)}, {score.name}: {told}, {score.seconds:.1f} s")
    finally:
        counted.remove()
    return scores
