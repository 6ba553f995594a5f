"""`equinox.filter_jit` for functions that are called often: what is known of an argument is not found out again."""

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import subjaxprs

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.trees.arguments import ReadTree, Result, SpareModules, StaticTree, read, rebuilt
from fullstride.step.jax.trees.ownership import private
from fullstride.step.jax.watch import JIT_ID, silence_callbacks, translated

# Whether the function itself, its first argument and the others are donated.
DONATED = {
    "none": (False, False, False),
    "all": (True, True, True),
    "all-except-first": (True, False, True),
    "warn": (True, True, True),
    "warn-except-first": (True, False, True),
}
# `jax.jit`'s own ways to say what is static, donated or sharded know nothing of modules.
REFUSED = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings"}
POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
Groups = tuple[tuple[Any, ...] | None, ...]


def named(fun: Any) -> str:
    """A function by its module and name, anything else by its own text."""
    return f"{fun.__module__}.{fun.__qualname__}" if isinstance(fun, types.FunctionType) else repr(fun)


@dataclass(eq=False, slots=True)
class CallProgram:
    """A combination of structures that a function was called with; JAX knows it by identity.

    Attributes:
        readings: of the function, its first argument and the others.
        blocks: whether it calls back to the host, so that its errors are waited for.
        traced: whether it was traced since that was looked at.

    """

    readings: tuple[StaticTree, ...]
    blocks: bool = False
    traced: bool = False


def _calls_back(jaxpr: Any) -> bool:
    """Return whether any equation of a jaxpr, at any depth, is a host callback (`equinox.error_if` makes one)."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return any("callback" in e.primitive.name for e in jaxpr.eqns) or any(map(_calls_back, subjaxprs(jaxpr)))


class CompiledCore:
    """The compiled side of a wrapper, shared by all wrappers of one function with the same settings."""

    def __init__(self, name: str, donate: str, options: dict[str, Any]):
        self.donate = donate
        self.donated, self.quiet = DONATED[donate], donate.startswith("all")
        self.programs: dict[tuple[StaticTree, ...], CallProgram] = {}
        self._muted = ExitStack()

        def traced(donated: Groups, kept: Groups, program: CallProgram) -> Result:
            if self.quiet:
                # Whatever is traced is compiled next, and that is when JAX warns.
                self._muted.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            program.traced = True
            groups = (k if d is None else d for d, k in zip(donated, kept, strict=True))
            fun, first, (rest, kwargs) = (rebuilt(r, g or ()) for r, g in zip(program.readings, groups, strict=True))
            return Result.of(fun(*first, *rest, **kwargs))

        traced.__name__ = traced.__qualname__ = name
        self.jitted = jax.jit(traced, donate_argnums=0, static_argnums=2, **options)

    def prepared(self, given: tuple[ReadTree, ...]) -> tuple[Groups, Groups, CallProgram]:
        """Return the arguments of `jitted`: arrays to donate, arrays to keep, the program."""
        readings = tuple(g.reading for g in given)
        program = self.programs.get(readings)
        if program is None:
            program = self.programs[readings] = CallProgram(readings)
        groups = [private(g.groups) if g.on_host else g.groups for g in given]
        pairs = [(g, None) if d else (None, g) for g, d in zip(groups, self.donated, strict=True)]
        return tuple(d for d, _ in pairs), tuple(k for _, k in pairs), program

    def run(self, given: tuple[ReadTree, ...]) -> Result:
        """Call the function."""
        __equinox_jit_id__ = JIT_ID  # noqa: F841
        donated, kept, program = self.prepared(given)
        try:
            out = self.jitted(donated, kept, program)
            if program.traced and not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                program.traced = False
                program.blocks |= _calls_back(self.jitted.trace(donated, kept, program).jaxpr)
            if program.blocks:
                jax.block_until_ready(out.groups)
            return out
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise translated(error) from None
        finally:
            self._muted.close()


class CachedJit:
    """Function wrapped by `cached_filter_jit`."""

    def __init__(self, fun: Callable[..., Any], core: CompiledCore):
        """Take the function apart, once."""
        self._fun, self._core, self._own = fun, core, read(fun)
        self._signature = inspect.signature(fun)
        # So many positional arguments need no binding, which is slow.
        kinds = [p.kind for p in self._signature.parameters.values()]
        self._positional = len(kinds) if set(kinds) <= POSITIONAL else None
        functools.update_wrapper(self, fun, updated=())

    def __repr__(self) -> str:
        options = "" if self._core.donate == "none" else f", donate={self._core.donate!r}"
        return f"cached_filter_jit({named(self._fun)}{options})"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        _, first, rest = self._core.donated
        holders = tuple(map(getrefcount, args)) if first or rest else ()
        given = self._given(args, kwargs)
        spare = None
        if holders:
            spare = SpareModules(given[2], args[1:], holders[1:])
            if first:
                spare.modules = SpareModules(given[1], args[:1], holders[:1]).modules + spare.modules
        return self._core.run(given).tree(spare)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ReadTree, ReadTree, ReadTree]:
        if kwargs or len(args) != self._positional:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        return self._own, read(args[:1]), read((args[1:], kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> "LoweredCall":
        """Lower the call, to inspect it or to compile it ahead of time."""
        return LoweredCall(self, self._core.jitted.lower(*self._core.prepared(self._given(args, kwargs))))

    def __get__(self, instance: Any, owner: Any) -> Any:
        """The method of an instance, whose arrays are traced like any argument's."""
        return self if instance is None else eqx.Partial(self, instance)


