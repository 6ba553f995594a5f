"""Whether a result is older than the code that it measured."""

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Freshness:
    """A result beside the history of its code.

    Attributes:
        status: current, stale or unknown.
        why: what was found, in a few words.

    """

    status: str
    why: str

    def __str__(self) -> str:
        """As the page writes it."""
        return f"{self.status}: {self.why}"


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it is missing or fails."""
    try:
        done = subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def repository(package: Path = PACKAGE) -> Path | None:
    """The repository that the package's own source lies in; None for an installed one.

    An environment may lie in another project's repository, whose history says nothing of this package.
    """
    return package.parent if _git(package, "rev-parse", "--show-prefix") == f"{package.name}/" else None


class History:
    """The commits of a repository.

    Args:
        root: its folder; None where there is none.

    """

    def __init__(self, root: Path | None):
        """Remember where."""
        self.root = root
        self._freshness = cache(self._look)

    @property
    def head(self) -> str | None:
        """The commit that results are compared with, short."""
        return _git(self.root, "rev-parse", "--short=7", "HEAD") if self.root else None

    def freshness(self, commit: str | None, paths: tuple[str, ...]) -> Freshness:
        """Whether any of `paths`, relative to the root, has changed since `commit`."""
        return self._freshness(commit, paths)

    def _look(self, commit: str | None, paths: tuple[str, ...]) -> Freshness:
        if self.root is None or self.head is None:
            return Freshness("unknown", "no git repository here")
        if not commit:
            return Freshness("unknown", "its commit was not recorded")
        if (
            not re.fullmatch("[0-9a-f]{7,40}", commit)
            or _git(self.root, "cat-file", "-e", f"{commit}^{{commit}}") is None
        ):
            return Freshness("unknown", "its commit is not in this repository")
        return self._since(commit, paths)

    def _since(self, commit: str, paths: tuple[str, ...]) -> Freshness:
        assert self.root is not None
        found = _git(self.root, "log", "--format=%h", f"{commit}..HEAD", "--", *paths)
        if found is None:
            return Freshness("unknown", "git cannot tell")
        if not (later := found.splitlines()):
            return Freshness("current", "code unchanged since")
        return Freshness("stale", f"{len(later)} later change{'s' * (len(later) > 1)}, last {later[0]}")
