"""The tables of the README and of the documentation, each number out of `benchmarks/results/`."""

from pathlib import Path

from fullstride.report import (
    planned,
    written_distributed,
    written_dual,
    written_engine,
    written_experiments,
    written_kernels,
    written_language,
    written_step,
    written_training,
)
from fullstride.report.llm import rate
from fullstride.report.loader import rate as records
from fullstride.report.markdown import MarkdownTable, Tables, the_experiment, the_file, the_result, the_row
from fullstride.report.reading import Folder, Result, read_folder
from fullstride.report.tables import number
from fullstride.report.written_training import COMPILED, STEP

SHARES = (25, 50, 75, 100)
RECORDED = STEP | {"backend": "eager,graph", "section": "ratios,profile"}
SAMPLERS = {"meanflow": "MeanFlow", "euler": "Euler", "rk4": "RK4"}
LABELS = "labels right"
LONG = "B1 H24 L16384 D128"
BATCHED = "transformers, batched"


def tables(results: Path) -> Tables:
    """What makes each table, by its name; it raises ConfigError where a result or a row that it needs is not there."""
    folder = read_folder(results)
    made = {
        "headlines": headlines,
        "demo": demo,
        "fashion-mnist": fashion_mnist,
        "step": step,
        "loader": loader,
        **written_language.TABLES,
        **written_step.TABLES,
        **written_dual.TABLES,
        **written_training.TABLES,
        **written_distributed.TABLES,
        **written_experiments.TABLES,
        **written_engine.TABLES,
        **written_kernels.TABLES,
    }
    of_results = {name: lambda make=make: str(make(folder)) for name, make in made.items()}
    return of_results | {"plans": planned.plans, "predicted": lambda: planned.predicted(results)}


def headlines(folder: Folder) -> MarkdownTable:
    """One row an area: what was measured, what stands beside it, and what the hardware asks."""
    table = MarkdownTable(("what", "fullstride", "beside it", "the hardware's floor"))
    _training(table, folder)
    _ops(table, folder)
    _serving(table, folder)
    return table


def _training(table: MarkdownTable, folder: Folder) -> None:
    result = the_result(folder, "meanflow-step", **COMPILED)
    flow, full = (the_row(result, f"{name}, compile+graph") for name in ("FM MSE", "MeanFlow 100%"))
    table.add(
        "a MeanFlow step with every sample in the JVP: U-Net of 52M weights, batch 64, bf16",
        f"**{number(full.median)} ms**",
        f"flow matching {number(flow.median)} ms: {number(full.median / flow.median, 3)} x, where the arithmetic asks "
        "for 1.33 x",
        f"{number(full.floor, 3)} ms",
        of=result,
    )
    peer = the_file(folder, "meanflow-beside-py-meanflow")
    ours, theirs = (peer.data["step_ms"][who]["bare"]["median"] for who in ("bf16", "theirs"))
    table.add(
        "CIFAR-10's whole MeanFlow step: 55.9M weights, batch 128, optimizer, three averages",
        f"**{number(ours, 3)} ms** (bf16)",
        f"py-meanflow's own compiled step {number(theirs)} ms (TF32)",
        "",
        of=peer,
    )


def _ops(table: MarkdownTable, folder: Folder) -> None:
    result = the_result(folder, "jvp-attention", precision="bf16", device="cuda")
    ours, vanilla = (the_row(result, f"long128 {LONG} forward, {who}") for who in ("ours", "vanilla"))
    table.add(
        f"attention and its derivative, {LONG}, bf16",
        f"**{number(ours.median)} ms**, {number(ours.extra['gflop'] / ours.median, 3)} TFLOP/s",
        f"PyTorch's math attention under `torch.func.jvp` {number(vanilla.median, 3)} ms",
        f"{number(ours.floor, 3)} ms",
        of=result,
    )
    result = the_result(folder, "train-step", section="host", model="base", device="cuda")
    ours, usual = (the_row(result, name) for name in ("TrainStep grouped", "filter_jit"))
    table.add(
        f"the host's time to call an Equinox training step of {ours.extra['arrays']} arrays",
        f"**{number(ours.median, 3)} ms**",
        f"`filter_jit` {number(usual.median, 3)} ms",
        "",
        of=result,
    )
    bert = the_experiment(folder, "experiment-bert--gpu")
    ours, usual = (written_language.step_ms(bert, "base6", way) for way in ("TrainStep grouped", "filter_jit"))
    table.add(
        f"BERT of 6 layers, a whole step of {bert.data['conditions']['tokens a step']:,} tokens, bf16",
        f"**{number(ours)} ms**",
        f"`filter_jit` {number(usual)} ms",
        "",
        of=bert,
    )


def _serving(table: MarkdownTable, folder: Folder) -> None:
    shape = {"model": "qwen3-0.6b", "precision": "bfloat16", "device": "cuda"}
    result = the_result(folder, "llm", section="small", kernels=None, **shape)
    ours = the_row(result, "fullstride")
    table.add(
        "Qwen3-0.6B's shape, 4 prompts at once, plain JAX",
        f"**{number(rate(ours))} tokens/s**",
        _batched(result),
        f"{number(rate(ours) * ours.over_floor)} tokens/s",
        of=result,
    )
    for section, what in (("small", "the same"), ("large", "the same model, {prompts} prompts of nano-vllm's bench")):
        result = the_result(folder, "llm", section=section, kernels="token", **shape)
        ours = the_row(result, "fullstride")
        table.add(
            f"{what.format(**result.conditions)}, with the engine's CUDA kernels",
            f"**{rate(ours):,.0f} tokens/s**",
            _batched(result),
            f"{rate(ours) * ours.over_floor:,.0f} tokens/s",
            of=result,
        )


def _batched(result: Result) -> str:
    """Transformers' batch in the same run; nothing where it did not run."""
    rate_of = {row.name: rate(row) for row in result.rows if row.name == BATCHED}
    return f"{BATCHED} {number(rate_of[BATCHED], 3)} tokens/s" if rate_of else ""


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
    compiled, recorded = (the_result(folder, "meanflow-step", **c) for c in (COMPILED, RECORDED))
    table = MarkdownTable(("ms", "recorded as written", "compiled and recorded", "floor", "x FM", "at least"))
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


def loader(folder: Folder) -> MarkdownTable:
    """Records a second of the loader alone."""
    table = MarkdownTable(("records a second", "cores", "workers", "records", "x floor"), text=1)
    for device in ("cuda", "cpu"):
        result = the_result(folder, "meanflow-loader", device=device)
        for row in _sorts(result):
            cells = (str(result.environment["cores"]), str(row.extra["workers"]))
            table.add(row.name.partition(",")[0], *cells, number(records(row), 3), number(row.over_floor, 3), of=result)
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
