"""Peers of the engine in `python -m benchmarks llm`, each in a separate process: transformers and other engines."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.cases.llm import engine_side
from benchmarks.cases.llm.engine_side import ENGINES
from benchmarks.cases.llm.options import TRANSFORMERS, WAYS, PeerOption
from benchmarks.cases.llm.work import TEMPERATURE, ModelWork, compared
from benchmarks.harness.budget import say
from fullstride.errors import ConfigError
from fullstride.extras import how_to_install

STDERR = 2  # of the process: where what it says on its output goes
INSTALL = f"{how_to_install('torch')} transformers"


@dataclass
class Peers:
    """Timings and tokens of the implementations that the engine is compared with."""

    # Milliseconds of a first call and of the runs after it, by name.
    times: dict[str, list[float]] = field(default_factory=dict)
    # Tokens after the last prompt, by whose they are, the same model's in both ways of transformers.
    greedy: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    attention: str | None = None  # of transformers, be it in another's place
    left_out: list[str] = field(default_factory=list)  # what did not run, and why
    flags: dict[str, str] = field(default_factory=dict)  # what was set, by name

    @property
    def conditions(self) -> dict[str, Any]:
        """Return the conditions of a result that describe the compared implementations."""
        attention = {} if self.attention is None else {"baseline_attention": self.attention}
        return attention | ({"left_out": "; ".join(self.left_out)} if self.left_out else {})

    def leave_out(self, name: str, why: str, remedy: str = "") -> None:
        """Report and store why something is not run."""
        say(f"left out: {name}: {why}{remedy and f'; {remedy}'}")
        self.left_out.append(f"{name}: {why}")

    def add_transformers(
        self, source: str, dtype: str, place: str, runs: int, attention: str, ways: dict[str, str] = WAYS
    ) -> None:
        """Run `generate` of transformers on the small workload; leave out the variants that fail."""
        if without := _lacking():
            return self.leave_out("transformers", without, f"{INSTALL}, or use --no-baseline")
        say("running transformers in a separate process")
        done = _run_baseline("times", source, dtype, place, str(runs), attention, json.dumps(ways))
        if done.returncode:
            return self.leave_out(
                "transformers" if len(ways) > 1 else next(iter(ways.values())), f"exit code {done.returncode}"
            )
        found = json.loads(done.stdout)
        self.attention = self.attention or found["attention"]
        for name, why in found["left_out"].items():
            self.leave_out(name, why)
        return self._add(found)

    def add_vllm(self, python: str, source: str, dtype: str, runs: int, work: ModelWork, at_once: int) -> None:
        """Run vLLM by its own interpreter, on the same weights; ConfigError if it does not run, or its weights cannot
        be written: it was asked for.
        """
        if why := self._run_engine("vllm", python, None, source, dtype, runs, work, at_once):
            raise ConfigError(f"--vllm {python}: {why}; see the reason above, or omit --vllm")

    def add(
        self, option: PeerOption, source: str, dtype: str, place: str, runs: int, work: ModelWork, at_once: int
    ) -> None:
        """Run a peer of `--beside`; name it with the reason if it does not run."""
        if option.name in TRANSFORMERS:
            return self.add_transformers(source, dtype, place, runs, *TRANSFORMERS[option.name])
        python = shutil.which(option.python or sys.executable)
        why = f"{option.python}: no such program"
        if python is not None:
            why = self._run_engine(option.name, python, option.checkout, source, dtype, runs, work, at_once)
        return self.leave_out(ENGINES[option.name][0], why) if why else None

    def _run_engine(
        self,
        engine: str,
        python: str,
        checkout: str | None,
        source: str,
        dtype: str,
        runs: int,
        work: ModelWork,
        at_once: int,
    ) -> str:
        """Run an engine on the same weights; return why it did not run, or nothing."""
        if without := _lacking():
            return f"{without}, which are needed to write its weights; {INSTALL}"
        say(f"running {ENGINES[engine][0]} in a separate process")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if code := _run_baseline("save", source, dtype, str(folder / "model")).returncode:
                return f"its weights were not written (exit code {code})"
            gate = compared(work)
            asked = {"engine": engine, "checkout": checkout, "dtype": dtype, "runs": runs}
            asked |= {"prompts": work.prompts, "outputs": work.outputs}
            asked |= {"temperature": TEMPERATURE, "longest": work.longest, "at_once": at_once}
            asked |= {"gate_prompts": gate.prompts, "gate_outputs": gate.outputs}
            (folder / "asked.json").write_text(json.dumps(asked))
            # Copy the script to a folder in which its imports cannot find this package.
            script = shutil.copy(engine_side.__file__, folder / "beside.py")
            if code := subprocess.run([python, str(script)], stdout=STDERR, cwd=folder).returncode:
                told = folder / "why.txt"
                return told.read_text() if told.exists() else f"it ended with exit code {code}"
            self._add(json.loads((folder / "found.json").read_text()))
        return ""

    def _add(self, found: dict[str, Any]) -> None:
        self.times |= found["ms"]
        self.greedy |= found["greedy"]
        self.versions |= found["versions"]
        self.flags |= found["flags"]


def _lacking() -> str:
    lacking = [package for package in ("torch", "transformers") if find_spec(package) is None]
    return f"without {' and '.join(lacking)}" if lacking else ""


def interpreter(given: str) -> str:
    """Return the path of an interpreter that runs vLLM; ConfigError if it does not exist or has no vLLM."""
    path = shutil.which(given)
    if path is None:
        raise ConfigError(f"--vllm {given}: no such program; expected the Python of an environment that has vLLM")
    looked = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", looked]).returncode:
        raise ConfigError(
            f"--vllm {given}: it has no vLLM; run `{given} -m pip install vllm` in a separate environment"
        )
    return os.path.abspath(path)  # a link stays one: to what it points is no environment


def _run_baseline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.cases.llm.transformers_side", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)
