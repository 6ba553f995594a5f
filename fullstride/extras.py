"""Requirements of each area of the package, those that are not installed, and the extra that provides them."""

import itertools
from functools import cache
from importlib import metadata
from traceback import walk_tb
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def version(package: str) -> str | None:
    """Return the installed version of a package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    """Return a command that installs the missing packages of an extra.

    It names a folder, not the project: an index of packages may have somebody else's under that name.
    """
    return f"run, from the root of a clone: pip install '.[{extra}]'"


@cache
def requirements(*extras: str) -> "list[Requirement]":
    """Return the requirements of this package and of some of its extras, from its own metadata.

    Raises:
        PackageNotFoundError: if this package is not installed, only imported.

    """
    lines = metadata.requires("fullstride") or []
    from packaging.requirements import Requirement

    found = []
    for need in map(Requirement, lines):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found += requirements(*need.extras) if need.name == "fullstride" else [need]
    return found


class Area(NamedTuple):
    """Area of modules that need the same packages.

    Attributes:
        module: how their names begin.
        extra: brings what they need.
        part: the packages of the extra that they need, if they do not need all of them.

    """

    module: str
    extra: str
    part: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the needed packages that are not installed, by their distribution names.

        Raises:
            PackageNotFoundError: if fullstride is not installed, only imported: nobody knows what it needs.

        """
        needed = [need.name for need in requirements(*() if self.part else (self.extra,))]
        return [name for name in dict.fromkeys([*needed, *self.part]) if version(name) is None]


# Packages of this project; benchmarks lie beside the library, in a clone.
OWN = ("fullstride", "benchmarks")
# The first that fits a module is its area.
AREAS = (
    Area("fullstride.jvp", "torch", ("torch",)),
    Area("fullstride.step.torch", "torch", ("torch",)),
    Area("fullstride.meanflow", "torch"),
    Area("fullstride.step.jax", "jax", ("equinox", "jax", "optax", "orbax-checkpoint")),
    Area("fullstride.bert", "jax"),
    Area("fullstride.llm.server", "serve"),
    Area("fullstride.llm", "llm"),
    Area("fullstride.launch.modal", "launch", ("modal",)),
    Area("fullstride.launch.skypilot", "launch", ("pyyaml",)),
    Area("fullstride.launch.slurm", "launch", ("submitit",)),
    Area("fullstride.launch", "launch"),
    Area("benchmarks.cases.jvp", "torch", ("torch",)),
    Area("benchmarks.cases.step_jax", "jax", ("equinox", "jax", "optax", "orbax-checkpoint")),
    Area("benchmarks.cases.bert", "jax"),
    Area("benchmarks.experiments.bert", "jax"),
    Area("benchmarks.cases.llm", "serve"),
    Area("benchmarks.report", "report", ("jinja2", "matplotlib", "pandas")),
    Area("benchmarks", "torch"),
    Area("fullstride", "torch", ("torch",)),
)
# What several areas share: of an error that passed through one of them, too, they say less.
SHARED = AREAS[-2:]


def area_of(module: str) -> Area:
    """Return the area that a module of this package belongs to; a command has the area of the module it runs."""
    if module == "fullstride.cli.llm_serve":
        module = "fullstride.llm.server"
    module = module.replace("fullstride.cli.", "fullstride.", 1)
    return next(area for area in AREAS if module.startswith(area.module))


def advice(error: ModuleNotFoundError) -> str | None:
    """Describe what the area of a failed import lacks, and what to do.

    Returns:
        One line; None if the import is of a module that a user named, or no extra would bring what is lacking.

    """
    modules = _modules(error)
    behind = itertools.takewhile(lambda module: not _is_own(module), reversed(modules))
    if "importlib" in behind:  # which imports by name; a library in between may import another, as jaxtyping does jax
        return None
    for area in _areas(modules):
        try:
            lacking = area.missing()
        except metadata.PackageNotFoundError:
            lacking = [str(error.name)]
        if lacking:
            names = ", ".join(lacking)
            return f"{area.module} needs packages that are not installed: {names}; {how_to_install(area.extra)}"
    return None


def extra_for(error: ModuleNotFoundError) -> str:
    """Return the extra of the area that an import failed in."""
    return _areas(_modules(error))[0].extra


def _modules(error: BaseException) -> list[str]:
    """Return the modules that an error passed through, from the outermost to the one that raised it."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]


def _is_own(module: str) -> bool:
    return module.split(".")[0] in OWN


def _areas(modules: list[str]) -> list[Area]:
    """Return the areas of this package's own modules, in their order; areas that others share come last."""
    found = dict.fromkeys(area_of(module) for module in modules if _is_own(module))
    return [*(area for area in found if area not in SHARED), *(area for area in SHARED if area in found), SHARED[-1]]
