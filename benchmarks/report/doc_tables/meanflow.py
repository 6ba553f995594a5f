"""Tables about MeanFlow: what it draws, what a step costs, what the loader brings."""

from collections.abc import Callable, Mapping

from benchmarks.report.doc_tables.training import COMPILED, STEP, steps_on_gpu
from benchmarks.report.loader import rate
from benchmarks.report.markdown import MarkdownTable, the_file, the_result, the_row
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.sampling import is_set
from benchmarks.report.sampling import rate as images_a_second
from benchmarks.report.tables import number, over_bound

SHARES = (0, 25, 50, 75, 100)
BY_SHARE = STEP | {"backend": "eager,graph", "section": "ratios,profile"}
SAMPLERS = {"meanflow": "MeanFlow", "euler": "Euler", "rk4": "RK4"}
LABELS = "labels right"
SAMPLED = {"model": "unet", "memory_order": "channels_last", "backend": "eager,graph", "device": "cuda"}


def demo(folder: Folder) -> MarkdownTable:
    """Samplers of the demo's run."""
    source = the_file(folder, "meanflow-demo--amd-epyc")
    table = MarkdownTable(("sampler", "NFE", "energy distance", "x floor", "Frechet distance", "x floor", LABELS))
    floor = source.data["floor"]
    for one in source.data["samplers"].values():
        score = one["score"]
        ratios = (score[key] / floor[key] for key in ("energy_distance", "frechet_distance"))
        energy, frechet = (f"{ratio:.2f}" for ratio in ratios)
        cells = (f"{score['energy_distance']:.4f}", energy, f"{score['frechet_distance']:.1f}", frechet)
        table.add(*_sampler(one), *cells, f"{100 * score['label_accuracy']:.1f} %", of=source)
    cells = (f"{floor['energy_distance']:.4f}", "1.00", f"{floor['frechet_distance']:.1f}", "1.00")
    table.add("*floor: the training half*", "", *cells, f"{100 * floor['label_accuracy']:.0f} %", of=source)
    return table


def _sampler(one: dict) -> tuple[str, str]:
    name = f"{SAMPLERS[one['sampler']]}, {one['steps']} step{'s' * (one['steps'] != 1)}"
    bold = "**" * (name == "MeanFlow, 1 step")
    return f"{bold}{name}{bold}", f"{bold}{one['nfe']:.0f}{bold}"


def fashion_mnist(folder: Folder) -> MarkdownTable:
    """Samplers of the ten minutes of Fashion-MNIST."""
    source = the_file(folder, "meanflow-fashion-mnist--10-minutes")
    distances = ("energy distance", "FD-classifier", "FD-EffNetLite0")
    table = MarkdownTable(("sampler", "NFE", *distances, "precision / recall", LABELS))
    scored = source.data["ema 0.9995"]
    floor = ("*floor: as many training images*", ""), scored["floor"]
    for names, score in [*((_sampler(one), one["score"]) for one in scored["samplers"].values()), floor]:
        features = score["features"]
        net = features["efficientnet_lite0"]
        table.add(
            *names,
            f"{score['energy_distance']:.4f}",
            f"{features['classifier']['frechet']:.1f}",
            f"{net['frechet']:.1f}",
            f"{net['precision']:.2f} / {net['recall']:.2f}",
            f"{100 * score['label_accuracy']:.1f} %",
            of=source,
        )
    return table


def step(folder: Folder) -> MarkdownTable:
    """A training step by share of the samples in the JVP."""
    compiled, recorded = (steps_on_gpu(folder, conditions) for conditions in (COMPILED, BY_SHARE))
    table = MarkdownTable(("ms", "recorded as written", "compiled and recorded", "bound", "x FM", "at least"))
    flow = the_row(compiled, "FM MSE, compile+graph").median
    names = {"forward": "forward, no gradient", "JVP": "the JVP alone", "FM MSE": "flow matching"}
    names |= {f"MeanFlow {share}%": f"MeanFlow, {share} % in the JVP" for share in SHARES}
    for name, shown in names.items():
        slow, fast = the_row(recorded, f"{name}, graph"), the_row(compiled, f"{name}, compile+graph")
        times = (f"{ms:.2f}" for ms in (slow.median, fast.median, fast.floor))
        ratios = (fast.median / flow, fast.extra["forwards"] / 3) if "ratio" in fast.extra else ()
        cells = [f"{ratio:.2f}" for ratio in ratios] or ["", ""]
        table.add(shown, *times, *cells, of=(recorded, compiled))
    return table


def sampling(folder: Folder) -> MarkdownTable:
    """Images of one batch and of a set on a CPU, by sampler and batch."""
    result = the_result(folder, "meanflow-sampling", device="cpu")
    table = MarkdownTable(("images", "batch", "network", "ms", "images/s", "x bound"))
    for row in result.rows:
        cells = (str(row.extra["batch"]), row.extra["backend"], number(row.median), number(images_a_second(row), 3))
        table.add(_drawn(row), *cells, over_bound(row), of=result)
    return table


def sampling_on_gpu(folder: Folder) -> MarkdownTable:
    """Images of one batch and of a set on a GPU, operation by operation beside recorded, in both precisions."""
    found = {name: the_result(folder, "meanflow-sampling", **SAMPLED, precision=name) for name in ("bf16", "tf32")}
    each = (
        f"{name}: {what}" for name in found for what in ("eager, ms", "graph, ms", "graph, images/s", "graph, x bound")
    )
    table = MarkdownTable(("images", "batch", *each), packages=("torch",))
    recorded = [row for row in found["bf16"].rows if row.extra["backend"] == "graph"]
    for row in recorded:
        cells = list[str]()
        for result in found.values():
            fast, slow = (the_row(result, row.name.replace("graph", backend)) for backend in ("graph", "eager"))
            cells += [number(slow.median), number(fast.median), number(images_a_second(fast), 3)]
            cells.append(over_bound(fast))
        table.add(_drawn(row), str(row.extra["batch"]), *cells, of=tuple(found.values()))
    return table


def _drawn(row: Measurement) -> str:
    """What a row draws, in words."""
    steps = f"{row.extra['steps']} step{'s' * (row.extra['steps'] != 1)}"
    return f"{SAMPLERS[row.extra['sampler']]}, {steps}{', a set of ' + str(row.extra['num']) if is_set(row) else ''}"


def loader(folder: Folder) -> MarkdownTable:
    """Records a second of the loader alone."""
    table = MarkdownTable(("records a second", "cores", "workers", "records", "x bound"), text=1)
    for device in ("cuda", "cpu"):
        result = the_result(folder, "meanflow-loader", device=device)
        for row in _sorts(result):
            cells = (str(result.environment["cores"]), str(row.extra["workers"]))
            table.add(row.name.partition(",")[0], *cells, number(rate(row), 3), over_bound(row), of=result)
    return table


def _sorts(result: Result) -> list:
    """Of each sort of records, without workers and with the most."""
    found: dict[str, list] = {}
    for row in result.rows:
        found.setdefault(row.name.partition(",")[0], []).append(row)
    chosen = []
    for rows in found.values():
        rows.sort(key=lambda row: row.extra["workers"])
        chosen += [rows[0], *rows[-1:]] if len(rows) > 1 else rows
    return chosen


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "demo": demo,
    "fashion-mnist": fashion_mnist,
    "step": step,
    "loader": loader,
    "sampling-cpu": sampling,
    "sampling-gpu": sampling_on_gpu,
}
