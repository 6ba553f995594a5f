"""Rules of the house: imports allowed between rooms, and sizes of rooms."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.rooms import RANK, ROOT, Import, everything, files, filled, imports_of, module_of, name_of, room_of

WORKLOADS = {"meanflow", "bert", "llm"}
# Which of the two frameworks a room may import, by name; others import neither outside of functions.
FRAMEWORKS = {"torch": {"jvp", "step.torch", "meanflow"}, "jax": {"step.jax", "bert", "llm"}}
MOST_AT_ROOT, MOST_IN_A_FOLDER = 8, 30


def violations(found: list[Import], modules: set[str]) -> list[str]:
    """Imports against the rules."""
    wrong = []
    for module, name, at_once in found:
        room, top = room_of(module), name.split(".")[0]
        if top == "typer" and room not in ("cli", "benchmarks"):
            wrong.append(f"{module} imports typer: only cli does")
        for framework, rooms in FRAMEWORKS.items():
            others = set().union(*FRAMEWORKS.values()) - rooms
            if top == framework and (room in others or (at_once and RANK[room] == 0)):
                wrong.append(f"{module} imports {name}: {room} goes without {framework}")
        if top not in ("fullstride", "benchmarks"):
            continue
        target = room_of(module_of(name, modules))
        if top == "benchmarks" and room != "benchmarks":
            wrong.append(f"{module} imports {name}: nothing of the library imports benchmarks")
        elif room in WORKLOADS and target in WORKLOADS and room != target:
            wrong.append(f"{module} imports {name}: workloads go without each other")
        elif RANK[target] > RANK[room]:
            wrong.append(f"{module} imports {name}: {target} is above {room}")
    return wrong


def circles(found: list[Import], modules: set[str]) -> list[str]:
    """Modules that import each other as soon as they are imported."""
    graph = {module: set() for module in modules}
    for module, name, at_once in found:
        target = module_of(name, modules)
        if at_once and target in modules and target != module and not module.startswith(f"{target}."):
            graph[module].add(target)
    done: set[str] = set()
    wrong = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            wrong.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return wrong


def too_large(files: list[Path]) -> list[str]:
    """Folders with too many files."""
    counts: dict[Path, int] = {}
    for file in files:
        counts[file.parent] = counts.get(file.parent, 0) + 1
    most = {Path("fullstride"): MOST_AT_ROOT}
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > most.get(folder, MOST_IN_A_FOLDER)]


def test_every_room_has_a_rank():
    assert {room_of(name_of(file)) for file in files()} - {"step"} == set(RANK)


def test_imports_run_downwards_and_only_cli_imports_typer():
    found, modules = everything()
    assert len(found) > 1000
    assert violations(list(found), set(modules)) == []


def test_there_are_no_circles():
    found, modules = everything()
    assert circles(list(found), set(modules)) == []


def test_no_folder_is_too_large():
    assert too_large([*files(), *(file.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py"))]) == []


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("fullstride.jvp.x", "from fullstride.meanflow.config.schema import schema", "meanflow is above jvp"),
        ("fullstride.runs.x", "def f():\n    import fullstride.jvp", "jvp is above runs"),
        ("fullstride.bert.x", "from fullstride.llm import LLM", "workloads go without each other"),
        ("fullstride.meanflow.x", "import typer", "only cli does"),
        ("fullstride.llm.x", "def f():\n    import torch", "llm goes without torch"),
        ("fullstride.step.torch.x", "from jax import numpy", "step.torch goes without jax"),
        ("fullstride.errors", "import torch", "errors goes without torch"),
        ("fullstride.cli.x", "def f():\n    import benchmarks.cli", "nothing of the library imports benchmarks"),
        ("fullstride.measure.x", "from fullstride.step.jax import train_step", "step.jax is above measure"),
    ],
)
def test_a_planted_violation_is_seen(module, text, message):
    _, modules = everything()
    (told,) = violations(list(imports_of(module, text)), {*modules, module})
    assert message in told


def test_planted_circles_and_folders_are_seen():
    texts = {"fullstride.runs.a": "import fullstride.runs.b", "fullstride.runs.b": "from fullstride.runs.a import c"}
    found = [each for module, text in texts.items() for each in imports_of(module, text)]
    assert len(circles(found, set(texts))) == 1
    lazy = [(module, name, False) for module, name, _ in found]
    assert circles(lazy, set(texts)) == []
    crowd = [Path("fullstride/jvp") / f"{i}.py" for i in range(31)]
    assert too_large(crowd) == ["fullstride/jvp: 31 files"]
    assert too_large(crowd[:30]) == []
    assert too_large([Path(f"fullstride/{i}.py") for i in range(9)]) == ["fullstride: 9 files"]


def test_the_picture_is_of_the_present_imports():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert filled(page) == page, "run: python -m tests.helpers.rooms"


def test_what_make_quick_runs_is_there():
    """One that moved would fail its next user alone: CI runs the whole suite."""
    shown = subprocess.run(["make", "-n", "quick"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [word.removeprefix("--ignore=") for word in shown.split() if "tests/" in word]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
