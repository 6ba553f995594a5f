"""Metrics by vLLM's names too, so that its dashboards and autoscalers read them."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

# vLLM's names of a server's own metrics, by attribute, and of its engines', by name without the prefix.
OWN = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "whole": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
    "prompts": "request_prompt_tokens",
    "lengths": "request_generation_tokens",
    "finished": "request_success",
}
ENGINE = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_usage_ratio": "kv_cache_usage_perc",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
}
LABELS = {"reason": "finished_reason"}


class VllmNames:
    """Collector of a server's metrics by vLLM's names, with the label `model_name`."""

    def __init__(self, metrics: Any, model: str):
        """Read these `Metrics` when Prometheus asks."""
        self._metrics, self._model = metrics, model

    def describe(self) -> list[Metric]:
        """Return nothing: the names are those of the metrics that it reads."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for attribute, name in OWN.items():
            for metric in getattr(self._metrics, attribute).collect():
                yield self._renamed(metric, name)
        for metric in self._metrics.engines.collect() if self._metrics.engines else ():
            if (own := metric.name.removeprefix("fullstride_llm_")) in ENGINE:
                yield self._renamed(metric, ENGINE[own])

    def _renamed(self, metric: Metric, name: str) -> Metric:
        made = Metric(f"vllm:{name}", metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {LABELS.get(key, key): value for key, value in sample.labels.items()}
            written = made.name + sample.name.removeprefix(metric.name)
            made.add_sample(written, {"model_name": self._model, **labels}, sample.value)
        return made
