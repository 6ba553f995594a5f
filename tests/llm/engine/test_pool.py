from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cases.llm.work import SHAPES
from fullstride.errors import ConfigError
from fullstride.llm.engine import EngineConfig, pool
from fullstride.llm.engine import build as parts
from fullstride.llm.engine.build import build_parts, select_kernels
from fullstride.llm.engine.shapes import choose_shapes
from fullstride.llm.kernels.xla.kernels import plain

QWEN3 = SHAPES["qwen3-0.6b"]
A_TOKEN = 2 * 28 * 8 * 128 * 4  # bytes in fp32
CPU = SimpleNamespace(platform="cpu")


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that the machine says to have."""
    return lambda found: monkeypatch.setattr(pool, "free_host_memory", lambda: found)


def made(model=QWEN3, device=CPU, **settings):
    return choose_shapes(EngineConfig(**settings), model, plain(dynamic=True), device)


@pytest.mark.parametrize("gigabytes", [4, 16, 1000, None])
def test_a_pool_that_nobody_asked_for_leaves_the_machine_its_memory(free, gigabytes):
    """The model is for 40,960 tokens: 9.4 GB."""
    free(gigabytes and gigabytes * 10**9)
    found = made()
    taken = (found.blocks + 1) * 16 * A_TOKEN
    assert taken <= (gigabytes or 1000) * 0.25e9
    if gigabytes in (1000, None):
        assert (found.max_length, found.blocks) == (40_960, 2560)
    else:
        assert found.max_length == found.blocks * 16 + 1
        assert taken > gigabytes * 0.25e9 - 16 * A_TOKEN


def test_small_models_share_half_a_gibibyte(free):
    free(16 * 10**9)
    found = made(replace(QWEN3, max_position=1000))
    assert (found.max_length, found.blocks) == (1000, (512 << 20) // (16 * A_TOKEN) - 1)


def test_a_length_that_was_asked_for_has_room_or_is_refused(free):
    free(10**10)
    assert made(max_length=1000).blocks == (512 << 20) // (16 * A_TOKEN) - 1
    assert made(max_length=30_000).blocks == 30_000 // 16
    free(12 * 10**9)
    assert made(max_length=40_960).max_length == 40_960
    free(11 * 10**9)  # it would fit, and leave nothing for a step
    message = "max_length=40960: its keys and values take 9.4 GB; 11.0 GB are free, of which they may take 80%: "
    with pytest.raises(ConfigError, match=message):
        made(max_length=40_960)


def test_a_share_of_what_is_free(free):
    free(10**9)
    assert (made(kv_share=0.5).blocks + 1) * 16 * A_TOKEN == pytest.approx(0.5e9, abs=16 * A_TOKEN)
    stats = [{"bytes_limit": 9 * 10**9, "bytes_in_use": 5 * 10**9}, {"bytes_limit": 9 * 10**9, "bytes_in_use": 10**9}]
    gpus = [SimpleNamespace(platform="gpu", memory_stats=lambda each=each: each) for each in stats]
    for share in (None, 0.25):
        found = choose_shapes(EngineConfig(kv_share=share, dtype="float32"), QWEN3, plain(dynamic=False), *gpus)
        # As much of each as of the fullest.
        assert (found.blocks + 1) * 16 * A_TOKEN == pytest.approx((share or 0.8) * 8e9, abs=16 * A_TOKEN)


def test_a_device_that_does_not_say_what_it_has():
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not report its free memory: set kv_blocks or kv_memory"):
        made(device=silent)
    assert made(device=silent, kv_memory=1 << 30).blocks > 0


def test_settings_of_the_pool_exclude_each_other():
    with pytest.raises(ConfigError, match="kv_blocks and kv_share exclude each other"):
        EngineConfig(kv_blocks=1, kv_share=0.5)
    with pytest.raises(ConfigError, match="kv_share=1.5: expected a fraction of the free memory"):
        EngineConfig(kv_share=1.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_blocks", 0, "kv_blocks=0: expected 1 or more"),
        ("kv_blocks", 8.5, "kv_blocks=8.5: expected an integer"),
        ("max_sequences", "4", "max_sequences='4': expected an integer"),
        ("max_length", 1, "max_length=1: expected 2 or more"),
        ("dtype", "float64", "dtype=float64: expected one of"),
        ("dtype", "int8", "dtype=int8: expected one of"),
    ],
)
def test_what_no_engine_can_be_is_refused_by_name(name, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 257}, "max_length=257: expected at most 256"),
        ({"max_sequences": 300, "max_tokens_per_step": 300}, "max_tokens_per_step=300: expected more than max_seq"),
        # Of a block in fp32: keys and values of 2 layers, 2 heads of 16 numbers, 16 tokens; a pool has two or more.
        ({"kv_memory": 16_383}, "a KV cache of 16383 bytes is too small: expected at least 16384, for two blocks"),
        # Of codes a third one, for scales.
        (
            {"kv_memory": 6143, "kv_cache_dtype": "fp8"},
            "a KV cache of 6143 bytes is too small: expected at least 6144, for two blocks, one of them for scratch",
        ),
    ],
)
def test_what_the_model_rules_out_is_refused_before_weights_are_on_a_device(qwen3, monkeypatch, settings, message):
    with monkeypatch.context() as patch:
        patch.setattr(parts, "put", lambda *_: pytest.fail("weights were put on a device"))
        with pytest.raises(ConfigError, match=message):
            build_parts(qwen3, EngineConfig(**settings), None)
    fits: dict[str, Any] = {"max_length": 256, "max_tokens_per_step": 301, "kv_memory": 16_384}
    select_kernels(qwen3.config, EngineConfig(**{name: fits.get(name, value) for name, value in settings.items()}))


def test_the_engine_says_what_it_chose(qwen3, free, caplog):
    caplog.set_level("INFO", "fullstride.llm.engine")
    build_parts(qwen3, EngineConfig(kv_blocks=16), None)
    free(500_000)
    build_parts(qwen3, EngineConfig(), None)
    told, cut = caplog.records
    assert (told.levelname, told.getMessage()) == ("INFO", "max_length=256, 16 blocks of 16 tokens, 0 MB")
    assert cut.levelname == "WARNING"
    assert cut.getMessage().startswith(
        "max_length=225, 14 blocks of 16 tokens, 0 MB: the model supports 256 tokens; set kv_"
    )


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Makes control groups of these limits; of each 70 bytes are used, 20 of them by files."""

    def make(listed, names, limits):
        monkeypatch.setattr(pool, "CGROUPS", tmp_path / "groups")
        monkeypatch.setattr(pool, "MINE", tmp_path / "cgroup")
        (tmp_path / "cgroup").write_text(listed)
        for path, limit in limits.items():
            group = tmp_path / "groups" / path
            group.mkdir(parents=True, exist_ok=True)
            for name, text in zip(names, (limit, "70\n"), strict=False):
                (group / name).write_text(text)
            (group / "memory.stat").write_text(f"anon 50\n{names[2]} 20\n")

    return make


