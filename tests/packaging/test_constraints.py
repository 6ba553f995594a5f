"""The pins of constraints.txt resolve from the package index alone, without a local folder of wheels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from fullstride import __version__

ROOT = Path(__file__).parents[2]
# Each Python and each processor; the first Python is Debian 12's.
TARGETS = [
    ("3.11.2", "x86_64-manylinux_2_28"),
    ("3.11.2", "aarch64-manylinux_2_28"),
    ("3.12", "x86_64-manylinux_2_28"),
    ("3.13", "aarch64-manylinux_2_28"),
]
# What would change where packages come from: settings of this machine.
LOCAL = "PIP_FIND_LINKS", "PIP_CONSTRAINT", "UV_FIND_LINKS", "UV_CONSTRAINT"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in LOCAL}
ENVIRONMENT |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_HTTP_TIMEOUT": "120"}
# What pip and uv say if the index, reached a moment ago, stops answering.
UNREACHABLE = re.compile(r"error sending request|operation timed out|Connection ?(Error|reset)|Read ?timed? ?out", re.I)


def _run(*line: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, line)], capture_output=True, text=True, env=ENVIRONMENT | more, cwd=ROOT)


def _resolved(*line: str | Path) -> str:
    """Output of a command that resolves; the test is skipped if the index stops answering despite the retries."""
    done = _run(*line)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index stopped answering: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _versions(listed: str) -> dict[str, str]:
    """Name and version of each line `name==version`."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", listed, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


PINS = _versions((ROOT / "constraints.txt").read_text())


@pytest.fixture(scope="module")
def index() -> None:
    """Skip if no package index can be reached."""
    found = _run(sys.executable, "-m", "pip", "index", "versions", "torchdiffeq", PIP_RETRIES="0")
    if found.returncode:
        pytest.skip(f"no package index can be reached: {found.stderr.strip().splitlines()[-1]}")


@pytest.mark.thorough
def test_pip_resolves_what_make_installs_with_this_interpreter(index, tmp_path):
    report = tmp_path / "report.json"
    options = "install", "--dry-run", "--quiet", "--ignore-installed", "--report", report, "-c", "constraints.txt"
    _resolved(sys.executable, "-m", "pip", *options, "-e", ".[torch,jax,serve,clients,dev]")
    chosen = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    found = _versions("\n".join(f"{package['name']}=={package['version']}" for package in chosen))
    assert found.pop("fullstride") == __version__
    assert found.items() <= PINS.items()
    assert {"torch", "triton", "jax", "pytest"} <= found.keys()


@pytest.mark.parametrize(
    ("python", "platform"), [TARGETS[0], *(pytest.param(*each, marks=pytest.mark.thorough) for each in TARGETS[1:])]
)
def test_one_set_of_pins_holds_for_every_python_and_processor(python, platform, index):
    target = "--python-version", python, "--python-platform", platform
    options = "--quiet", "--all-extras", "--no-annotate", "--no-header", "--no-config", "-c", "constraints.txt"
    assert _versions(_resolved(find_uv_bin(), "pip", "compile", *target, *options, "pyproject.toml")) == PINS


def test_every_pin_has_its_licence_on_the_page():
    """Apart from NVIDIA's libraries, of which the page says that they have its own terms."""
    page = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = re.findall(r"^\| ([\w.-]+) \| (\S+) \| \S.* \|$", page, re.MULTILINE)
    listed = _versions("\n".join(f"{name}=={version}" for name, version in rows))
    listed.pop("name")
    assert listed == {name: version for name, version in PINS.items() if not name.startswith(("nvidia-", "cuda-"))}
