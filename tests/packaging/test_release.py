"""Release files hold what a user needs and nothing else, and the check finds what is wrong."""

import dataclasses
import shutil
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

from tests.packaging import release
from tests.packaging.release import INFO, ROOT, Built, sdist_files, wheel_files


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    return release.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(built) -> dict[str, bytes]:
    return sdist_files(built.sdist)


@pytest.fixture(scope="module")
def wheel(built) -> dict[str, bytes]:
    return wheel_files(built.wheel)


@pytest.fixture
def metadata(wheel) -> Message:
    return BytesParser().parsebytes(wheel[f"{INFO}METADATA"])


def test_what_is_built_has_no_problem(built):
    assert list(release.of_build(built)) == []
    assert list(release.of_versions()) == []


def test_sources_of_kernels_templates_and_the_mark_of_types_are_in_the_wheel(wheel):
    assert {Path(name).suffix for name in wheel if name.startswith("fullstride/")} == release.SUFFIXES


def test_the_sdist_has_no_tests_results_or_pages(sdist):
    """README.md is a name that other folders have, too."""
    assert {name.partition("/")[0] for name in sdist} == {"fullstride", *release.IN_SDIST}
    assert [name for name in sdist if name.endswith("README.md")] == ["README.md"]
    assert sdist["constraints.txt"] == (ROOT / "constraints.txt").read_bytes()


def test_what_lies_about_in_the_tree_is_not_packed(tmp_path, built):
    """A copy with compiled files, a run and a result in it builds the same wheel, byte for byte."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "fullstride", copy / "fullstride", ignore=shutil.ignore_patterns("__pycache__"))
    for name in release.IN_SDIST - {"PKG-INFO"}:
        shutil.copy(ROOT / name, copy)
    for name in ("fullstride/__pycache__/a.cpython-311.pyc", "runs/a/config.json", "benchmarks/results/fullstride"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"made")
    release.hatchling(copy, tmp_path, "-t", "sdist", "-t", "wheel")
    assert (tmp_path / built.wheel.name).read_bytes() == built.wheel.read_bytes()
    assert sdist_files(tmp_path / built.sdist.name) == sdist_files(built.sdist)


def test_the_metadata_are_those_of_the_project(metadata, wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Author"] == project["authors"][0]["name"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    assert set(metadata["Keywords"].split(",")) == set(project["keywords"])
    assert "fullstride = fullstride.cli:main" in wheel[f"{INFO}entry_points.txt"].decode()
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_no_address_is_claimed_that_the_release_check_misses(metadata):
    assert bool(metadata.get_all("Project-URL")) == all("[project.urls]" not in line for line in release.todo())


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("fullstride/cli/app.py", None, "fullstride/cli/app.py is missing"),
        ("fullstride/cli/app.py", b"", "fullstride/cli/app.py differs from the tree's file"),
        ("tests/README.md", b"", "tests/README.md should not be there"),
        ("fullstride/__pycache__/errors.cpython-311.pyc", b"", "has an unexpected suffix"),
        ("fullstride/fits.json", bytes(release.MOST_BYTES + 1), f"has {release.MOST_BYTES + 1} bytes"),
        ("LICENSE", None, "LICENSE is missing"),
    ],
)
def test_wrong_contents_are_seen(sdist, path, content, problem):
    files = {name: data for name, data in sdist.items() if name != path} | ({} if content is None else {path: content})
    assert any(problem in line for line in release.of_contents("sdist", files, release.IN_SDIST))


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        (b"Author: The fullstride maintainers\n", b"", "no author"),
        (b"Python :: 3.13\n", b"Python :: 3.10\n", "classifiers name Python"),
        (b"Expression: Apache-2.0\n", b"Expression: Apache 2\n", "Apache 2"),
        (b"Requires-Dist: numpy>=1.26\n", b"Requires-Dist: numpy @ https://example.com/n.whl\n", "an index refuses"),
        (b"Requires-Dist: numpy>=1.26\n", b"Requires-Dist: numpy>=\n", "numpy>="),
    ],
)
def test_wrong_metadata_are_seen(wheel, right, wrong, problem):
    text = wheel[f"{INFO}METADATA"]
    assert right in text
    assert any(problem in line for line in release.of_metadata(text.replace(right, wrong)))


def test_a_wheel_that_the_sdist_does_not_build_is_seen(built, tmp_path):
    other = shutil.copy(built.again, tmp_path)
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("fullstride/more.py", "")
    (problem,) = release.of_build(dataclasses.replace(built, again=Path(other)))
    assert "the sdist builds differs" in problem


@pytest.mark.parametrize(
    ("file", "text"), [("CHANGELOG.md", "# Changes\n\n## 9.9.9 - unreleased\n"), ("CITATION.cff", "version: 9.9.9\n")]
)
def test_another_version_in_a_file_is_seen(tmp_path, file, text):
    for name in ("CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / file).write_text(text)
    (problem,) = release.of_versions(tmp_path)
    assert problem.startswith(f"{file}: version 9.9.9, expected ")


def test_what_is_left_to_fill_in_is_named_until_it_is_there(tmp_path):
    files = {file: "" for file, _, _ in release.TODO}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert len(list(release.todo(tmp_path))) == len(release.TODO)
    filled = {
        "pyproject.toml": '[project.urls]\nRepository = "https://example.com"\n',
        "mkdocs.yml": "site_name: a\nsite_url: https://example.com\nrepo_url: https://example.com\n",
        "CITATION.cff": "version: 1\nrepository-code: https://example.com\n",
        "SECURITY.md": "Report it at https://example.com.\n",
        "CHANGELOG.md": f"# Changes\n\n## {release.__version__} - 2030-01-31\n",
    }
    for name, text in filled.items():
        (tmp_path / name).write_text(text)
    assert list(release.todo(tmp_path)) == []
