"""The wheel has what the package needs, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from fullstride import __version__

ROOT = Path(__file__).parents[2]
FORGOTTEN = {"__pycache__", ".DS_Store"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True)
    (built,) = out.glob("*.whl")
    assert built.name == f"fullstride-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(built)


def _package() -> dict[str, bytes]:
    files = (path for path in (ROOT / "fullstride").rglob("*") if path.is_file() and not FORGOTTEN & set(path.parts))
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in files}


def test_the_wheel_has_every_file_of_the_package_as_it_is(wheel):
    found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == _package()


def test_sources_of_kernels_templates_and_kept_fits_are_among_them(wheel):
    kinds = {Path(name).suffix for name in wheel.namelist() if name.startswith("fullstride/")}
    assert {".py", ".cu", ".cuh", ".html", ".css", ".json"} <= kinds


def test_the_metadata_have_licence_extras_and_the_command(wheel):
    folder = f"fullstride-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "fullstride = fullstride.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_citation_names_this_version():
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
