"""Tables of the README, of results on two machines, and of the planner."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.report.frame import Results
from benchmarks.report.placed.steps import ALONE, BERT, COMPILED, DIT, QWEN, TF32
from benchmarks.report.tables import Row, Rows, Table

ATTENTION, NORMS = "jvp-attention--bf16--auto--all--*", "jvp-norms--bf16--auto--all--*"
LONG, STEP, FLOW = "long128 B1 H24 L16384 D128 forward", "MeanFlow 100%, compile+graph", "FM MSE, compile+graph"
BOUND, TIMES = "{ours_bound:n3} ms", "**{ours_median:n4} ms** ({ours_p10:n4} to {ours_p90:n4})"
CLAIM = "{} of the official code after 600 seconds {} is reached by fullstride in at most 240"
DISTANCES = {"e": "energy distance", "f": "FD-classifier"}
GROUPED = "TrainStep grouped, sdpa"
MACHINES = {"H200": "nvidia-h200", "H100": "nvidia-h100-80gb-hbm3"}
TOKENS, OWN = ("tokens_per_second", ("plans", "predicted"))  # of the machine that the planner was fitted on
HEADER = ("what", "fullstride", "peer", "roofline bound")
# What was measured, of which file, by which row, and which number of it.
MEASURED = (
    ("MeanFlow's step, all samples in the JVP: U-Net 52M, 64, bf16; ms", COMPILED, STEP, "median"),
    ("flow matching's step of the same; ms", COMPILED, FLOW, "median"),
    ("MeanFlow's step in TF32; ms", TF32, STEP, "median"),
    ("MeanFlow's step of DiT-B/2, 64, bf16; ms", DIT, STEP, "median"),
    ("attention and its derivative, B1 H24 L16384 D128; ms", ATTENTION, f"{LONG}, ours", "median"),
    ("its backward pass through the tangent; ms", ATTENTION, "long128 B1 H24 L16384 D128 through, ours", "median"),
    ("GroupNorm and its derivative, 64x128x32x32; ms", NORMS, "group_norm 64x128x32x32 forward, ours", "median"),
    ("BERT of 12 layers, a step of 64 x 512 tokens, `TrainStep` grouped; ms", BERT, GROUPED, "median"),
    ("Qwen3-0.6B's shape, 4 prompts, CUDA kernels; tokens/s", f"{QWEN}small--token{ALONE}", "fullstride", TOKENS),
    ("256 prompts; tokens/s", f"{QWEN}large--token{ALONE}", "fullstride", TOKENS),
    ("a decode step of 64 rows at 400 tokens; tokens/s", f"{QWEN}sweep--token--*", "batch 64, context 400", TOKENS),
    ("first token of a prompt of 1,024; ms", f"{QWEN}latency--token--*", "first token, prompt of 1024", "median"),
)


def _serving(what: str, file: str) -> Rows:
    """Return the row of the engine compared with vLLM in the same run."""
    rate = {name: lambda t, key=key: t.ours_tokens_per_second * t.ours_median / t[f"ours_{key}"]
            for name, key in (("slow", "p90"), ("fast", "p10"), ("bound", "bound"))}  # fmt: skip
    ours = "**{ours_tokens_per_second:,.0f} tokens/s** ({slow:,.0f} to {fast:,.0f})"
    cells = (what, ours, "vLLM {vllm_tokens_per_second:n3} tokens/s", "{bound:,.0f} tokens/s")
    file = f"{QWEN}{file}--beside-vllm--nvidia-h100-80gb-hbm3"
    return Rows(file, cells, across={"ours": "fullstride", "vllm": "vLLM"}, compute=rate)


def _reached(clock: str) -> Callable[[pd.DataFrame], pd.Series]:
    """Return the seconds after which both distances confirm a claim, for three seeds."""
    of_claim = partial(re.sub, r".* is reached after (\d+) s \(seeds 0, 1 and 2\)", r"\1")
    return lambda t: t[[f"e_{clock}_found", f"f_{clock}_found"]].map(of_claim).astype(int).max(axis=1)


HEADLINES = [
    Rows(ATTENTION,
         ("attention and its forward-mode derivative (JVP): batch 1, 24 heads, 16,384 tokens, head dimension 128, bf16",
          TIMES, "jvp_flash_attention {dual_median:n3} ms; math attention under `torch.func.jvp` {math_median:n3} ms",
          BOUND),
         across={"ours": f"{LONG}, ours", "dual": f"{LONG}, jvp_flash_attention", "math": f"{LONG}, vanilla"}),
    Rows("meanflow-peer--compile+graph--*",
         ("CIFAR-10's whole MeanFlow step: SongUNet of 55.9M weights, batch 128, augmentation, optimizer, 3 EMAs, TF32",
          "**{tf32_median:n4} ms**; bf16 {ours_median:n4} ms", "py-meanflow, compiled {theirs_median:n4} ms",
          "{tf32_bound:n3} ms; bf16 {ours_bound:n3} ms"),
         across={"ours": "fullstride, bf16", "tf32": "fullstride, tf32", "theirs": "py-meanflow"}),
    Rows(BERT,
         ("BERT-base training step in Equinox, 32,768 tokens, bf16", "**{ours_free_median_ms:n4} ms**",
          "`filter_jit` {usual_free_median_ms:n4} ms; donated {donated_free_median_ms:n4} ms", BOUND),
         across={"ours": GROUPED, "donated": "filter_jit donated, sdpa",
                 "usual": "filter_jit, sdpa"}),
    _serving("Qwen3-0.6B, bf16, random weights: throughput of 4 prompts", "small--token"),
    _serving("the same: throughput of 256 prompts (nano-vllm's benchmark)", "large--token"),
]  # fmt: skip
# Five more, on the page of results.
MORE = [
    Rows(COMPILED,
         ("MeanFlow step with every sample in the JVP: U-Net of 52M weights, batch 64, bf16", TIMES,
          "flow matching {fm_median:n4} ms: {x:n3} x; the FLOP count predicts 1.33 x", BOUND),
         across={"ours": STEP, "fm": FLOW}, compute={"x": lambda t: t.ours_median / t.fm_median}),
    Rows("experiment-time-to-quality--gpu--*",
         ("time to the quality that py-meanflow reaches in 600 s: Fashion-MNIST, 3 seeds",
          "**{trained} s** of training; {started} s with start-up", "py-meanflow 600 s by the same clock", ""),
         across={f"{of}_{name}": CLAIM.format(metric, clock) for of, metric in DISTANCES.items()
                 for name, clock in (("of", "of training"), ("with", "with start-up"))},
         compute={"trained": _reached("of"), "started": _reached("with")}),
    Rows("train-step--base--host--nvidia-*",
         ("host time to dispatch an Equinox training step of {ours_arrays:.0f} arrays", TIMES.replace("n4", "n3"),
          "`filter_jit` {usual_median:n3} ms", ""), across={"ours": "TrainStep grouped", "usual": "filter_jit"}),
    _serving("Qwen3-0.6B: throughput of 4 prompts in plain JAX", "small--plain"),
]  # fmt: skip


def plans(results: Results, machine: str) -> tuple[list[Row], str]:
    """Return the papers' runs on one GPU of the machine that the planner was fitted on."""
    from fullstride.cli.meanflow_plan import cells, published

    return [(cells(name, plan), ()) for name, plan in published().items()], ""


