"""What the adaptive weight goes by: a sample's own error, or no less than is usual at its times."""

from benchmarks.experiments.meanflow.objectives import part_by_recipe
from benchmarks.experiments.meanflow.settings import NO_LABELS
from benchmarks.experiments.meanflow.spec import Arm, Experiment

# The first is one of the objectives' trainings.
ARMS = (
    Arm("own error (adaptive)", {}),
    Arm("own or usual error, the greater (huber)", {"loss.weighting": "huber"}),
    Arm("huber, along u(z, t, t) (imf)", {"loss.weighting": "huber", "loss": "imf"}),
)

PHASE6 = Experiment(
    "phase6",
    "What a sample is weighed by",
    "Held-out digits on a CPU, Fashion-MNIST on a GPU, ratio 0.75. The weight is (error + c)^-0.75, of the sample's "
    "own error or of no less than what others have at its times.",
    (
        part_by_recipe(
            "weight",
            "Weights without labels",
            "Does a weight by its own error keep samples and solver from the pictures, as it goes after easy ones?",
            NO_LABELS,
            ARMS,
        ),
        part_by_recipe("weight-labels", "Weights with labels", "And with labels?", arms=ARMS),
    ),
)
