"""Tables of steps: MeanFlow in PyTorch and its ops, Equinox in JAX, the language model engine and its peers."""

import pandas as pd

from benchmarks.harness.experiment_table import number
from benchmarks.report.tables import Rows, Table

TORCH = ("torch",)
STEP = "meanflow-step--unet--bf16--"
COMPILED = f"{STEP}compile,compile+graph--ratios,alternatives,scaling,profile--channels_last--*"
TF32 = "meanflow-step--unet--tf32--graph,compile+graph--ratios--channels_last--*"
DIT = "meanflow-step--dit_b2--bf16--compile+graph--ratios--100-25--*"
NETWORKS = {
    "U-Net 52M, 64 (`--channels-last`)": COMPILED,
    "the same in TF32": TF32,
    "the same in fp32 (IEEE)": "meanflow-step--unet--fp32--graph,compile+graph--ratios--channels_last--*",
    "DiT-B/2, 64": DIT,
    "DiT-B/2, 256": "meanflow-step--dit_b2--bf16--compile+graph--ratios--100[-25]--batch-256--*",
    "DiT-B/4, 64": "meanflow-step--dit_b4--bf16--compile+graph--ratios--100[-25]--*",
    "DiT-B/4, 256": "meanflow-step--dit_b4--bf16--compile+graph--ratios--100-25--batch-256--*",
}
SHARES = {f"m{share}": f"MeanFlow {share}%, compile+graph" for share in (25, 50, 75, 100)}
TWO = ("slow", "fast")  # as it is written, and compiled
PASSES = {"forward": "forward", "detached": "past the tangent", "through": "through it"}
DUAL = "jvp_flash_attention"
WHOSE = {"forward": ("ours", "vanilla", DUAL), "detached": ("ours", "cudnn", "flash", "vanilla", DUAL)}
PEERS = [(kind, who) for kind in PASSES for who in WHOSE.get(kind, ("ours", "vanilla"))]
WHO = {"cudnn": "cuDNN", "vanilla": "math"}
FOREIGN = {"timm ViT-B/16, 224 x 224": "timm-vit", "diffusers UNet2DModel, 32 x 32": "diffusers-unet"}
WAYS = ("eager", "compiled", "TrainStep")
CALLS = [(who, way) for way in WAYS[:2] for who in ("torch", "jvp")]
LARGE = 16 << 20  # bytes; of less a launch costs more than the work
LEAST = {"forward": 80.0, "detached": 70.0, "through": 70.0}  # percent of a copy's rate, below which it is in bold
JAX = ("jax",)
QWEN = "llm--qwen3-0.6b--bfloat16--"
ALONE = "[--no-baseline][--beside-vllm]--*"  # runs of the engine's own numbers, with others beside it or none
BERT = "train-step--base--step[--bare-*]--sdpa--bf16--64x512--*"
SETS = ("plain", "paged", "token")
ENGINES = {"vllm": "vLLM", "compiled": "transformers, batched and compiled", "plain": "transformers, batched"}
FIRST = "{first_token_ms_median:n3} (99 %: {first_token_ms_p99:n3})"
SPLIT = r"(?P<devices>\d+) devices?, paged, (?P<what>batch .*)"


def _whole(column: str, way: str):
    return lambda t: t[f"{way}_{column}"].where(t[f"{way}_ratio"].notna())  # of a whole step


def _shares(kind: str):
    def shares(t: pd.DataFrame) -> list[str]:
        return [f"**{one:.0f}**" if one < LEAST[kind] else f"{one:.0f}" for one in 100 / t[f"{kind}_ours_over"]]

    return shares


def _of_plain(way: str):
    def shown(t: pd.DataFrame) -> list[str]:
        pairs = zip(t[f"jvp_{way}_median"], t[f"plain_{way}_median"], strict=True)
        return [f"{derived:.1f} / {plain:.1f} = {derived / plain:.2f}" for derived, plain in pairs]

    return shown


def _over_eager(t: pd.DataFrame) -> list[str]:
    ratios = (t[f"{kind}_eager_median"] / t[f"{kind}_ours_median"] for kind in PASSES)
    return [" / ".join(number(one, 2) for one in each) for each in zip(*ratios, strict=True)]


def _host(machine: str) -> Table:
    cells = ("{row}", "{median:.3f}", "{p10:.3f}-{p90:.3f}", "{over_flat_ratio:.2f}", "{host_median_ms:.2f}")
    rows = Rows(f"train-step--base--host--{machine}", cells, where="over_flat_ratio.notna()")
    return Table(("way", "ms", "p10-p90", "x flat list", "until it came back"), [rows])


