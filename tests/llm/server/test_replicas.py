"""Several engines behind one server: who gets a prompt, and what is left when one of them dies."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fullstride.llm.engine.blocks import block_hashes
from fullstride.llm.outputs import EngineStats
from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.replicas import Replica, Router, total
from fullstride.llm.server.served_model import ServedModel
from tests.llm.server.fake_engine import FAIL_STEP, FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer
from tests.llm.server.live import Live, listening, until
from tests.llm.server.test_metrics import _samples
from tests.llm.server.test_request_manager import ENDLESS, _raw

BLOCK = 4


class KnowingEngine(FakeEngine):
    """Knows for ever the blocks of the prompts that it began with."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.known: set[bytes] = set()

    def block_hashes(self, prompt: Sequence[int], adapter: str | None = None, cache_salt: str = "") -> list[bytes]:
        return block_hashes(prompt[:-1], BLOCK)

    def cached_prefix_blocks(self, names: Sequence[bytes]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.known), len(names))

    def step(self):
        for sequence in self.waiting:
            self.known.update(self.block_hashes(sequence.prompt))
        return super().step()


def _replicas(count: int) -> list[Replica]:
    ignore = lambda *_: None  # noqa: E731
    return [Replica(i, KnowingEngine(), ignore, ignore, ignore) for i in range(count)]


def _app(engines: list[KnowingEngine], **limits):
    served = ServedModel(("fake",), FakeTokenizer(), 512)
    return create_app(engines, served, concurrent=8, limits=ServerLimits(**{"drain_seconds": 1.0, **limits}))


def _metrics(live: Live) -> dict[str, float]:
    with httpx.Client(base_url=live.url) as http:
        return _samples(http)


def _ask(live: Live, prompt: str, count: int = 5) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True}
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=20)


def test_the_longest_known_beginning_wins_unless_its_engine_is_much_busier():
    replicas = _replicas(3)
    router = Router(replicas, 8, 60.0)  # two more than the least is still fine
    names = block_hashes(range(40), BLOCK)
    for number, blocks in ((1, 3), (2, 6)):
        engine: Any = replicas[number].engine
        engine.known.update(names[:blocks])
    assert [replica.known(names) for replica in replicas] == [0, 3, 6]
    replicas[2].load = 2
    assert router.choose(names).number == 2
    replicas[2].load = 3
    assert router.choose(names).number == 1
    replicas[1].load = 3
    assert router.choose(names).number == 0


def test_what_was_only_just_given_to_an_engine_counts_as_known_until_it_ends():
    replicas = _replicas(2)
    names = block_hashes(range(20), BLOCK)
    replicas[1].enter(names, 2)
    replicas[1].enter(names[:2], 1)
    assert (replicas[1].known(names), replicas[1].load) == (5, 3)
    replicas[1].leave(names, 2)
    assert (replicas[1].known(names), replicas[1].load) == (2, 1)
    replicas[1].leave(names[:2], 1)
    assert (replicas[1].known(names), replicas[1].load) == (0, 0)
    assert not replicas[1]._coming
    assert replicas[0].known(names) == 0


def test_strangers_go_to_the_least_loaded_and_then_in_turn():
    replicas = _replicas(3)
    router = Router(replicas, 8, 60.0)
    replicas[1].load = 1
    chosen = []
    for _ in range(4):
        chosen.append(router.choose([]).number)
    assert chosen == [0, 2, 0, 2]


def test_totals_are_sums_but_of_compiles_which_the_process_counts():
    replicas = _replicas(2)
    replicas[0].stats = EngineStats(1, 2, 30, 20, prefix_hits=5, compiles=9)
    replicas[1].stats = EngineStats(3, 0, 30, 10, prefix_hits=6, compiles=9)
    assert total(replicas) == EngineStats(4, 2, 60, 30, prefix_hits=11, compiles=9)


def test_prompts_with_one_beginning_meet_and_others_are_spread():
    engines = [KnowingEngine(), KnowingEngine()]
    with listening(_app(engines)) as live:
        for tail in "abcd":
            assert _ask(live, f"the same beginning {tail}").status_code == 200
        assert sorted(len(engine.prompts) for engine in engines) == [0, 4]
        for number in range(4):
            assert _ask(live, f"{number} another").status_code == 200
        assert min(len(engine.prompts) for engine in engines) >= 2
        found = _metrics(live)
    made = [found[f"fullstride_llm_replica_generated_tokens_total{{replica={i}}}"] for i in (0, 1)]
    assert sum(made) == found["fullstride_llm_generated_tokens_total{}"] == 40
    assert min(made) > 0
    assert found["fullstride_llm_replica_up{replica=1}"] == 1


def test_prompts_of_one_request_run_on_several_engines_and_come_in_order():
    engines = [KnowingEngine(delay=0.002) for _ in range(2)]
    with listening(_app(engines)) as live:
        prompts = [f"{letter}" * 9 for letter in "abcdef"]
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": prompts, "max_tokens": 9}).json()
        assert [choice["text"] for choice in answer["choices"]] == prompts
        assert [len(engine.prompts) for engine in engines] == [3, 3]
        # One that can never fit takes the others along, wherever they run.
        refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": ["ab", "cd"], "max_tokens": 511})
        assert refused.status_code == 400
        until(lambda: all(engine.free == engine.blocks for engine in engines))
        assert live.bridge._open == sum(replica.load for replica in live.bridge.replicas) == 0
        assert not live.bridge._placed


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_aborted_where_it_runs(stream):
    engines = [KnowingEngine(delay=0.005) for _ in range(2)]
    with listening(_app(engines)) as live:
        with _raw(live, {**ENDLESS, "stream": stream}):
            until(lambda: any(engine.running for engine in engines))
        until(lambda: any(engine.aborted for engine in engines))
        until(lambda: all(engine.free == engine.blocks for engine in engines))
        assert sum(bool(engine.prompts) for engine in engines) == 1


def test_one_engine_dies_alone_and_is_seen():
    engines = [KnowingEngine(delay=0.01) for _ in range(2)]
    with listening(_app(engines)) as live, ThreadPoolExecutor() as pool:
        spared = pool.submit(_ask, live, "spared", 60)
        until(lambda: any(engine.running for engine in engines))
        broken = httpx.post(f"{live.url}/v1/completions", json={"prompt": [FAIL_STEP, 1], "max_tokens": 3})
        assert broken.status_code == 500
        assert spared.result().status_code == 200
        assert httpx.get(f"{live.url}/health").json() == {"status": "degraded"}
        found = _metrics(live)
        lives = [found[f"fullstride_llm_replica_up{{replica={i}}}"] for i in (0, 1)]
        assert sorted(lives) == [0, 1]
        assert found["fullstride_llm_engine_up{}"] == 1
        for number in range(3):
            assert _ask(live, f"{number}").status_code == 200
        # With the last one the server is dead.
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": [FAIL_STEP, 1]}).status_code == 500
        until(lambda: httpx.get(f"{live.url}/health").status_code == 503)
        assert _ask(live, "late").json()["error"]["code"] == "engine_dead"


def test_a_full_server_counts_all_engines():
    engines = [KnowingEngine(delay=0.01) for _ in range(2)]
    with listening(_app(engines, queue=1)) as live:
        assert live.bridge.capacity == 17
        live.bridge.replicas[0].death = RuntimeError("gone")
        assert live.bridge.capacity == 9
