"""Each extra in an empty environment, installed from the built wheel, with the README's blocks run in it.

It fetches gigabytes and takes half an hour, so it is run by hand before a release: `pytest -m release tests/packaging`.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:```python|<!--- invisible-code-block: python)\n(.*?)(?:```|-->)", re.DOTALL)
# What a block imports, and the environment that has it; the first that matches. Others belong to the block before.
NEEDS = {"fullstride.llm": "llm", "jax": "jax", "fullstride.meanflow": "torch", "fullstride": "bare-torch"}

pytestmark = pytest.mark.release


def _blocks() -> dict[str, str]:
    """The README's Python, by the environment that it runs in."""
    found, current = dict.fromkeys(NEEDS.values(), ""), "bare-torch"
    for block in BLOCK.findall(README):
        imported = re.findall(r"^(?:from|import) ([\w., ]+)", block, re.MULTILINE)
        current = next((name for key, name in NEEDS.items() if key in " ".join(imported)), current)
        found[current] += block
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture
def environment(wheel, tmp_path) -> Callable[..., Path]:
    """Make an empty environment with the wheel, its extras and other packages; its folder of commands."""

    def make(extras: str = "", *packages: str) -> Path:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        bin_ = tmp_path / "venv" / "bin"
        install = [bin_ / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
        if "torch" in (extras, *packages):  # first and pinned, as the README says
            subprocess.run([*install, "torch"], check=True)
        subprocess.run([*install, f"{wheel}[{extras}]" if extras else str(wheel), *packages], check=True)
        return bin_

    return make


def _run(*line: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, line)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_blocks(bin_: Path, name: str, folder: Path) -> None:
    (folder / "readme.py").write_text(_blocks()[name])
    assert (folder / "readme.py").read_text().count("import fullstride") + _blocks()[name].count("from fullstride")
    _run(bin_ / "python", "readme.py", cwd=folder)


def test_every_block_has_an_environment():
    assert "".join(_blocks().values()).count("\n") == "".join(BLOCK.findall(README)).count("\n")
    assert all(_blocks().values())


def test_the_base_shows_what_is_missing(environment, tmp_path):
    bin_ = environment()
    assert "meanflow" in _run(bin_ / "fullstride", "--help", cwd=tmp_path)
    assert "pip install" in _run(bin_ / "fullstride", "doctor", cwd=tmp_path)


def test_derivatives_and_steps_need_torch_alone(environment, tmp_path):
    _run_blocks(environment("", "torch"), "bare-torch", tmp_path)


def test_the_torch_extra_trains_and_samples(environment, tmp_path):
    bin_ = environment("torch")
    _run_blocks(bin_, "torch", tmp_path)
    settings = "data=digits", "model=unet_tiny", "model.class_conditional=true", "epochs=1"
    _run(bin_ / "fullstride", "meanflow", "train", *settings, cwd=tmp_path)
    _run(bin_ / "fullstride", "meanflow", "sample", "runs/default", "--num", "16", cwd=tmp_path)
    assert list((tmp_path / "runs" / "default").rglob("*.png"))


def test_the_jax_extra_trains(environment, tmp_path):
    _run_blocks(environment("jax"), "jax", tmp_path)


def test_the_llm_extra_generates(environment, tmp_path):
    _run_blocks(environment("llm"), "llm", tmp_path)


def test_the_serve_extra_serves(environment, tmp_path):
    bin_ = environment("serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [
        bin_ / "fullstride",
        "llm",
        "serve",
        "--model",
        "smollm2",
        "--port",
        str(port),
        "--engine",
        "max_length=128",
    ]
    server = subprocess.Popen(line, cwd=tmp_path)
    try:
        for _ in range(600):
            time.sleep(1.0)
            assert server.poll() is None
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                    assert b"smollm2" in answer.read()
                    return
            except OSError:
                continue
        raise AssertionError("no answer within ten minutes")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def test_the_launch_extra_plans_a_launch(environment, tmp_path):
    bin_ = environment("launch")
    line = "launch", "slurm", "--dry-run", "--", "meanflow", "train", "data=digits"
    assert "meanflow train" in _run(bin_ / "fullstride", *line, cwd=tmp_path)


def test_the_tracker_of_the_track_extra_imports(environment, tmp_path):
    _run(environment("track") / "python", "-c", "import tensorboardX, trackio, fullstride", cwd=tmp_path)
