"""What a container has to install: this package's requirements, in the versions that are installed here."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from fullstride.errors import ConfigError
from fullstride.launch.words import Words, value_of

AREAS = {
    "meanflow": ("torch",),
    "bert": ("jax",),
    "llm": ("serve",),
    "bench": ("torch", "serve"),
    "experiment bert": ("jax",),
}


def extras_of(words: Words) -> tuple[str, ...]:
    """The extras that a command needs."""
    tracked = ("track",) if value_of(words, "track") == "trackio" else ()
    area = AREAS.get(" ".join(words[:2])) or AREAS.get(words[0], ("torch",))
    return (*area, *tracked)


def requirements(words: Words) -> list[str]:
    """pip's words for everything that a command imports, sorted.

    Raises:
        ConfigError: if this package was not installed, so that nobody knows what it needs.

    """
    try:
        return sorted(set(_of_extras(("", *extras_of(words)))), key=str.lower)
    except PackageNotFoundError:
        raise ConfigError("fullstride is not installed here, only imported; run: pip install -e .") from None


def _of_extras(extras: tuple[str, ...]) -> list[str]:
    found = []
    for line in requires("fullstride") or []:
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        found += _of_extras(tuple(need.extras)) if need.name == "fullstride" else [_pinned(need)]
    return found


def _pinned(need: Requirement) -> str:
    """The version that is installed here; a build's own mark, as in 2.13.0+cpu, is another machine's business."""
    try:
        here = re.sub(r"\+.*", "", version(need.name))
    except PackageNotFoundError:
        return f"{need.name}{need.specifier}"
    return f"{need.name}=={here}"