def _kernels(section: str, shown: str, wanted: str, sets: tuple[str, ...]) -> Rows:
    """Return a workload's table by set of kernels; the choice of `auto` is in bold."""
    speeds = [f"{{{by}_tokens_per_second:n4}}" if by in sets else "" for by in SETS[:2]]
    return Rows(
        {by: f"{QWEN}{section}{f'[--{by}]' if by == 'plain' else f'--{by}'}{ALONE}" for by in sets},
        (shown, wanted, *speeds, "**{token_tokens_per_second:n4}**", "{bound:n4}"), where="row == 'fullstride'",
        by=("of",), across={by: by for by in sets},
        compute={"bound": lambda t: t.token_tokens_per_second * t.token_over},
    )  # fmt: skip


def _token(section: str, row: str, shown: str, wanted: str, cell: str, bound: str = "") -> Rows:
    compute = {"seconds": lambda t: t["median"] / 1e3}
    if bound:
        compute["bound"] = lambda t: t.tokens_per_second * t.over
    return Rows(f"{QWEN}{section}--token--*", (shown, wanted, "", "", f"**{cell}**", bound), where=f"row == {row!r}",
                compute=compute)  # fmt: skip


def _bare(key: str) -> str:
    return f"{{{key}_bare_ratio:.3f}} ({{{key}_bare_low:.3f}}-{{{key}_bare_high:.3f}})"


def _throughput(what: str, file: str) -> Rows:
    """Return the tokens per second of one workload for every engine that ran it."""
    cells = (what, "**{ours_tokens_per_second:,.0f}**", *(f"{{{peer}_tokens_per_second:,.0f}}" for peer in ENGINES))
    return Rows(
        f"{QWEN}{file}--beside-vllm--nvidia-h100-80gb-hbm3", (*cells, "{bound:,.0f}"),
        across={"ours": "fullstride", **ENGINES}, optional=("compiled", "plain"),
        compute={"bound": lambda t: t.ours_tokens_per_second * t.ours_median / t.ours_bound},
    )  # fmt: skip


