"""Requirements that a container has to install: this package's, in the versions that are installed here."""

import re
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

from fullstride import extras
from fullstride.errors import ConfigError
from fullstride.launch.words import Words, value_of
from fullstride.runs.trackers.tracker import ROWS, TRACK

if TYPE_CHECKING:
    from packaging.requirements import Requirement

AREAS = {
    "meanflow": ("torch",),
    "bert": ("jax",),
    "llm": ("serve",),
    "benchmarks": ("torch",),
    "benchmarks bert": ("jax",),
    "benchmarks llm": ("torch", "serve"),
    "benchmarks llm-products": ("torch", "serve"),
    "benchmarks llm-token": ("torch", "serve"),
    "benchmarks meanflow-jax": ("torch", "jax"),
    "benchmarks paged-attention": ("torch", "serve"),
    "benchmarks train-step": ("torch", "serve"),
}


def extras_of(words: Words) -> tuple[str, ...]:
    """Return the extras that a command needs."""
    tracked = ("track",) if value_of(words, "track") in ROWS else ()
    area = AREAS.get(" ".join(words[:2])) or AREAS.get(words[0], ("torch",))
    return (*area, *tracked)


def requirements(words: Words) -> list[str]:
    """List pip requirements for everything that a command imports, sorted.

    Raises:
        ConfigError: if this package is only imported here, not installed, so that its requirements are unknown.

    """
    try:
        needed = {_pinned(need) for need in extras.requirements(*extras_of(words))}
        return sorted(needed | _client_of(words), key=str.lower)
    except PackageNotFoundError:
        raise ConfigError("fullstride is not installed here, only imported; run: pip install -e .") from None


def _client_of(words: Words) -> set[str]:
    """The package of a tracker that no extra brings."""
    row = ROWS.get(value_of(words, "track") or "")
    if row is None or row.install == TRACK:
        return set()
    here = extras.version(row.package)
    return {f"{row.package}=={here}" if here else row.package}


def _pinned(need: "Requirement") -> str:
    """Pin the version that is installed here, without a build's suffix such as in 2.13.0+cpu."""
    here = extras.version(need.name)
    return f"{need.name}=={re.sub(r'[+].*', '', here)}" if here else f"{need.name}{need.specifier}"
