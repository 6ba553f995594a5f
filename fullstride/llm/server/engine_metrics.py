"""Prometheus metrics of engines: their latest statistics, read when Prometheus asks."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "fullstride_llm_"
# Of an engine: each field of its numbers, by kind, with its name, its help and vLLM's names.
FIELDS: dict[type[GaugeMetricFamily | CounterMetricFamily], dict[str, tuple[str, ...]]] = {
    GaugeMetricFamily: {
        "running": ("requests_running", "Sequences that are running.", "num_requests_running"),
        "waiting": (
            "requests_waiting", "Sequences that wait in the engine, including preempted ones.", "num_requests_waiting"
        ),
        "blocks": ("kv_blocks", "Blocks of the KV cache."),
        "free_blocks": ("kv_blocks_free", "Free blocks, including cached prefixes that may be evicted."),
    },
    CounterMetricFamily: {
        "prefix_queries": (
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
            "prefix_cache_queries", "gpu_prefix_cache_queries",
        ),
        "prefix_hits": (
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.",
            "prefix_cache_hits", "gpu_prefix_cache_hits",
        ),
        "preemptions": (
            "preemptions", "Sequences preempted because the KV cache ran out of blocks.", "num_preemptions"
        ),
        "compiles": ("compiles", "Programs that XLA compiled; an increase after the start is a bug."),
        "steps": ("steps", "Steps of the engine."),
        "prompt_tokens": ("prompt_tokens", "Prompt tokens.", "prompt_tokens"),
        "generated_tokens": ("generated_tokens", "Generated tokens.", "generation_tokens"),
        "drafts": ("spec_decode_drafts", "Drafts that were verified.", "spec_decode_num_drafts"),
        "draft_tokens": (
            "spec_decode_draft_tokens", "Tokens of the drafts that were verified.", "spec_decode_num_draft_tokens"
        ),
        "accepted_tokens": (
            "spec_decode_accepted_tokens", "Tokens of the drafts that were accepted.", "spec_decode_num_accepted_tokens"
        ),
    },
}  # fmt: skip
USED = "kv_usage_ratio", "Share of the KV cache that is in use.", "kv_cache_usage_perc", "gpu_cache_usage_perc"


class EngineCollector:
    """The numbers of a `RequestManager`'s engines after their latest steps, read when Prometheus asks."""

    def __init__(self, bridge: Any):
        """Read the engines behind a `RequestManager`."""
        self._bridge = bridge

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering it reads no engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        stats, up = self._bridge.stats, self._bridge.up()
        for family, names in FIELDS.items():
            for field, (name, text, *_) in names.items():
                yield family(PREFIX + name, text, getattr(stats, field))
        used = 1 - stats.free_blocks / max(1, stats.blocks)
        yield GaugeMetricFamily(PREFIX + USED[0], USED[1], used)
        yield GaugeMetricFamily(PREFIX + "engine_up", "1 while at least one engine is alive.", float(any(up)))
        if len(up) > 1:
            yield from self._each(up)

    def _each(self, up: list[bool]) -> Iterator[Metric]:
        """Yield the metrics of each of several engines."""
        alive = GaugeMetricFamily(PREFIX + "replica_up", "1 while this engine is alive.", labels=["replica"])
        for number, lives in enumerate(up):
            alive.add_metric([str(number)], float(lives))
        yield alive
        for family, field, (name, text, *_) in (
            (kind, *item) for kind, names in FIELDS.items() for item in names.items()
        ):
            if field != "compiles":
                found = family(f"{PREFIX}replica_{name}", text, labels=["replica"])
                for number, replica in enumerate(self._bridge.replicas):
                    found.add_metric([str(number)], getattr(replica.stats, field))
                yield found
