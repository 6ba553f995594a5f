"""Figures of cases as declarations: rows of the data frame, labels and colours, and the number to draw."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from benchmarks.report import plots
from benchmarks.report.plots import Drawn, Series
from benchmarks.report.tables import Compute, fill


@dataclass(frozen=True)
class Figure:
    """Dots or lines over a case's rows."""

    caption: str  # a template over the first row
    axes: tuple[str, ...]  # the axis's name of dots, both of lines
    at: str  # of dots a template of labels, of lines the column of positions
    values: Mapping[str, str]  # columns of numbers, by templates of what their series are called
    where: str = "metric == 'ms'"  # which rows, as pandas' `query` has it
    names: str = ""  # a pattern of rows' names whose groups become columns
    compute: Compute = field(default_factory=dict)
    bound: str = ""  # the column of what the numbers cannot pass
    each: bool = False  # whether each file has a figure of its own
    options: Mapping[str, Any] = field(default_factory=dict)  # of the plot

    def drawn(self, name: str, frame: pd.DataFrame) -> list[Drawn]:
        """Return the figures of a case's rows; none if there is nothing to draw."""
        if self.names:
            frame = frame.assign(**frame.row.str.extract(f"^{self.names}$"))
        found = frame.query(self.where)
        found = found.assign(machine=found.machine.str.removeprefix("NVIDIA ")).assign(**self.compute)
        groups = [rows for _, rows in found.groupby("file", sort=False)] if self.each else [found]
        made = (self._figure(f"{name}-{place}", rows.to_dict("records")) for place, rows in enumerate(groups))
        return [one for one in made if one]

    def _figure(self, name: str, rows: list[dict[Any, Any]]) -> Drawn | None:
        dotted = len(self.axes) == 1
        series: dict[str, dict[Any, float]] = {}
        bounds: dict[str, dict[Any, float]] = {}
        for row in rows:
            at = fill(self.at, row) if dotted else row[self.at]
            for template, column in self.values.items():
                if row[column] == row[column]:
                    series.setdefault(told := fill(template, row), {})[at] = row[column]
                    if self.bound:
                        bounds.setdefault("bound" if dotted else told, {})[at] = row[self.bound]
        if not series or (not dotted and max(map(len, series.values())) < 2):
            return None
        shown = [Series(told, values, not dotted and bounds.get(told, False)) for told, values in series.items()]
        shown += [Series("bound", bounds["bound"], bound=True)] if dotted and bounds else []
        plot: Any = plots.dots if dotted else plots.lines
        return Drawn(name, fill(self.caption, rows[0]), plot(shown, *self.axes, **self.options))


LOG, LOGS = {"log": True}, {"log_x": True, "log_y": True}
FIGURES: Mapping[str, tuple[Figure, ...]] = {
    "meanflow-step": (
        Figure("Steps beside their bounds, compiled and recorded.", ("ms a step (log)",),
               "{at_model} {at_precision}, batch {batch:.0f} ({machine})", {"{name}": "median"}, bound="bound",
               options=LOG, where="name in ('FM MSE', 'MeanFlow 100%') and backend == 'compile+graph' and batch < 512"),
        Figure("MeanFlow over flow matching, each by the fastest backend of its run: the U-Net, batch 64.",
               ("percent of the samples in the JVP", "MeanFlow / flow matching"), "percent",
               {"{at_precision}, {backend}, {machine}": "over_flow_matching"}, names="MeanFlow (?P<of>\\d+)%, .*",
               where="of.notna() and at_model == 'unet' and flow_matching_by == backend and batch == 64",
               compute={"percent": lambda t: t.of.astype(int)}),
    ),
    "jvp-attention": (
        Figure("Forward pass of attention, {at_precision}, {machine}; output and tangent together take three times the "
               "products of the primal alone.", ("TFLOP/s",), "{shape}", {"{kind}, {who}": "rate"}, each=True,
               where="kind in ('forward', 'primal') and gflop > 1",
               compute={"rate": lambda t: t.gflop / t["median"]}),
    ),
    "jvp-norms": (
        Figure("Share of the copy rate, {at_precision}, {machine}.", ("percent of the copy rate",), "{shape}",
               {"{kind}": "share"}, each=True, where="who == 'ours' and bytes >= 16777216",
               compute={"share": lambda t: 100 / t.over}, options={"marks": {"a copy of as many bytes": 100.0}}),
    ),
    "train-step": (
        Figure("Processor time of the host for calling one step on a tree of BERT's shape, which itself does next to "
               "nothing.", ("ms a call (log)",), "{row}", {"{machine}": "median"}, options=LOG,
               where="at_section == 'host' and over_flat_ratio.notna()"),
    ),
    "llm": (
        Figure("Tokens a second of whole workloads, beside what reading weights and caches at the copy rate allows.",
               ("tokens a second (log)",), "{at_model}, {at_section}, {kernels}: {machine}",
               {"{row}": "tokens_per_second"}, where="at_section in ('small', 'large')", bound="limit", options=LOG,
               compute={"limit": lambda t: t.tokens_per_second * t.over,
                        "kernels": lambda t: t.at_kernels.fillna("plain")}),
        Figure("Decode steps, dashed what reading the weights and each context once would allow: {at_model}, kernels "
               "{at_kernels}, {machine}.", ("sequences in a step", "tokens a second (log)"), "batch",
               {"context {context:,.0f}": "tokens_per_second"}, bound="limit", each=True, options=LOGS,
               where="at_section == 'sweep' and metric == 'ms'",
               compute={"limit": lambda t: t.tokens_per_second * t.over}),
    ),
    "paged-attention": (
        Figure("Share of the copy rate: {at_model}, {at_section}, {machine}.", ("rows", "percent of the copy rate"),
               "rows", {"{way}": "share"}, names="batch (?P<rows>\\d+): (?P<way>.*)", each=True,
               compute={"rows": lambda t: t.rows.astype(int), "share": lambda t: 100 * t.share_of_copy_rate},
               options={"log_x": True, "marks": {"a copy of as many bytes": 100.0}}),
    ),
}  # fmt: skip