@dataclass(eq=False)
class LoweredCall:
    """A call that is lowered; `compile` gives a function of arguments of the same structures, shapes and dtypes."""

    wrapper: CachedJit
    lowered: Any

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        return self.lowered.as_text()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "CompiledCall":
        return CompiledCall(self.wrapper, self.lowered.compile(compiler_options=compiler_options))


@dataclass(eq=False)
class CompiledCall:
    """A call that is compiled ahead of time; `compiled` is JAX's own object, with its analyses of cost and memory."""

    wrapper: CachedJit
    compiled: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled program."""
        donated, kept, _ = self.wrapper._core.prepared(self.wrapper._given(args, kwargs))
        return self.compiled(donated, kept).tree()


jtu.register_pytree_node(CachedJit, lambda w: ((w._fun,), w._core), lambda core, children: CachedJit(*children, core))
_CORES: dict[Any, CompiledCore] = {}


def cached_filter_jit(fun: Any = None, *, donate: str = "none", **options: Any) -> Any:
    """`equinox.filter_jit` whose partition of each module is remembered for as long as the module lives.

    Arrays are traced and everything else is static, in arguments, results and the function itself. A module that comes
    back, such as the result of the call before, is known by its identity; its lists and dicts are looked at, and a
    changed one is read anew. If arguments are donated, results are put into the modules they came from, unless
    someone still holds those. Errors of `equinox.error_if` are raised by the call itself, as `filter_jit` does; a
    function without any callback is not waited for.

    Args:
        fun: a pure function, method or module; without it, a decorator is returned.
        donate: which arguments' buffers may be reused, as in `filter_jit`: `none`, `all`, `all-except-first`, and
            with a warning for what could not be used `warn` and `warn-except-first`.
        **options: further options of `jax.jit`, such as `inline`.

    Raises:
        ConfigError: for an unknown `donate`, or an option that modules have no use for.

    """
    one_of("donate", donate, DONATED)
    if refused := sorted(REFUSED & options.keys()):
        raise ConfigError(
            f"{', '.join(refused)}: not an option here; arrays are traced and `donate` says what is donated"
        )
    if fun is None:
        return functools.partial(cached_filter_jit, donate=donate, **options)
    silence_callbacks()
    name = getattr(inspect.unwrap(fun), "__name__", type(fun).__name__)
    # The function itself keeps its compiled side, so that wrapping it again compiles nothing.
    cores = vars(fun).setdefault("_cached_filter_jit", {}) if isinstance(fun, types.FunctionType) else _CORES
    # `compiler_options` is a dict.
    named = {o: tuple(sorted(value.items())) if isinstance(value, dict) else value for o, value in options.items()}
    key = (name, donate, tuple(sorted(named.items())))
    if key not in cores:
        cores[key] = CompiledCore(name, donate, options)
    return CachedJit(fun, cores[key])
