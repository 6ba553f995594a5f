"""Prometheus metrics: counters and histograms of requests, and the latest statistics of the engines.

Each is declared once, with vLLM's names of the same number, so that dashboards and autoscalers of vLLM read it.
"""

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from fullstride.llm.outputs import Delta
from fullstride.llm.server.engine_metrics import FIELDS, PREFIX, USED, EngineCollector
from fullstride.llm.server.job import EngineJob

VLLM, VLLM_LABELS = "vllm:", {"reason": "finished_reason"}
_FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = tuple(float(1 << power) for power in range(21))
_COARSE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Metrics of one server, in their own registry.

    Attributes:
        registry: the metrics by their own names.
        vllm: vLLM's names of a metric, by its own name; none for a number that vLLM has not.

    """

    def __init__(self, model: str = ""):
        """Start at zero; `model` is the label `model_name` of the metrics by vLLM's names."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._model = model
        fields = [field for names in FIELDS.values() for field in names.values()]
        self.vllm = {PREFIX + name: names for name, _, *names in [*fields, USED]}

        def counter(name: str, text: str, *labels: str, vllm: tuple[str, ...] = ()) -> Counter:
            self.vllm[PREFIX + name] = [*vllm]
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, *vllm: str, buckets: tuple[float, ...] = _COARSE) -> Histogram:
            self.vllm[PREFIX + name] = [*vllm]
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.accepted = counter("requests_accepted", "Accepted requests; each is later counted once in requests_ended.")
        self.outcomes = counter("requests_ended", "Accepted requests, by how they ended.", "outcome")
        self.refused = counter("requests_refused", "Rejected requests, by error code.", "reason")
        self.aborted = counter("requests_aborted", "Accepted requests that did not finish, by reason.", "reason")
        self.finished = counter(
            "completions_finished", "Completions, by finish reason.", "reason", vllm=("request_success",)
        )
        for reason in ("stop", "length"):
            self.finished.labels(reason)  # from 0, or the first of a reason is in no rate
        self.responses = counter("http_responses", "Responses, by route and status.", "route", "status")
        self.queue = histogram(
            "queue_seconds",
            "Time from arrival to the engine's first step with the request.",
            "request_queue_time_seconds",
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time to first token, from arrival.", "time_to_first_token_seconds"
        )
        self.between_tokens = histogram(
            "inter_token_seconds",
            "Time from one token of a completion to the next.",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            buckets=_FINE,
        )
        self.pace = histogram(
            "request_inter_token_seconds",
            "Mean time between the tokens of a request's longest completion.",
            "request_time_per_output_token_seconds",
            buckets=_FINE,
        )
        self.whole = histogram("request_seconds", "Time from arrival to the last token.", "e2e_request_latency_seconds")
        self.prefill = histogram(
            "prefill_seconds",
            "Time from the engine's first step with a request to its first token.",
            "request_prefill_time_seconds",
        )
        self.decode = histogram(
            "decode_seconds", "Time from a request's first token to its last.", "request_decode_time_seconds"
        )
        self.inference = histogram(
            "inference_seconds",
            "Time from the engine's first step with a request to its last token.",
            "request_inference_time_seconds",
        )
        self.prompts = histogram(
            "prompt_length_tokens",
            "Tokens of a finished request's prompts, each.",
            "request_prompt_tokens",
            buckets=_TOKENS,
        )
        self.lengths = histogram(
            "completion_length_tokens", "Tokens of a completion.", "request_generation_tokens", buckets=_TOKENS
        )
        self.longest = histogram(
            "longest_completion_tokens",
            "Tokens of a finished request's longest completion.",
            "request_max_num_generation_tokens",
            buckets=_TOKENS,
        )
        self.token_limits = histogram(
            "request_max_tokens",
            "A finished request's limit on the tokens of a completion.",
            "request_params_max_tokens",
            buckets=_TOKENS,
        )
        self.samples = histogram(
            "request_completions", "Completions that a finished request wanted of a prompt.", "request_params_n",
            buckets=_TOKENS[:8],
        )  # fmt: skip

    def watch(self, bridge: Any) -> None:
        """Report the engines behind a `RequestManager`, too."""
        self.registry.register(EngineCollector(bridge))

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
            self._finished(job, perf_counter())
        elif outcome != "refused":
            self.aborted.labels(outcome).inc()

    def _finished(self, job: EngineJob, now: float) -> None:
        first = job.first_token or now
        longest = max(job.lengths.values(), default=0)
        self.whole.observe(now - job.arrived)
        self.decode.observe(now - first)
        self.inference.observe(now - (job.arrived if job.began is None else job.began))
        self.longest.observe(longest)
        if longest > 1:
            self.pace.observe((now - first) / (longest - 1))
        for prompt in job.prompts:
            self.prompts.observe(len(prompt.token_ids))
            self.samples.observe(prompt.params.n)
            if prompt.params.max_tokens is not None:
                self.token_limits.observe(prompt.params.max_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric by its own name, then by vLLM's with the label `model_name`."""
        for metric in self.registry.collect():
            yield metric
            for name in self.vllm.get(metric.name, ()):
                yield self._renamed(metric, VLLM + name)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        made = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()}
            suffix = sample.name.removeprefix(metric.name)
            made.add_sample(name + suffix, {"model_name": self._model, **labels}, sample.value)
        return made

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self)  # pyright: ignore[reportArgumentType]  # it takes whatever can be collected
