"""What the adaptive weight goes by: a sample's own error, or no less than is usual at its times."""

from fullstride.meanflow.experiments.objectives import FINER, OBJECTIVES
from fullstride.meanflow.experiments.settings import NO_LABELS, RECIPE, Settings
from fullstride.meanflow.experiments.spec import Arm, Experiment, Part

ARMS = (
    Arm("own error (adaptive)", {}),
    Arm("own or usual error, the greater (huber)", {"loss.weighting": "huber"}),
    Arm("huber, along u(z, t, t) (imf)", {"loss.weighting": "huber", "loss": "imf"}),
)


def _part(name: str, title: str, question: str, others: Settings) -> Part:
    """All of them by `RECIPE`, as long as the objectives' trainings, of which the first is one."""
    scales = {scale: settings | others for scale, settings in OBJECTIVES.items()}
    return Part(name, title, question, ARMS, RECIPE, scales, samplers=FINER)


PHASE6 = Experiment(
    "phase6",
    "What a sample is weighed by",
    "Held-out digits on a CPU, Fashion-MNIST on a GPU, ratio 0.75. The weight is (error + c)^-0.75, of the sample's "
    "own error or of no less than what others have at its times.",
    (
        _part(
            "weight",
            "Weights without labels",
            "Does a weight by its own error keep samples and solver from the pictures, as it goes after easy ones?",
            NO_LABELS,
        ),
        _part("weight-labels", "Weights with labels", "And with labels?", {}),
    ),
)
