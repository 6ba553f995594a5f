"""`fullstride meanflow average`: an average of any length out of the power-function averages of a run's checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import (
    Tensors,
    checkpoints,
    ema_group,
    find_checkpoint,
    read_group,
    read_manifest,
    write_checkpoint,
)
from fullstride.meanflow.config.commands import AverageOptions
from fullstride.runs.next_steps import command, say, show_next_steps
from fullstride.step.torch import Power
from fullstride.step.torch.ema.power import Stored, combination

FARTHEST = 0.1  # of a profile from the wanted one, relative; beyond it another average would be called by its name


def averaged(run: Path, width: float, step: int | None = None) -> tuple[Tensors, Path, float]:
    """Averaged weights of a relative width at the end of a training, or at one of its checkpoints.

    Args:
        run: the run's folder, with checkpoints of a run with `ema.widths`.
        width: relative width of the average.
        step: step of the checkpoint at which it ends; None for the newest.

    Returns:
        The tensors, the checkpoint at which the average ends, and the relative distance of its profile from the wanted
        one.

    Raises:
        ConfigError: if the run has no such checkpoint or no power-function averages, or theirs cannot be combined to
            this one within a tenth.

    """
    wanted, manifests = _power(width), {path: read_manifest(path) for path in checkpoints(run)}
    last = _last(run, manifests, step)
    places = [
        (path, (float(manifest["step"]), Power(each)))
        for path, manifest in manifests.items()
        for each in manifest["config"]["ema"].get("widths", [])
        if manifest["step"] <= manifests[last]["step"]
    ]
    if not places:
        raise ConfigError(f"{run}: no averages by power functions, expected a run with ema.widths=[0.05,0.1]")
    stored: list[Stored] = [at for _, at in places]
    factors, distance = combination(stored, (float(manifests[last]["step"]), wanted))
    if distance > FARTHEST:
        kept = ", ".join(sorted({str(power) for _, power in stored}))
        raise ConfigError(
            f"--width {width}: the nearest combination of {len(places)} averages ({kept}) differs from it by "
            f"{distance:.0%}, expected at most {FARTHEST:.0%}; train with keep=0 and a smaller save_every, or take a "
            "width nearer to theirs"
        )
    # One after another: a run may have kept hundreds.
    total: Tensors = {}
    for factor, (path, (_, power)) in zip(factors.tolist(), places, strict=True):
        for name, tensor in read_group(path, ema_group(power)).items():
            total[name] = total.get(name, 0.0) + factor * tensor.double() if _mean(tensor) else tensor
    like = read_group(last, ema_group(places[-1][1][1]))
    return {name: tensor.to(like[name].dtype) for name, tensor in total.items()}, last, distance


def _mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _power(width: float) -> Power:
    try:
        return Power(width)
    except ValueError as error:
        raise ConfigError(f"--width {width}: {error}") from None


def _last(run: Path, manifests: Mapping[Path, Mapping[str, Any]], step: int | None) -> Path:
    if step is None:
        return find_checkpoint(run)
    for path, manifest in manifests.items():
        if manifest["step"] == step:
            return path
    steps = ", ".join(str(manifest["step"]) for manifest in manifests.values()) or "none"
    raise ConfigError(f"--step {step}: {run} has checkpoints of the steps {steps}; give one of them")


def average_command(run: Path, options: AverageOptions) -> Path:
    """Write a checkpoint with an averaged network, which `sample`, `evaluate`, `export` and `init_from` take.

    Raises:
        ConfigError: as `averaged`, or if the folder has checkpoints.

    """
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"--out {options.out}: not empty, expected a new folder")
    tensors, last, distance = averaged(run, options.width, options.step)
    manifest = {key: value for key, value in read_manifest(last).items() if key not in ("format", "step", "files")}
    config = manifest["config"] | {"ema": manifest["config"]["ema"] | {"decays": [], "widths": [options.width]}}
    step = read_manifest(last)["step"]
    made = write_checkpoint(
        options.out / "checkpoints", step, {ema_group(Power(options.width)): tensors}, manifest | {"config": config}
    )
    say(f"averaged at step {step}, profile within {distance:.2%}: {made}")
    show_next_steps({made: "the averaged network"}, {command("meanflow", "sample", made): "generate images"})
    return made
