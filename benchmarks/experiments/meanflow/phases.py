"""The experiments on MeanFlow, as declarations: overfitting, sanity checks, ablations, objectives, weights."""

from benchmarks.experiments.meanflow.spec import (
    FEW,
    IMAGENET,
    LONG,
    NO_LABELS,
    RECIPE,
    SAMPLED_FAST,
    SHORT,
    SMOKE,
    TINY,
    V0,
    Arm,
    Experiment,
    Part,
    Sampler,
    Settings,
)

# A handful of pictures, learned by heart: one (t, r) a batch, and the weight (error + c)^-0.5.
OVERFIT: Settings = {
    "data": "deterministic",
    "loss.use_batch_time": "true",
    "loss.weighting_power": "0.5",
    "loss.weighting_eps": "1e-3",
    "ema.decays": "[0.999]",
}
OVERFIT_SCALES = {
    "smoke": SMOKE,
    "cpu": TINY
    | {"data.batch_size": "64", "epochs": "15", "optimizer.lr": "1.5e-3", "optimizer.warmup_steps": "30"}
    | {"optimizer.decay": "cosine", "evaluation.num_samples": "640", "device": "cpu"},
    "gpu": {"model": "unet", "model.class_conditional": "true", "data.batch_size": "128", "epochs": "200"}
    | {"optimizer.lr": "1e-4", "precision": "bf16", "backend": "compile+graph", "device": "cuda"},
}
PLAIN: Settings = {"loss.weighting_power": "0.0"}
OVERFIT_ARMS = (
    Arm("flow matching, MSE", {"loss": "mse"} | PLAIN),
    Arm("ratio 0", {"loss.meanflow_ratio": "0"}),
    Arm("ratio 0.25", {"loss.meanflow_ratio": "0.25"}),
)

PHASE2 = Experiment(
    "phase2",
    "Overfitting ten pictures",
    "Each of ten labels has one picture, the same for training and scoring: the loss and the network can learn them "
    "by heart, or something is wrong. Says nothing about generalisation.",
    (
        Part(
            "overfit",
            "Ten pictures by heart: flow matching, MeanFlow's weights alone, MeanFlow",
            "Does one step of a network trained with MeanFlow's target reach the picture, and that of flow matching "
            "less well?",
            OVERFIT_ARMS,
            OVERFIT,
            OVERFIT_SCALES,
            samplers=(("meanflow", 1), ("euler", 16)),
        ),
    ),
)
PHASE3 = Experiment(
    "phase3",
    "Sanity checks",
    "MeanFlow's few steps beside ODE solvers of the same weights at equal numbers of network evaluations (NFE); "
    "several pictures a label; training without adaptive weights.",
    (
        Part(
            "solvers",
            "MeanFlow's steps and ODE solvers of the same network, by network evaluations",
            "Which way of sampling comes closest to the held-out images for so many evaluations of one network?",
            (Arm("ratio 0.75", {}),),
            RECIPE,
            LONG | {"gpu": LONG["gpu"] | SAMPLED_FAST},
            samplers=(
                *(("meanflow", steps) for steps in (1, 2, 4, 8, 16)),
                *(("euler", steps) for steps in (1, 2, 4, 8, 10, 16, 50, 100)),
                *(("heun", steps) for steps in (1, 2, 4, 8)),
                *(("rk4", steps) for steps in (1, 10, 50, 100)),
                ("dopri5", None),
            ),
        ),
        Part(
            "multiclass",
            "Four labels of ten pictures each",
            "Do both converge where a label does not say which picture it is?",
            (Arm("ratio 0", {"loss.meanflow_ratio": "0"}), Arm("ratio 0.25", {"loss.meanflow_ratio": "0.25"})),
            OVERFIT | {"data": "multiclass"},
            OVERFIT_SCALES,
            samplers=(("meanflow", 1), ("euler", 16)),
        ),
        Part(
            "weighting",
            "Ten pictures by heart, with and without the adaptive weight, ratio 0.25",
            "Does the weight hide a target that is wrong?",
            (Arm("weighted, power 0.5", {}), Arm("not weighted", PLAIN)),
            OVERFIT | {"loss.meanflow_ratio": "0.25"},
            OVERFIT_SCALES,
        ),
    ),
)
PHASE4 = Experiment(
    "phase4",
    "Ablations on real pictures",
    "Held-out digits on a CPU, Fashion-MNIST on a GPU; every arm has the same network, steps and seeds.",
    (
        Part(
            "ratio",
            "Share of the samples with r != t; t and r ordered draws of one law, logit-normal(-2, 2)",
            "How much of the batch must be trained on average velocities for one step to work, and what does it cost "
            "the solver?",
            tuple(Arm(f"ratio {ratio}", {"loss.meanflow_ratio": ratio}) for ratio in ("0", "0.25", "0.5", "0.75")),
            RECIPE | V0,
            SHORT,
            samplers=FEW,
        ),
        Part(
            "times",
            "Laws of t and r, ratio 0.75",
            "Which law of the times serves one step?",
            (
                Arm("logit-normal(-0.4, 1), ordered", IMAGENET),
                Arm("logit-normal(-2, 2), ordered", V0),
                Arm("t (-0.6, 1.6), r (-4, 1.6)", {}),
                Arm("uniform, ordered", {"loss.time_law": "uniform"}),
            ),
            RECIPE,
            SHORT,
            samplers=FEW,
        ),
        Part(
            "power",
            "Power of the adaptive weight, ratio 0.75, t (-0.6, 1.6), r (-4, 1.6)",
            "Which power of (error + c)^-p serves one step?",
            tuple(Arm(f"power {power}", {"loss.weighting_power": power}) for power in ("0", "0.5", "0.75", "1")),
            RECIPE,
            SHORT,
            samplers=FEW,
        ),
    ),
)
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
    """Return a part with these arms by `RECIPE`, with other settings at every scale."""
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
# The first is one of the objectives' trainings.
WEIGHTED = (
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
            WEIGHTED,
        ),
        part_by_recipe("weight-labels", "Weights with labels", "And with labels?", arms=WEIGHTED),
    ),
)
PHASES = {phase.name: phase for phase in (PHASE2, PHASE3, PHASE4, PHASE5, PHASE6)}
