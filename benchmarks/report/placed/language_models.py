"""Tables of the language model: throughput next to other engines, server latency, several GPUs."""

from benchmarks.report.placed.steps import JAX, QWEN
from benchmarks.report.tables import Rows, Table

PEERS = {"vllm": "vLLM", "compiled": "transformers, batched and compiled", "plain": "transformers, batched"}
FIRST = "{first_token_ms_median:n3} (99 %: {first_token_ms_p99:n3})"
SPLIT = r"(?P<devices>\d+) devices?, paged, (?P<what>batch .*)"


def _throughput(what: str, file: str) -> Rows:
    """Return the tokens per second of one workload for every engine that ran it."""
    cells = (what, "**{ours_tokens_per_second:,.0f}**", *(f"{{{peer}_tokens_per_second:,.0f}}" for peer in PEERS))
    return Rows(
        f"{QWEN}{file}--beside-vllm--nvidia-h100-80gb-hbm3", (*cells, "{bound:,.0f}"),
        across={"ours": "fullstride", **PEERS}, optional=("compiled", "plain"),
        compute={"bound": lambda t: t.ours_tokens_per_second * t.ours_median / t.ours_bound},
    )  # fmt: skip


TABLES = {
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
