import pytest

from fullstride.cli.llm_serve import parsed
from fullstride.errors import ConfigError
from fullstride.llm.engine.config import EngineConfig
from fullstride.llm.engine.programs import TOP
from fullstride.llm.engine.wire import BIASES
from fullstride.llm.server.limits import ROOM, ServerLimits


def test_values_take_their_keys_type():
    limits = parsed("--limit", ServerLimits, ["n=4", "total_seconds=0.5", "queue_seconds=30"])
    assert (limits.n, limits.total_seconds, limits.queue_seconds) == (4, 0.5, 30.0)
    assert limits.stop == ServerLimits().stop
    config = parsed("--engine", EngineConfig, ["kv_blocks=7", "prefix_cache=false", "dtype=bfloat16"])
    assert (config.kv_blocks, config.prefix_cache, config.dtype) == (7, False, "bfloat16")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("n", "--limit n: expected KEY=VALUE"),
        ("que=3", "did you mean queue"),
        ("n=many", "--limit n=many: input should be a valid integer"),
        ("n=1.5", "--limit n=1.5"),
        ("queue=-1", "queue=-1: expected a finite number, 0 or more"),
        ("logprobs=21", "logprobs=21: expected at most 20"),
        ("logit_bias=301", "logit_bias=301: expected at most 300"),
        ("prompts=4097", "prompts=4097: expected at most 4096"),
        ("messages=4097", "messages=4097: expected at most 4096"),
        ("schema_bytes=65537", "schema_bytes=65537: expected at most 65536"),
        ("total_seconds=nan", "total_seconds=nan: expected a finite number, 0 or more"),
        ("total_seconds=inf", "total_seconds=inf: expected a finite number, 0 or more"),
    ],
)
def test_what_is_no_setting(item, message):
    with pytest.raises(ConfigError, match=message):
        parsed("--limit", ServerLimits, [item])


def test_there_is_room_for_what_the_engine_was_made_for():
    assert (ROOM["logprobs"], ROOM["logit_bias"]) == (TOP, BIASES)
    assert ServerLimits(**ROOM).logprobs == TOP
