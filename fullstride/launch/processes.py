"""Command lines that start a command as processes."""

import sys
from pathlib import Path

import fullstride
from fullstride.errors import ConfigError
from fullstride.launch.words import BENCHMARKS, Words, shared_out


def single_command(words: Words, python: str = sys.executable) -> list[str]:
    """Command line of one process."""
    return [python, "-m", *_module(words)]


def _module(words: Words) -> Words:
    return words if words[0] == BENCHMARKS else ["fullstride", *words]


def sources(words: Words) -> dict[str, Path]:
    """Folders of code that a command needs elsewhere, by package.

    Raises:
        ConfigError: for benchmarks without a clone, in which they lie next to the library.

    """
    package = Path(fullstride.__file__).parent
    if words[0] != BENCHMARKS:
        return {"fullstride": package}
    beside = package.parent / BENCHMARKS
    if not (beside / "__main__.py").is_file():
        raise ConfigError(f"launch: {BENCHMARKS} lie next to the library in a clone, but {beside} does not exist")
    return {"fullstride": package, BENCHMARKS: beside}


def torchrun_command(
    words: Words,
    processes: int,
    *,
    restarts: int,
    nodes: int = 1,
    meeting: str = "",
    job: str = "fullstride",
    python: str = sys.executable,
) -> list[str]:
    """Return the command line for `processes` on each of `nodes` machines, by torchrun if there are several.

    Args:
        words: words of the command.
        processes: number of processes per machine.
        restarts: number of times that torchrun restarts all after one has failed; they resume.
        nodes: number of machines; each runs this command line.
        meeting: HOST:PORT of one of the machines, at which several meet.
        job: name of this job among those that meet there.
        python: path of the interpreter.

    """
    if processes * nodes == 1:
        return single_command(words, python)
    torchrun = [
        python,
        "-m",
        "fullstride.launch.elastic",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
    ]
    if nodes == 1:
        torchrun.append("--standalone")
    else:
        torchrun += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", f"--rdzv-id={job}"]
    # Behind -- nothing is taken for an option of torchrun's own.
    return [*torchrun, "-m", "--", *_module(shared_out(words, processes * nodes))]
