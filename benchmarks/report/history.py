"""Whether a result is older than the code that it measured."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath

import fullstride
from benchmarks.report.reading import Source
from fullstride.measure.code_digest import digest, digest_of

PACKAGE = Path(fullstride.__file__).parent
EXCLUDED = ":(exclude)"
# Where files went, by the paths that older results and commits know them by.
MOVES: dict[str, str] = json.loads(Path(__file__).with_name("moves.json").read_text())


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
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def repository(package: Path = PACKAGE) -> Path | None:
    """The repository that the package's own source lies in; None for an installed one.

    An environment may lie in another project's repository, whose history says nothing of this package.
    """
    prefix = _git(package, "rev-parse", "--show-prefix")
    return package.parent if prefix is not None and prefix.strip() == f"{package.name}/" else None


def covers(paths: tuple[str, ...], file: str) -> bool:
    """Whether a case's `paths` have a file: it is one of them or lies below one, and none that is excluded fits it."""
    excluded = (path.removeprefix(EXCLUDED) for path in paths if path.startswith(EXCLUDED))
    if any(fnmatch(file, pattern) for pattern in excluded):
        return False
    return any(file == path or file.startswith(f"{path}/") for path in paths)


class History:
    """The commits of a repository, and its code as it is.

    Args:
        root: its folder; None where there is none.
        package: the folder of the package, whose files are compared with digests.
        moves: old paths of files and their present ones.

    """

    def __init__(self, root: Path | None, package: Path = PACKAGE, moves: Mapping[str, str] = MOVES):
        """Remember where."""
        self.root = root
        self.package = package
        self.moves = moves
        self._since = cache(self._changed_since)
        self._digest = cache(self._digest_at)
        self._tree = cache(self._tree_of)

    @property
    def head(self) -> str | None:
        """The commit that results are compared with, short."""
        found = _git(self.root, "rev-parse", "--short=7", "HEAD") if self.root else None
        return found.strip() if found else None

    def freshness(self, source: Source, paths: tuple[str, ...]) -> Freshness:
        """Whether the code of `paths`, relative to the root, is what a result measured.

        By the digests that the result has of it; in older results by its commit, and where there were changes beside
        that by the commit that brought the result's file, which is no proof.
        """
        if source.code:
            return self._beside(source.code, paths)
        commit = source.commit
        if self.root is None or self.head is None:
            return Freshness("unknown", "no git repository here")
        if not commit:
            return Freshness("unknown", "its commit was not recorded")
        if not re.fullmatch("[0-9a-f]{7,40}", commit) or not self._is_there(commit):
            return Freshness("unknown", "its commit is not in this repository")
        if source.dirty is not False:
            return self._unproven(commit, source.name, paths)
        found = self._since(commit, paths)
        return _stale(found) if found else Freshness("current", "its code has not changed since")

    def _unproven(self, commit: str, name: str, paths: tuple[str, ...]) -> Freshness:
        """Of a result that was measured with changes: since its file came, if it did."""
        brought = _git(self.root, "log", "-1", "--format=%H", "--", f":(glob)**/{name}") if self.root else None
        found = self._since((brought or "").strip() or commit, paths)
        if found:
            return _stale(found)
        return Freshness("unknown", "measured with changes; its code is as when the result was committed")

    def _beside(self, code: dict[str, str], paths: tuple[str, ...]) -> Freshness:
        here = {self.moves.get(file, file): kept for file, kept in code.items()}
        own = {file: kept for file, kept in here.items() if covers(paths, file)}
        if not own:
            return Freshness("unknown", "none of its case's code was recorded")
        changed = [file for file, kept in own.items() if digest_of(self.package.parent / file) != kept]
        return (
            _stale(changed) if changed else Freshness("current", f"the code of {len(own)} files is what was measured")
        )

    def _is_there(self, commit: str) -> bool:
        assert self.root is not None
        return _git(self.root, "cat-file", "-e", f"{commit}^{{commit}}") is not None

    def _changed_since(self, commit: str, paths: tuple[str, ...]) -> list[str]:
        """Files whose code is another one at HEAD, wherever they lay at the commit."""
        then, now = self._tree(commit), self._tree("HEAD")
        at_commit = {self.moves.get(file, file): file for file in then}
        files = [file for file in sorted({*at_commit, *now}) if covers(paths, file)]
        return [file for file in files if self._differs(file, at_commit.get(file, file), commit, then, now)]

    def _differs(self, file: str, old: str, commit: str, then: Mapping[str, str], now: Mapping[str, str]) -> bool:
        if then.get(old) == now.get(file):
            return False
        return self._digest(old, commit) != self._digest(file, "HEAD")

    def _tree_of(self, revision: str) -> dict[str, str]:
        """Every file of a revision, and its blob."""
        assert self.root is not None
        listed = (_git(self.root, "ls-tree", "-r", "-z", revision) or "").split("\0")
        rows = (row.split("\t", 1) for row in listed if row)
        return {file: kept.split()[2] for kept, file in rows}

    def _digest_at(self, file: str, commit: str) -> str | None:
        assert self.root is not None
        text = _git(self.root, "show", f"{commit}:{file}")
        return None if text is None else digest(text, PurePosixPath(file).suffix)


def _stale(changed: list[str]) -> Freshness:
    first = PurePosixPath(changed[0]).name
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return Freshness("stale", f"the code of {first}{more} is another one now")