def test_free_memory_of_machine_and_container(groups):
    groups("0::/\n", V2, {".": "max\n"})
    machine = pool.free_host_memory()
    assert machine is not None
    assert 2**20 < machine < 2**50
    groups("0::/\n", V2, {".": "100\n"})
    assert pool.free_host_memory() == 50


@pytest.mark.parametrize(
    ("listed", "names", "limits"),
    [
        ("0::/job/step\n", V2, {"job": "max", "job/step": "100"}),
        ("0::/job/step\n", V2, {"job": "100", "job/step": "max"}),
        ("0::/job/step\n", V2, {"job": "100", "job/step": "200", "job/other": "80"}),
        ("0::/of the host/container\n", V2, {".": "100"}),
        ("3:cpuset:/\n2:cpu,memory:/job/step\n0::/\n", V1, {"memory/job": str(2**63), "memory/job/step": "100"}),
        ("2:memory:/job/step\n0::/other\n", V1, {"memory": str(2**63), "memory/job": "100", "memory/job/step": "200"}),
        ("2:memory:/of the host/container\n", V1, {"memory": "100"}),
        ("no line of a group\n", V1, {"memory": "100"}),
    ],
)
def test_limits_of_the_group_that_the_process_is_in_and_of_those_around_it(groups, listed, names, limits):
    groups(listed, names, limits)
    assert pool.free_host_memory() == 50
