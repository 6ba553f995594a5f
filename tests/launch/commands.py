"""Stand-ins for commands: each start writes down its words and ends as a script says."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import json, signal, sys, time
from pathlib import Path
folder, ends, words = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
number = len(list(folder.glob("*.json")))
(folder / f"{number}.json").write_text(json.dumps(words))
how = ends[min(number, len(ends) - 1)]
if how == "saves":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    (folder / "ready").touch()
    time.sleep(30)
elif how == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "ready").touch()
    time.sleep(30)
elif how == "killed":
    signal.raise_signal(signal.SIGKILL)
sys.exit(int(how))
"""


def ending(folder: Path, *ends: str) -> Callable[[list[str]], list[str]]:
    """Makes command lines whose attempts end as told: an exit code each, or `saves`, `hangs`, `killed`."""
    return lambda words: [sys.executable, "-S", "-c", SCRIPT, str(folder), ",".join(ends), *words]


def attempts_in(folder: Path) -> list[list[str]]:
    """The words of every attempt, in their order."""
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(len(list(folder.glob("*.json"))))]
