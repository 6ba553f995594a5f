"""Prometheus metrics: counters and histograms of requests, and the latest statistics of the engines."""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fullstride.llm.outputs import Delta
from fullstride.llm.server.job import EngineJob
from fullstride.llm.server.vllm_metrics import VllmNames

PREFIX = "fullstride_llm_"
# Of an engine: each field of its numbers, by kind, with its name and help.
_FIELDS: dict[type[GaugeMetricFamily | CounterMetricFamily], dict[str, tuple[str, str]]] = {
    GaugeMetricFamily: {
        "running": ("requests_running", "Sequences that are running."),
        "waiting": ("requests_waiting", "Sequences that wait in the engine, including preempted ones."),
        "blocks": ("kv_blocks", "Blocks of the KV cache."),
        "free_blocks": ("kv_blocks_free", "Free blocks, including cached prefixes that may be evicted."),
    },
    CounterMetricFamily: {
        "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
        "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        "preemptions": ("preemptions", "Sequences preempted because the KV cache ran out of blocks."),
        "compiles": ("compiles", "Programs that XLA compiled; an increase after the start is a bug."),
        "steps": ("steps", "Steps of the engine."),
        "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
        "generated_tokens": ("generated_tokens", "Generated tokens."),
    },
}
_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = tuple(float(1 << power) for power in range(21))
_COARSE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Metrics of one server, in their own registry."""

    def __init__(self, model: str = ""):
        """Start at zero; `model` is the label of the metrics by vLLM's names."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.engines: _EngineCollector | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _COARSE) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.accepted = counter("requests_accepted", "Accepted requests; each is later counted once in requests_ended.")
        self.outcomes = counter("requests_ended", "Accepted requests, by how they ended.", "outcome")
        self.refused = counter("requests_refused", "Rejected requests, by error code.", "reason")
        self.aborted = counter("requests_aborted", "Accepted requests that did not finish, by reason.", "reason")
        self.finished = counter("completions_finished", "Completions, by finish reason.", "reason")
        self.responses = counter("http_responses", "Responses, by route and status.", "route", "status")
        self.queue = histogram("queue_seconds", "Time from arrival to the engine's first step with the request.")
        self.first_token = histogram("time_to_first_token_seconds", "Time to first token, from arrival.")
        self.between_tokens = histogram(
            "inter_token_seconds", "Time from one token of a completion to the next.", _FINE
        )
        self.whole = histogram("request_seconds", "Time from arrival to the last token.")
        self.prefill = histogram(
            "prefill_seconds", "Time from the engine's first step with a request to its first token."
        )
        self.decode = histogram("decode_seconds", "Time from a request's first token to its last.")
        self.prompts = histogram("prompt_length_tokens", "Tokens of a finished request's prompts, each.", _TOKENS)
        self.lengths = histogram("completion_length_tokens", "Tokens of a completion.", _TOKENS)
        registry.register(VllmNames(self, model))

    def watch(self, bridge: Any) -> None:
        """Report the engines behind a `RequestManager`, too."""
        self.engines = _EngineCollector(bridge)
        self.registry.register(self.engines)

    def delta(self, job: EngineJob, delta: Delta, now: float) -> None:
        """Record the time of new tokens."""
        before = job.seen.get((delta.request_id, delta.index))
        if job.first_token is None:
            job.first_token = now
            self.first_token.observe(now - job.arrived)
            self.prefill.observe(now - (job.arrived if job.began is None else job.began))
        if before is not None and delta.token_ids:
            for _ in delta.token_ids:
                self.between_tokens.observe((now - before) / len(delta.token_ids))
        completion = delta.request_id, delta.index
        job.seen[completion] = now
        job.lengths[completion] = job.lengths.get(completion, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self.lengths.observe(job.lengths[completion])
            self.finished.labels(delta.finish_reason).inc()

    def ended(self, job: EngineJob, outcome: str) -> None:
        """Record how an accepted job ended."""
        self.outcomes.labels(outcome).inc()
        if outcome == "finished":
            now = perf_counter()
            self.whole.observe(now - job.arrived)
            self.decode.observe(now - (job.first_token or now))
            for prompt in job.prompts:
                self.prompts.observe(len(prompt.token_ids))
        elif outcome != "refused":
            self.aborted.labels(outcome).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """The numbers of a `RequestManager`'s engines after their latest steps, read when Prometheus asks."""

    def __init__(self, bridge: Any):
        self._bridge = bridge

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats, up = self._bridge.stats, self._bridge.up()
        for family, names in _FIELDS.items():
            for field, (name, text) in names.items():
                yield family(PREFIX + name, text, getattr(stats, field))
        used = 1 - stats.free_blocks / max(1, stats.blocks)
        yield GaugeMetricFamily(PREFIX + "kv_usage_ratio", "Share of the KV cache that is in use.", used)
        yield GaugeMetricFamily(PREFIX + "engine_up", "1 while at least one engine is alive.", float(any(up)))
        if len(up) > 1:
            yield from self._each(up)

    def _each(self, up: list[bool]) -> Iterator[Metric]:
        """Yield the metrics of each of several engines."""
        alive = GaugeMetricFamily(PREFIX + "replica_up", "1 while this engine is alive.", labels=["replica"])
        for number, lives in enumerate(up):
            alive.add_metric([str(number)], float(lives))
        yield alive
        for family, field, (name, text) in ((kind, *item) for kind, names in _FIELDS.items() for item in names.items()):
            if field != "compiles":
                found = family(f"{PREFIX}replica_{name}", text, labels=["replica"])
                for number, replica in enumerate(self._bridge.replicas):
                    found.add_metric([str(number)], getattr(replica.stats, field))
                yield found
