"""The tables of the documentation about forms of the engine's kernels, out of files that no case writes."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.report.markdown import MarkdownTable, the_file, the_record
from benchmarks.report.reading import Folder, Source
from fullstride.errors import ConfigError

BEFORE, NOW = "keys asked for ahead", "attention's heads prepared once"
# Groups of the token kernel's file and the forms in them that count, the one that was kept first.
VERSIONS = {
    "first version": ("first version", ("base",)),
    "attention by mma": ("attention by mma, variants", ("sentinel", "base")),
    "now": (NOW, ("base",)),
}
# Rows up to which the form that reads one word first was kept.
FEW_ROWS = 4
STAMPS = {
    ("qkv put", "last"): "queries, keys, values are written, by the last block",
    ("attended", "last"): "attention is, by the last block",
    ("o read", "median"): "read by the product after it (median block)",
    ("o put", "median"): "its result is written",
    ("gu read", "median"): "gate and up: read",
    ("gu put", "median"): "gate and up: written",
    ("down read", "median"): "down: read",
    ("down put", "last"): "down: written, by the last block",
}
STAMPED = {
    "1 row, before": (BEFORE, "1x100"),
    "1 row, now": (NOW, "1x100"),
    "4 rows, now": (NOW, "4x100"),
}
# With 64 rows queries, keys and values came to be divided otherwise at last, which other forms were not timed with.
CHAIN = {
    "`paged`": ("paged", "paged"),
    "chain, each launch after the end of the one before (64 rows: before the last form)": ("chained, not early",) * 2,
    "**chain**": ("chained {'qkv': (64, 2)}", "chained"),
    "its products alone": ("products {'qkv': (64, 2)}", "products only"),
    "its attention alone": ("attention only", "attention only"),
}
CHAINED = {64: "64 rows of 300-500", 32: "32 rows of 100-200"}
CHOICES = {
    "argmax": "argmax, no randomness",
    "gumbel (old)": "Gumbel's maximum",
    "race (new)": "races, blocks of 128",
    "race, blocks of 256": "**races, blocks of 256**",
    "race, blocks of 512": "races, blocks of 512",
    "race, blocks of 1024": "races, blocks of 1,024",
    "inverse cdf, 3 levels": "inverse of the cumulative sums, three levels",
    "inverse cdf, 2 levels, cumsum": "inverse of the cumulative sums, two levels",
}
BATCHES = (64, 256)
# Of `paged-attention-forms`: shapes and batches, and what its forms are called.
SIZES = {
    "A | 8": "32 / 8, batch 8",
    "A | 64": "32 / 8, batch 64",
    "Q | 8": "16 / 8, batch 8",
    "Q | 64": "16 / 8, batch 64",
    "Q | 256": "16 / 8, batch 256",
}
FORMS = {
    "base 4x2": "the version before",
    "new 4x2": "clusters of 2 x 4 warps",
    "new 4x1": "**one block of 4 warps** (from 256 pairs on)",
    "new 8x2": "clusters of 2 x 8 warps",
    "new 4x4 least 3": "clusters of 4 x 4 warps",
    "stream 4x1": "blocks that stay and walk over rows and heads, one a pair",
    "stream 4x2": "the same, two a pair",
    "new 4x2 stages 2": "rings of 2 tiles",
    "new 4x2 stages 5": "rings of 5 tiles",
    "new 4x2 hint": "reads in pieces of 256 bytes",
    "4x2 ends at once": "*ends at once*",
    "4x2 no products": "*no products*",
}
SUMS = ((1, 1_024), (1, 4_096), (16, 1_024), (16, 4_096), (64, 1_024))


def token(folder: Folder) -> MarkdownTable:
    """A decode step in one launch, by version of the kernel."""
    source = the_file(folder, "llm-token-kernel")
    table = MarkdownTable(("rows", "context", "bound", *VERSIONS, "rows a second"), text=0)
    for now in source.data["groups"][NOW]:
        step = {"rows": now["rows"], "ctx": now["ctx"]}
        times = [f"{_version(source, *of, **step):.3f}" for of in VERSIONS.values()]
        cells = (f"{now['floor']:.3f}", *times[:-1], f"**{times[-1]}**", f"{1e3 * now['rows'] / now['ms']:,.0f}")
        table.add(str(now["rows"]), f"{now['ctx']:,}", *cells, of=source)
    return table


def _version(source: Source, group: str, forms: Sequence[str], **step: int) -> float:
    """Milliseconds by the first of the forms, which few rows alone have, that were timed."""
    timed = {row["label"] for row in source.data["groups"][group] if step.items() <= row.items()}
    of = forms if step["rows"] <= FEW_ROWS else forms[-1:]
    chosen = next((form for form in of if form in timed), of[-1])
    return the_record(source, source.data["groups"][group], label=chosen, **step)["ms"]


def stamps(folder: Folder) -> MarkdownTable:
    """Where a layer's time in the token kernel goes, in microseconds."""
    source = the_file(folder, "llm-token-kernel")
    table = MarkdownTable(("", *STAMPED))
    for (what, which), shown in STAMPS.items():
        times = (source.data["stamps"][group][step][what][which] / 1e3 for group, step in STAMPED.values())
        table.add(shown, *(f"{time:.1f}" for time in times), of=source)
    return table


