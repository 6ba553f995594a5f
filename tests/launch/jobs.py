"""A Slurm of this machine: sbatch, srun and scontrol as scripts, and a job whose command is a stand-in."""

import os
import sys
from pathlib import Path

from fullstride.launch.request import SlurmRequest
from fullstride.launch.slurm import SlurmJob
from tests.launch.commands import ending

SHIM = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path
home = Path(__file__).parent
name, words = Path(__file__).name, sys.argv[1:]
with (home / "calls").open("a") as calls:
    print(name, *words, file=calls)
if name == "sbatch":
    (home / "submitted").write_text(Path(words[0]).read_text())
    print("Submitted batch job 7")
if name == "scontrol" and words[0] == "show" and (home / "job").exists():
    print((home / "job").read_text())
if name == "srun":
    command = words[[i for i, word in enumerate(words) if "python" in word][0]:]
    log = Path(words[words.index("--output") + 1].replace("%j", "7").replace("%t", "0"))
    with log.open("a") as out:
        sys.exit(subprocess.Popen(command, stdout=out, stderr=out).wait())
"""


def install(folder: Path, monkeypatch) -> Path:
    """Put the three on PATH; what they are called with is in `calls`, what was submitted in `submitted`."""
    home = folder / "bin"
    home.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        (home / name).write_text(SHIM)
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    return home


class Scripted(SlurmJob):
    """A job whose attempts end as told."""

    def __init__(self, words: list[str], folder: Path, *ends: str, **options):
        """Take words, the folder for their record, and the ends."""
        super().__init__(words, SlurmRequest(retry_delay=0.0, **options))
        self.record, self.ends = folder, ends

    def line(self, words: list[str]) -> list[str]:
        """The stand-in's."""
        return ending(self.record, *self.ends)(words)
