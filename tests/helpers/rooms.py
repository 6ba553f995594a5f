"""The project's rooms, drawn from its imports; `python -m tests.helpers.rooms` writes CONTRIBUTING.md's picture."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Rooms from the lowest; a room imports those of lower ranks, and of its own rank as long as there is no circle.
RANKS = (
    {"fullstride", "errors", "extras", "import_advice", "renamed"},
    {"process", "runs", "settings", "assets", "device", "measure"},
    {"jvp", "step.torch", "step.jax"},
    {"meanflow", "bert", "llm"},
    {"launch"},
    {"cli"},
    {"benchmarks"},
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
WORKLOADS = RANKS[3]

Import = tuple[str, str, bool]  # the module that imports, what, and whether as soon as it is imported itself


def room_of(module: str) -> str:
    """The room of a module, such as `step.torch`; the package itself, which has a version, is one."""
    if module == "fullstride.__main__":
        return "cli"
    top, *parts = module.split(".")
    if top == "benchmarks" or not parts:
        return top
    return ".".join(parts[: 2 if parts[0] == "step" else 1])


def imports_of(module: str, text: str) -> Iterator[Import]:
    """Imports of a module, at file level and in its functions; imports only for type checking are left out."""

    def walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((module, alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                # A module of a package, or a name of a module: both are the module's for these rules.
                yield from ((module, f"{child.module}.{alias.name}", at_once) for alias in child.names)
            yield from walk(child, at_once and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from walk(ast.parse(text), True)


def module_of(name: str, modules: set[str]) -> str:
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


@cache
def files() -> tuple[Path, ...]:
    """The Python files of the library and of the benchmarks, from the root of the repository."""
    return tuple(
        file.relative_to(ROOT) for name in ("fullstride", "benchmarks") for file in sorted((ROOT / name).rglob("*.py"))
    )


def name_of(file: Path) -> str:
    """A file as a module."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@cache
def everything() -> tuple[tuple[Import, ...], frozenset[str]]:
    """All imports and all modules."""
    found = [each for file in files() for each in imports_of(name_of(file), (ROOT / file).read_text())]
    return tuple(found), frozenset(map(name_of, files()))


def picture() -> str:
    """The rooms from the highest rank down, and the rooms that each imports."""
    uses: dict[str, set[str]] = {}
    found, modules = everything()
    for module, name, _ in found:
        target = room_of(module_of(name, set(modules))) if name.split(".")[0] in ("fullstride", "benchmarks") else ""
        if target in RANK and target != room_of(module):
            uses.setdefault(room_of(module), set()).add(target)
    lines = []
    for rooms in reversed(RANKS[1:]):
        for room in sorted(rooms):
            below = sorted(uses.get(room, set()) - RANKS[0], key=lambda each: (-RANK[each], each))
            lines.append(f"{room:10} -> {' '.join(below)}")
        lines.append("")
    return "\n".join(lines).rstrip()


def filled(page: str) -> str:
    """A page with the picture between its marks."""
    start, end = "<!-- rooms -->\n", "<!-- end of rooms -->"
    before, _, rest = page.partition(start)
    return f"{before}{start}```text\n{picture()}\n```\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    path = ROOT / "CONTRIBUTING.md"
    path.write_text(filled(path.read_text()))