TABLES = {
    "step-networks": Table(
        ("network, batch, bf16 unless named", "bound of FM", "FM", "MF 25 %", "50 %", "75 %", "100 %", "100 % / FM",
         "memory"),
        [Rows(
            {shown: file},
            ("{of}", "{fm_bound:.1f}", "{fm_median:.2f}", *(f"{{{name}_median:.2f}}" for name in SHARES), "{ratio:.2f}",
             "{m100_memory_over_flow_matching:.2f} x"),
            index=("of",), across={"fm": "FM MSE, compile+graph", **SHARES}, optional=("m25", "m50", "m75"),
            compute={"ratio": lambda t: t.m100_median / t.fm_median},
        ) for shown, file in NETWORKS.items()],
        packages=TORCH,
    ),
    "step-alternatives": Table(
        ("", "recorded", "x FM", "compiled, recorded", "x FM", "memory"),
        [Rows(
            {"slow": f"{STEP}eager,graph--alternatives--channels_last--*", "fast": COMPILED},
            ("{name}", *(cell for way in TWO for cell in (f"{{{way}_median:.2f}}{{{way}_mark}}", f"{{{way}_x:n3}}")),
             "{memory:.2f}"),
            first="-backend", index=("name",), by=("of",),
            across={way: way for way in TWO},
            compute={
                **{f"{way}_x": _whole("over_flow_matching", way) for way in TWO},
                **{f"{way}_mark": lambda t, way=way: t[f"{way}_backend"].map(lambda by: " *"[2 * (by[-5:] == "graph"):],
                                                                             na_action="ignore") for way in TWO},
                "memory": lambda t: _whole("memory_over_flow_matching", "fast")(t).fillna(
                    _whole("memory_over_flow_matching", "slow")(t)),
            },
        )],
        packages=TORCH,
    ),
    "jvp-attention": Table(
        ("ms", *(f"{PASSES[kind]}: {WHO.get(who, who)}" for kind, who in PEERS)),
        [Rows(
            "jvp-attention--bf16--auto--all--*",
            ("{size}", *(f"{{{kind}_{who}_median:n4}}" + f" ({{{kind}_tflops:.0f}} TFLOP/s)"
                         * (who == "ours" and kind != "detached") for kind, who in PEERS)),
            names="(?:long128|long64|dit|unet80) (?P<size>.*)", column="shape", index=("size",), by=("kind", "who"),
            across={f"{kind}_{who}": f"{kind} {who}" for kind, who in PEERS},
            compute={f"{kind}_tflops": lambda t, kind=kind: t[f"{kind}_ours_gflop"] / t[f"{kind}_ours_median"]
                     for kind in PASSES},
        )],
    ),
    "jvp-norms": Table(
        ("% of a copy's rate", "forward", "past the tangent", "through it", "PyTorch's ops: x ours"),
        [Rows(
            "jvp-norms--bf16--auto--all--*", ("{shape}", "{forward}", "{detached}", "{through}", "{over}"),
            index=("shape",), by=("kind", "who"),
            across={f"{kind}_{who}": f"{kind} {who}" for kind in PASSES for who in ("ours", "eager")},
            compute={**{kind: _shares(kind) for kind in PASSES}, "over": _over_eager},
            having=f"forward_ours_bytes >= {LARGE} or through_ours_bytes >= {LARGE}",
        )],
    ),
    "jvp-networks": Table(
        ("ms with a derivative / without, batch 64", *WAYS[:2], "`TrainStep`, compile+graph"),
        [Rows(
            {shown: f"jvp-networks--bf16--only-{name}--*"}, ("{of}", *(f"{{{way}}}" for way in WAYS)),
            index=("of",), by=("who", "way"),
            across={f"{who}_{way}": f"{who} {way}" for who in ("plain", "jvp") for way in WAYS},
            compute={way: _of_plain(way) for way in WAYS},
        ) for shown, name in FOREIGN.items()],
    ),
    "jvp-host": Table(
        ("µs a call, forward and backward", "PyTorch", "`jvp`", "PyTorch, compiled", "`jvp`, compiled"),
        [Rows(
            "jvp-host--bf16--only-*--*", ("`{op}`", *(f"{{{who}_{way}_call_us:.0f}}" for who, way in CALLS)),
            index=("op",), by=("who", "way"), across={f"{who}_{way}": f"{who} {way}" for who, way in CALLS},
        )],
    ),
    "host-cpu": _host("intel-*"),
    "host-gpu": _host("nvidia-*"),
    "steps-gpu": Table(
        ("way", "waited, ms", "x bare", "in a loop, ms", "x bare", "first call, s"),
        [Rows(BERT, ("{way}", "{median:.2f}", _bare("over"), "{free_median_ms:.2f}", _bare("free_over"), "{first:.1f}"),
              names="(?P<way>.*), sdpa", compute={"first": lambda t: t.free_first_ms / 1e3})],
    ),
    "llm-kernels": Table(
        ("", "wanted", *SETS, "bound"),
        [
            _kernels("small", "4 prompts, 100 tokens each: tokens/s", "5,000", SETS),
            _kernels("large", "nano-vllm's 256 sequences: tokens/s", "20,000", ("plain", "token")),
            *(_token("sweep", step, f"{step}: tokens/s", wanted, "{tokens_per_second:n4}", "{bound:n4}")
              for step, wanted in (("batch 1, context 128", "1,300"), ("batch 64, context 400", "45,000"))),
            _token("latency", "first token, prompt of 1024", "first token of a prompt of 1,024: ms", "15",
                   "{median:.1f}"),
            _token("latency", "start, process and all, programs compiled before",
                   "start of a server's engine, programs compiled before: s", "30", "{seconds:.1f}"),
        ],
        packages=JAX,
    ),
    "llm-throughput": Table(
        ("tokens/s", "fullstride", "vLLM", "transformers, compiled", "transformers", "roofline bound"),
        [
            _throughput("4 prompts of 100 tokens, `plain`", "small--plain"),
            _throughput("4 prompts of 100 tokens, `token`", "small--token"),
            _throughput("nano-vllm's 256 sequences, `token`", "large--token"),
        ],
        packages=JAX,
    ),
    "llm-clients": Table(
        ("clients", "tokens/s", "share of the engine alone", "time to first token, ms"),
        [Rows("llm-serve--smollm2--float32--plain--*",
              ("{batch:.0f}", "{tokens_per_second:n3}", "{share_of_the_engine:.0%}", FIRST))],
        packages=JAX,
    ),
    "llm-devices": Table(
        ("decode step of Qwen3-8B's shape", "1 GPU, ms", "2 GPUs, ms", "speed-up", "roofline bound of 2, ms"),
        [Rows("llm--qwen3-8b--bfloat16--parallel--paged--*",
              ("{what}", "{one_median:n3}", "{two_median:n3}", "{two_speed_up:n3}", "{two_bound:n3}"), names=SPLIT,
              index=("what",), by=("devices",), across={"one": "1", "two": "2"})],
        packages=JAX,
    ),
}  # fmt: skip
