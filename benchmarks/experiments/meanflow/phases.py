"""The experiments on MeanFlow that `phases.toml` declares, from overfitting to weights."""

from typing import Any

from benchmarks.experiments.meanflow.spec import DECLARED, SCALES, Arm, Experiment, Part, merged


def _part(given: dict[str, Any]) -> Part:
    """Return a declared part; its arms, scales and samplers are named."""
    scales, samplers = DECLARED["scales"][given["scales"]], DECLARED["samplers"][given["samplers"]]
    return Part(
        name=given["name"],
        title=given["title"],
        question=given["question"],
        arms=tuple(Arm(name, merged(settings)) for name, settings in DECLARED["arms"][given["arms"]].items()),
        settings=merged(given["settings"]),
        scales={scale: merged([*scales[scale], *given.get("at_every_scale", ())]) for scale in SCALES},
        samplers=tuple((kind, count) for kind, counts in samplers.items() for count in counts or [None]),
    )


PHASES = {
    name: Experiment(name, given["title"], given["about"], tuple(map(_part, given["parts"])))
    for name, given in DECLARED["experiments"].items()
}