def chain(folder: Folder) -> MarkdownTable:
    """A step's layers as a chain of kernels, in milliseconds."""
    source = the_file(folder, "llm-decode-chain")
    rows = source.data["groups"]["rows as images"]
    table = MarkdownTable(("", *CHAINED.values()))
    table.add("bound", *(f"{the_record(source, rows, name='paged', rows=n)['floor']:.2f}" for n in CHAINED), of=source)
    for shown, names in CHAIN.items():
        found = (the_record(source, rows, name=name, rows=n)["ms"] for name, n in zip(names, CHAINED, strict=True))
        bold = "**" * shown.startswith("**")
        table.add(shown, *(f"{bold}{time:.2f}{bold}" for time in found), of=source)
    return table


def attention(folder: Folder) -> MarkdownTable:
    """Forms of a decode step's attention, in microseconds; empty where a form was not timed."""
    source = the_file(folder, "paged-attention-forms")
    times = source.data["us"]
    table = MarkdownTable(("us", *SIZES.values()))
    for form, shown in FORMS.items():
        if not any(f"{form} | {size}" in times for size in SIZES):
            raise ConfigError(f"{source.name}: no form {form!r}; measure it again, or take it out of the table")
        found = (times.get(f"{form} | {size}") for size in SIZES)
        table.add(shown, *("" if us is None else f"{us:.1f}" for us in found), of=source)
    return table


def sampling(folder: Folder) -> MarkdownTable:
    """Choosing a token, in microseconds beyond the product that makes the logits."""
    source = the_file(folder, "llm-sampling")
    table = MarkdownTable(("", *(f"{batch} rows" for batch in BATCHES)))
    for way, shown in CHOICES.items():
        table.add(shown, *(f"{_beyond(source, way, batch):.0f}" for batch in BATCHES), of=source)
    return table


def _beyond(source: Source, way: str, batch: int) -> float:
    found = [the_record(source, source.data["rows"], way=name, batch=batch)["us"] for name in (way, "product alone")]
    return found[0] - found[1]


def sums(folder: Folder) -> MarkdownTable:
    """Sums over two GPUs, in microseconds."""
    source = the_file(folder, "llm-device-sums")
    table = MarkdownTable(("bf16", *(f"{rows} x {hidden:,}" for rows, hidden in SUMS)))
    sizes = ({"dtype": "bfloat16", "rows": rows, "hidden": hidden} for rows, hidden in SUMS)
    found = [the_record(source, source.data["rows"], **size) for size in sizes]
    for key, shown in {"psum": "NCCL", "ours": "ours"}.items():
        table.add(shown, *(f"{row[key]:.1f}" for row in found), of=source)
    return table


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "llm-token-kernel": token,
    "llm-token-stamps": stamps,
    "llm-decode-chain": chain,
    "paged-attention-forms": attention,
    "llm-sampling": sampling,
    "llm-device-sums": sums,
}