def predicted(results: Results, machine: str) -> tuple[list[Row], str]:
    """Return the errors of predicted step times by network, precision, backend and batch."""
    from benchmarks.tuning.planned_steps import measured, work_for
    from fullstride.meanflow.planning.cost import memory_bytes, step_ms
    from fullstride.meanflow.planning.fit import fitted

    def off(errors: pd.Series) -> str:
        return " to ".join(dict.fromkeys(f"{100 * end:+.0f} %" for end in (errors.min(), errors.max())))

    kept, rows = fitted(), []
    for row in measured(results.folder):
        step, work = row.step, work_for(row)
        time = step_ms(work, step, kept.rates[step.precision], kept.costs) / row.ms - 1
        memory = memory_bytes(work, step, kept.costs) / row.memory - 1 if row.memory else 0.0
        key = (row.model, step.precision, step.backend, f"{step.batch}{', whole step' * step.whole}")
        rows.append({"key": key, "time": time, "memory": memory, "fitted": row.fitted})
    groups: Any = pd.DataFrame(rows).groupby("key", sort=False)
    return [((*key, str(len(of)), str(of.fitted.sum()), off(of.time), off(of.memory)), ()) for key, of in groups], ""


TABLES = {
    "headlines": Table(HEADER, HEADLINES),
    "headlines-more": Table(HEADER, MORE),
    "two-machines": Table(
        ("", *(cell for name in MACHINES for cell in (name, "x bound"))),
        [Rows({name: file.replace("--*", f"--{slug}") for name, slug in MACHINES.items()},
              (what, *(cell for name in MACHINES for cell in (f"{{{name}_{value}:n4}}", f"{{{name}_over:over}}"))),
              where=f"row == {row!r}", by=("of",), across={name: name for name in MACHINES})
         for what, file, row, value in MEASURED],
    ),
    "plans": Table(("run", "weights", "batch", "GPUs", "ms a step", "images/s", "GiB", "steps", "epoch", "first save",
                    "in all"), plans),
    "predicted": Table(("network", "precision", "backend", "batch", "steps", "of them fitted", "time off by",
                        "memory off by"), predicted),
}  # fmt: skip
