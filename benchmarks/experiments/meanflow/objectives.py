"""Objectives beside each other: how near one step comes to a solver of the same weights."""

from benchmarks.experiments.meanflow.settings import FEW, LONG, NO_LABELS, RECIPE, SHORT, Settings
from benchmarks.experiments.meanflow.spec import Arm, Experiment, Part, Sampler

ALONG = (
    Arm("along e - x (meanflow)", {}),
    Arm("along u(z, t, t) (imf)", {"loss": "imf"}),
    Arm("along the average's u(z, t, t) (imf_ema)", {"loss": "imf_ema"}),
)
FINER: tuple[Sampler, ...] = (*FEW, ("euler", 50))
# On a GPU the length of phase4, whose own training with labels is then one of these.
OBJECTIVES = LONG | {"gpu": SHORT["gpu"]}


def part_by_recipe(
    name: str, title: str, question: str, others: Settings | None = None, arms: tuple[Arm, ...] = ALONG
) -> Part:
    """These arms by `RECIPE`, with other settings at every scale."""
    scales = {scale: settings | (others or {}) for scale, settings in OBJECTIVES.items()}
    return Part(name, title, question, arms, RECIPE, scales, samplers=FINER)


PHASE5 = Experiment(
    "phase5",
    "Objectives",
    "Held-out digits on a CPU, Fashion-MNIST on a GPU, ratio 0.75. All regress u on the same velocities and differ in "
    "what u is differentiated along: the sample's velocity, the network's own, or that of its average.",
    (
        part_by_recipe(
            "objective",
            "Objectives without labels",
            "How near does one step come to a solver of the same weights where no label says what to draw?",
            NO_LABELS,
        ),
        part_by_recipe("objective-labels", "Objectives with labels", "And where one does?"),
        part_by_recipe(
            "objective-unweighted",
            "Objectives without labels, all samples weighted alike",
            "Is it what the weight (error + c)^-p leaves out that keeps one step from the solver?",
            NO_LABELS | {"loss.weighting_power": "0"},
        ),
        part_by_recipe(
            "objective-constant",
            "Objectives without labels, at a constant rate",
            "What does the rate's fall to zero do to one step and to the solver?",
            NO_LABELS | {"optimizer.decay": "constant"},
        ),
    ),
)
