"""How a bench of `fullstride.jvp` runs: gate, kernels ahead, rows, errors in every format, tables, JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases.jvp.common import Entry, Setup, by_format, make_setup
from benchmarks.cases.jvp.compile import compile_ahead
from benchmarks.cases.jvp.errors import Errors
from benchmarks.cases.jvp.options import AttentionOptions, NormsOptions
from benchmarks.cases.jvp.table import Rates, finish
from benchmarks.harness.budget import one_stream
from fullstride.device.select import resolve_device
from fullstride.errors import one_of


@dataclass(frozen=True)
class Bench:
    """What a bench measures."""

    case: str  # its name in the results
    formats: tuple[str, ...]  # that it can be asked for
    shapes: Mapping[str, Sequence[Any]]  # lists of sizes, by name
    usual: Mapping[str, str]  # the name of the list that is measured unless one is given, by the kind of device
    kernels: Callable[[Setup, list[Any]], list[Callable[[], None]]]  # calls that compile what sizes need
    rows: Callable[[Setup, list[Any]], list[Entry]]  # gates and times sizes
    errors: Callable[[Setup], Errors]  # against fp64, in a setup's format
    rates: Rates  # columns of its own

    def run(self, options: AttentionOptions | NormsOptions, out: Path) -> Path:
        """Gate, measure, print the tables and write the JSON, whose path is returned.

        Raises:
            ConfigError: for a device, format or list that there is not.
            GateError: if a result is wrong; the rest is measured and written before.

        """
        chosen = resolve_device(options.device)
        one_of("--precision", options.precision, self.formats)
        if (shapes := options.shapes) is not None:
            one_of("--shapes", shapes, self.shapes)
        sizes = list(self.shapes[shapes or self.usual[chosen.type]])
        with one_stream(chosen):
            setup = make_setup(chosen, options.precision, options.implementation, options.seconds)
            compile_ahead(setup, options.jobs, self.kernels(setup, sizes))
            measured = self.rows(setup, sizes)
            errors, left_out = by_format(setup, self.formats, self.errors)
        conditions: dict[str, Any] = {"shapes": list(map(str, sizes))}
        if shapes not in (None, self.usual[chosen.type]):
            conditions["at"] = shapes
        return finish(self.case, setup, conditions, self.rates, (errors, [*measured, *left_out]), out)
