"""State that a loss reaches: attributes of objects, variables of closures, and globals that its functions name."""

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[3])
_LIBRARIES = (sysconfig.get_path("stdlib"), _TORCH, _OWN)


class ReadVariable(NamedTuple):
    """A variable that functions read: its name, its value, how to read it again, and how to bind it to another one."""

    name: str
    value: Any
    read: Callable[[], Any]
    bind: Callable[[Any], None]


class ReachableState:
    """Walk through everything that some objects lead to; nothing is called and nothing is changed.

    Globals and class attributes are followed in a program's own files, not in installed libraries. A method is looked
    into only if some function names it: others may belong to another part of the program.

    Attributes:
        variables: of closures, defaults, globals and classes.
        tensors: every tensor that was found.
        generators: every random generator that was found.
        modules: Python modules that objects hold.
        names: of globals and attributes, and strings, in the functions that were found.
        objects: everything that was found, by `id`.

    """

    def __init__(self, roots: Iterable[Any]):
        self.variables: list[ReadVariable] = []
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self.modules: list[ModuleType] = []
        self.names = {"forward", "__call__"}
        self.objects = dict[int, Any]()  # kept, as a number belongs to one only while it lives
        self._bound = set[tuple[int, str]]()
        self._members = list[tuple[type, str]]()
        self._waiting = list(roots)
        while self._waiting:
            while self._waiting:
                self._visit(self._waiting.pop())
            named = [(kind, name) for kind, name in self._members if name in self.names]
            self._members = [(kind, name) for kind, name in self._members if name not in self.names]
            for kind, name in named:
                self._member(kind, name)

    def _visit(self, x: Any) -> None:
        if isinstance(x, _PLAIN) or id(x) in self.objects:
            return
        self.objects[id(x)] = x
        if isinstance(x, Tensor):
            self.tensors.append(x)
            self._waiting += (x._backward_hooks or {}).values()
        elif isinstance(x, torch.Generator):
            self.generators.append(x)
        elif isinstance(x, ModuleType):
            self.modules.append(x)
        elif isinstance(x, FunctionType):
            self._function(x)
        elif isinstance(x, type):
            self._class(x)
        elif not hasattr(type(x), "__deepcopy__"):  # which knows what of itself is copied
            self._object(x)

    def _object(self, x: Any) -> None:
        if isinstance(x, MethodType):
            self._waiting += [x.__self__, x.__func__]
        elif isinstance(x, functools.partial):
            self._waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, dict):
            self._waiting += [*x.keys(), *x.values()]
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            self._waiting += x
        self._waiting += getattr(x, "__dict__", {}).values()
        given = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
        slots = [name for each in given for name in ((each,) if isinstance(each, str) else each)]
        self._waiting += [getattr(x, name) for name in slots if not name.startswith("__") and hasattr(x, name)]
        self._waiting.append(type(x))

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if not _of_library(getattr(sys.modules.get(each.__module__), "__file__", None), each.__module__):
                self._members += [(each, name) for name in vars(each)]

    def _member(self, kind: type, name: str) -> None:
        value = vars(kind)[name]
        value = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(value, FunctionType):
            self._waiting.append(value)
        elif not name.startswith("__") and not hasattr(type(value), "__get__"):
            self._attribute(kind, name, value)

    def _function(self, f: FunctionType) -> None:
        if (original := getattr(f, "_torchdynamo_orig_callable", None)) is not None:
            self._waiting.append(original)
        if f.__code__.co_filename.startswith(_TORCH):
            return
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            with suppress(ValueError):  # of one that has not been set yet
                self._attribute(cell, "cell_contents", cell.cell_contents, name)
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(f, name)) is not None:
                self._attribute(f, name, value)
        if not _of_library(f.__code__.co_filename):
            self._attribute(f, "__dict__", f.__dict__)
            names = set(_names(f.__code__))
            self.names |= names
            self._globals(f.__globals__, names)

    def _globals(self, place: dict[str, Any], names: set[str]) -> None:
        for name in names & place.keys():
            value = place[name]
            if not isinstance(value, ModuleType):
                read, bind = place.__getitem__, place.__setitem__
                self._variable(
                    place, ReadVariable(name, value, functools.partial(read, name), functools.partial(bind, name))
                )
            elif not _of_library(getattr(value, "__file__", None), value.__name__):
                self._globals(vars(value), names)

    def _attribute(self, place: Any, attribute: str, value: Any, name: str = "") -> None:
        read, bind = functools.partial(getattr, place, attribute), functools.partial(setattr, place, attribute)
        self._variable(place, ReadVariable(name or attribute, value, read, bind))

    def _variable(self, place: Any, found: ReadVariable) -> None:
        if (id(place), found.name) not in self._bound:
            self._bound.add((id(place), found.name))
            self.variables.append(found)
            self._waiting.append(found.value)


def _names(code: CodeType) -> Iterator[str]:
    """Globals and attributes that a function's code names, and its strings, in functions within it, too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
        elif isinstance(inner, str):
            yield inner


def _of_library(file: str | None, module: str = "__main__") -> bool:
    """Return whether a file, or a module without one, belongs to an installed library and not to the user's program."""
    if file is None:
        return module != "__main__"
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
