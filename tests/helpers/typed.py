"""Checks of types while the tests run: of arrays by jaxtyping, else by beartype alone.

Not checked are functions within functions and dataclasses that name no array.

jaxtyping's own hook wraps every function, at 20 us a call or more, most of which have nothing for it to compare, and
compiles each one's signature twice, of a function within another at each call of that. Checks at every call take a
quarter of the suite's time: a function of arrays is checked once for each combination of types, shapes and dtypes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

PACKAGES = ["fullstride", "benchmarks"]
LIBRARIES = "torch", "numpy", "jax", "jaxlib"
_everywhere: Callable = jaxtyping.jaxtyped
# A TypeError, as jaxtyping's is.
_plainly = beartype(conf=BeartypeConf(violation_type=TypeError))


def install() -> None:
    """Check the package's functions, of what is imported from here on."""
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")
    jaxtyping.jaxtyped = _jaxtyped


def _jaxtyped(fn: Any = None, *, typechecker: Any = None) -> Any:
    """Replacement of `jaxtyping.jaxtyped` with a checker, with which the import hook decorates."""
    if typechecker is None:
        return _everywhere(fn)
    return functools.partial(_checked, typechecker) if fn is None else _checked(typechecker, fn)


def _checked(typechecker: Callable, fn: Any) -> Any:
    if inspect.isclass(fn):
        if not dataclasses.is_dataclass(fn) or any(map(_names_array, inspect.get_annotations(fn).values())):
            return _everywhere(fn, typechecker=typechecker)
        return fn
    if not inspect.isfunction(fn):
        return _everywhere(fn, typechecker=typechecker)
    if any(map(_names_array, inspect.get_annotations(fn).values())):
        return _once_a_form(fn, _everywhere(fn, typechecker=typechecker))
    # What is defined within a function would be wrapped anew at every call of that.
    return fn if "<locals>" in fn.__qualname__ else _plainly(fn)


def _once_a_form(fn: Callable, checked: Callable) -> Callable:
    """Call `checked` if no call with arguments of these forms has passed it before, else `fn`."""
    passed: set[tuple] = set()

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        form = tuple(map(_form, args)), tuple((name, _form(value)) for name, value in kwargs.items())
        try:
            known = form in passed
        except TypeError:  # sizes that are symbols
            return checked(*args, **kwargs)
        if known:
            return fn(*args, **kwargs)
        out = checked(*args, **kwargs)
        passed.add(form)
        return out

    return call


def _form(x: Any) -> Any:
    """Form that a check depends on: an array's type, shape and dtype, a text, a sequence's items, else the type."""
    if isinstance(x, str):
        return x
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_form, x))
    return (type(x), x.shape, x.dtype) if _is_array(type(x)) else type(x)


@functools.cache
def _is_array(kind: type) -> bool:
    """Tell whether it inherits from a library's array; classes of the package answer by code that is checked itself."""
    has_both = hasattr(kind, "shape") and hasattr(kind, "dtype")  # a network may have a dtype
    return has_both and any(base.__module__.partition(".")[0] in LIBRARIES for base in kind.__mro__)


def _names_array(hint: Any) -> bool:
    """Return whether jaxtyping can check the hint, or may be able to if it is a name not known yet."""
    if isinstance(hint, str):
        return True
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_names_array, get_args(hint)))
