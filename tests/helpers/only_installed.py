"""Python processes that see only fullstride and the packages that some requirements install."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED = {canonicalize_name(each.name) for each in metadata.distributions()}
_HIDE = """
import json, re, sys
from importlib.machinery import PathFinder

MODULES, PACKAGES = map(set, json.loads(sys.argv.pop(1)))

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in MODULES else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(context):
        hidden = re.sub("[-_.]+", "-", context.name or "").lower() in PACKAGES
        return () if hidden else PathFinder.find_distributions(context)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def lines_of(extra: str) -> list[str]:
    """Requirements of fullstride with an extra, as pyproject.toml lists them; of itself alone for ""."""
    return PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])


def brought_by(lines: list[str], extras: tuple[str, ...] = ("",), deep: bool = True) -> set[str]:
    """Distributions that requirements bring, as far as they are installed here; if deep, what those require, too."""
    found = set()
    for need in map(Requirement, lines):
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if need.name == "fullstride":
            found |= brought_by([line for extra in need.extras for line in lines_of(extra)], deep=deep)
        elif (name := canonicalize_name(need.name)) in INSTALLED - found:
            found |= {name} | (brought_by(metadata.requires(name) or [], ("", *need.extras)) if deep else set())
    return found


def run_only(lines: list[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that sees only the packages that requirements install."""
    kept = brought_by(lines)
    providers = metadata.packages_distributions()
    modules = [name for name, by in providers.items() if not kept & set(map(canonicalize_name, by))]
    hidden = json.dumps([modules, sorted(INSTALLED - kept - {"fullstride"})])
    command = [sys.executable, "-c", _HIDE + code, hidden, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
