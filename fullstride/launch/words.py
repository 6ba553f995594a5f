"""Words of the launched command: what a retry changes, and what another machine needs."""

import importlib.util

from fullstride.errors import ConfigError
from fullstride.extras import how_to_install

Words = list[str]
BENCHMARKS = "benchmarks"
# Commands by their old names.
OLD = {"bench": [BENCHMARKS], "experiment": [BENCHMARKS], "report": [BENCHMARKS, "report"]}
# Commands that take `resume=true`.
RESUMABLE = (["meanflow", "train"], ["bert", "train"])
# Commands that several processes can share besides a training run.
SHARED = (["meanflow", "sample"], ["meanflow", "evaluate"], ["meanflow", "consistency"])


def renamed(words: Words) -> Words:
    """Return the command by its present name: `bench`, `experiment` and `report` are commands of the benchmarks."""
    return [*OLD[words[0]], *words[1:]] if words and words[0] in OLD else words


def value_of(words: Words, key: str) -> str | None:
    """Return the value that the command gives to a setting, or None."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), None)


def resumed(words: Words) -> Words:
    """Return the command of a second attempt: it resumes the run of the first, whatever the first did about one."""
    if words[:2] not in RESUMABLE:
        return words
    return [word for word in words if word.partition("=")[0] not in ("resume", "overwrite")] + ["resume=true"]


def shared_out(words: Words, processes: int) -> Words:
    """Return the command for each of several processes that train one run.

    Raises:
        ConfigError: if several processes cannot share the command, or its settings are those of one process.

    """
    if processes == 1:
        return words
    if words[:2] in SHARED:
        return words
    if words[:2] != ["meanflow", "train"] or "--multirun" in words or "-m" in words:
        known = ", ".join(" ".join(command) for command in SHARED)
        raise ConfigError(
            f"{' '.join(words[:2])} in {processes} processes: expected meanflow train of one run, or one of {known}"
        )
    if (given := value_of(words, "distributed")) not in (None, "ddp", "fsdp"):
        raise ConfigError(
            f"distributed={given} in {processes} processes: expected distributed=ddp or fsdp, or one process"
        )
    return words if given else [*words, "distributed=ddp"]


def check_command(words: Words, processes: int = 1) -> None:
    """Check a command before any machine is asked for.

    Args:
        words: words of the command.
        processes: number of processes that will share it, on all machines together.

    Raises:
        ConfigError: if there is none, if it launches something itself, or if the settings of `meanflow train` cannot be
            or cannot be shared out among so many (checked only if PyTorch is installed).

    """
    if not words:
        raise ConfigError("launch: no command; expected one after --, as in: launch --backend local -- meanflow train")
    if words[0] in ("launch", "fullstride"):
        raise ConfigError(f"launch: expected a command without {words[0]}, such as: meanflow train epochs=20")
    if words[:2] == ["meanflow", "train"] and not {"--help", "-h"} & set(words) and _can_compose():
        # They import PyTorch, which need not be installed to launch.
        from fullstride.meanflow.config.overrides import compose
        from fullstride.meanflow.training.batch_share import check_parts

        for run in runs_of(words):
            config = compose(shared_out(run, processes)[2:])
            check_parts(config, processes, config.device)


def _can_compose() -> bool:
    return importlib.util.find_spec("torch") is not None


def runs_of(words: Words) -> list[Words]:
    """Return the command of each run of a sweep (`--multirun`: every combination), or the command itself.

    Raises:
        ConfigError: if a sweep names no values, or if PyTorch, which reads them, is not installed here.

    """
    flags = {"--multirun", "-m"}
    if words[:2] != ["meanflow", "train"] or not flags & set(words):
        return [words]
    if not _can_compose():
        raise ConfigError(f"--multirun: PyTorch is needed to expand a sweep on this machine; {how_to_install('torch')}")
    from fullstride.meanflow.config.overrides import sweep

    return [[*words[:2], *run] for run in sweep([word for word in words[2:] if word not in flags])]
