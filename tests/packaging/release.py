"""Build the release files and check them: `make release-check`, or `python -m tests.packaging.release [FOLDER]`.

A problem is a line that begins with its file. `todo` names what only a maintainer can fill in; it stops nothing.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

from fullstride import __version__

ROOT = Path(__file__).parents[2]
# Besides the package; hatchling always adds .gitignore, which it needs to build the same wheel, and PKG-INFO.
IN_SDIST = {
    ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "constraints.txt",
    "pyproject.toml",
}  # fmt: skip
INFO = f"fullstride-{__version__}.dist-info/"
IN_WHEEL = {INFO + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
SUFFIXES = {".py", ".cu", ".cuh", ".json", ".typed"}
MOST_BYTES = 64 << 10
FORGOTTEN = {"__pycache__", ".DS_Store"}
FIELDS = ("summary", "author", "keywords", "classifiers", "license_expression", "description", "requires_python")
PYTHON = "Programming Language :: Python :: "
# What a file has once the project has an address, or is released; and what is said until then.
TODO = (
    ("pyproject.toml", r"^\[project\.urls\]", "no [project.urls]; an index page could not follow README.md's links"),
    ("mkdocs.yml", r"^site_url:", "no site_url"),
    ("mkdocs.yml", r"^repo_url:", "no repo_url"),
    ("CITATION.cff", r"^repository-code:", "no repository-code"),
    ("SECURITY.md", r"https://|mailto:", "no address for private reports"),
    ("CHANGELOG.md", rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", f"no date of {__version__}"),
)


@dataclass(frozen=True)
class Built:
    """A source distribution, a wheel of the tree, and one of the unpacked source distribution."""

    sdist: Path
    wheel: Path
    again: Path


def build(folder: Path) -> Built:
    """Build into a folder, which is made; the second wheel goes into `again` there."""
    hatchling(ROOT, folder, "-t", "sdist", "-t", "wheel")
    sdist = folder / f"fullstride-{__version__}.tar.gz"
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        hatchling(Path(unpacked, f"fullstride-{__version__}"), folder / "again", "-t", "wheel")
    wheel = f"fullstride-{__version__}-py3-none-any.whl"
    return Built(sdist, folder / wheel, folder / "again" / wheel)


def hatchling(root: Path, out: Path, *targets: str) -> None:
    """Build targets of the project in `root` into `out`, with the hatchling that is installed."""
    command = [sys.executable, "-m", "hatchling", "build", *targets, "-d", str(out.absolute())]
    subprocess.run(command, cwd=root, check=True)


def sdist_files(sdist: Path) -> dict[str, bytes]:
    """Content by path, without the one folder that holds all."""
    with tarfile.open(sdist) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if not member.isdir()}
        return {name.partition("/")[2]: file.read() if file else b"" for name, file in files.items()}


def wheel_files(wheel: Path) -> dict[str, bytes]:
    """Content by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files(root: Path = ROOT) -> dict[str, bytes]:
    """The package's files in the tree, without Python's caches."""
    files = (path for path in (root / "fullstride").rglob("*") if path.is_file() and not FORGOTTEN & set(path.parts))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def of_contents(name: str, files: dict[str, bytes], others: set[str]) -> Iterator[str]:
    """Problems of an archive's contents: it must hold the package as in the tree, `others`, and nothing else."""
    package = package_files()
    for path in sorted(package.keys() | others | files.keys()):
        if path not in files:
            yield f"{name}: {path} is missing"
        elif path not in package.keys() | others:
            yield f"{name}: {path} should not be there"
        elif path in package and files[path] != package[path]:
            yield f"{name}: {path} differs from the tree's file"
    for path in sorted(files.keys() - others):
        if Path(path).suffix not in SUFFIXES:
            yield f"{name}: {path} has an unexpected suffix, expected one of {', '.join(sorted(SUFFIXES))}"
        if len(files[path]) > MOST_BYTES:
            yield f"{name}: {path} has {len(files[path])} bytes, expected at most {MOST_BYTES}"


def of_metadata(text: bytes) -> Iterator[str]:
    """Problems of the metadata, by the rules of the package index and those of this project."""
    try:
        found = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        yield from (f"METADATA: {error}" for error in group.exceptions)
        return
    yield from (f"METADATA: no {field}" for field in FIELDS if not getattr(found, field))
    for requirement in found.requires_dist or ():
        if requirement.url:
            yield f"METADATA: {requirement} is an address, which an index refuses"
    minors = {c.removeprefix(PYTHON) for c in found.classifiers or () if re.match(rf"{PYTHON}3\.", c)}
    meant = {f"3.{i}" for i in range(30) if f"3.{i}" in (found.requires_python or SpecifierSet())}
    if minors != meant:
        yield f"METADATA: classifiers name Python {sorted(minors)}, requires-python means {sorted(meant)}"


def of_versions(root: Path = ROOT) -> Iterator[str]:
    """Problems of files that name another version than the package."""
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (root / "CITATION.cff").read_text(), re.MULTILINE)
    for file, version in {"CHANGELOG.md": newest, "CITATION.cff": cited}.items():
        if (named := version and version[1]) != __version__:
            yield f"{file}: version {named}, expected {__version__}, as in fullstride/__init__.py"


def of_build(built: Built) -> Iterator[str]:
    """Return every problem of the build."""
    sdist, wheel = sdist_files(built.sdist), wheel_files(built.wheel)
    yield from of_contents("sdist", sdist, IN_SDIST)
    yield from of_contents("wheel", wheel, IN_WHEEL)
    yield from of_metadata(wheel[f"{INFO}METADATA"])
    if sdist["PKG-INFO"] != wheel[f"{INFO}METADATA"]:
        yield "sdist: its PKG-INFO is not the wheel's METADATA"
    if built.again.read_bytes() != built.wheel.read_bytes():
        yield "wheel: the one that the sdist builds differs from the tree's"


def todo(root: Path = ROOT) -> Iterator[str]:
    """Lines about fields that a maintainer has yet to fill in."""
    for file, pattern, missing in TODO:
        if not re.search(pattern, (root / file).read_text(), re.MULTILINE):
            yield f"{file}: {missing}"


def uncommitted() -> Iterator[str]:
    """Problems of a tree that no commit describes."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain"]
    for line in subprocess.run(status, check=True, capture_output=True, text=True).stdout.splitlines():
        yield f"{line[3:]}: not committed; a release is built from a commit"


def main(out: Path) -> int:
    """Build into `out`, print problems and open fields; return 1 if there is a problem."""
    shutil.rmtree(out / "again", ignore_errors=True)
    built = build(out)
    problems = [*of_build(built), *of_versions(), *uncommitted()]
    shutil.rmtree(out / "again")
    others = sorted(set(out.iterdir()) - {built.sdist, built.wheel})
    problems += [f"{path}: not part of this build, but would be uploaded; remove it" for path in others]
    lines = [f"{path}  {path.stat().st_size:,} bytes" for path in (built.sdist, built.wheel)]
    lines += [f"before an upload: {line}" for line in todo()]
    lines += [f"problem: {line}" for line in problems] or ["contents, metadata and versions are right"]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or [ROOT / "dist"])))
