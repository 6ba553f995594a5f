"""Tables and figures of decode steps, paged attention and scaling."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.results import write_result
from benchmarks.report import decoding, hostile, llm, meanflow_step, overview, paged, scaling, serving, train_step
from benchmarks.report.history import Freshness
from benchmarks.report.reading import read_folder
from benchmarks.report.tables import number
from tests.benchmarks.report.made import RANDOM, made, marked, ms, row, write_rows

BATCHES, CONTEXTS, DEVICES = (1, 2, 8), (128, 4096), (1, 2, 4)


def _judge(source):
    return Freshness("current", "made")


@pytest.fixture
def read(tmp_path):
    """A result of a case with these conditions and rows, written and read again."""

    def result(case, given, **conditions):
        write_result(replace(made("something-new"), case=case, conditions=conditions, rows=given), tmp_path)
        return read_folder(tmp_path).results[0]

    return result


def _lines(drawn):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in drawn.figure.axes[0].lines]


def test_a_sweep_is_drawn_beside_the_bound_of_each_context(read):
    speeds = {(b, c): ms() for c in CONTEXTS for b in BATCHES}
    rows = [row(f"{key}", batch=key[0], context=key[1], tokens_per_second=speed) for key, speed in speeds.items()]
    result = read("llm", rows, model="qwen3-0.6b", section="sweep", kernels="token")
    (drawn,) = llm.figures([result])
    lines = _lines(drawn)
    assert len(lines) == 2 * len(CONTEXTS)
    assert lines[0] == (list(BATCHES), [speeds[b, CONTEXTS[0]] for b in BATCHES])
    bound = [m.extra["tokens_per_second"] * m.over_floor for m in result.rows[: len(BATCHES)]]
    assert lines[1][1] == pytest.approx(bound)
    (table,) = llm.tables([result], _judge)
    assert [r[:3] for r in table.rows[:2]] == [["1", "1", "128"], ["1", "2", "128"]]
    assert table.rows[0][-1] == number(speeds[1, 128])
    assert llm.finding([result]) is None
    assert "keys and values" not in drawn.caption


def test_a_sweep_with_a_pool_of_fp8_says_so(read):
    rows = [row("4, 128", batch=4, context=128, tokens_per_second=ms())]
    (drawn,) = llm.figures([read("llm", rows, section="sweep", kernels="paged", kv_cache_dtype="fp8")])
    assert "kernels paged, keys and values in fp8" in drawn.caption


def test_a_start_has_no_floor_to_stand_beside_and_the_overview_shows_the_first_token(read):
    rows = [row("start, process and all"), row("of which imports"), row("first token, prompt of 9")]
    result = read("llm", rows, model="qwen3-0.6b", section="latency", kernels="token")
    token = result.rows[2]
    header, cells = (made := overview.table([result], _judge)).header, made.rows[0]
    assert dict(zip(header, cells, strict=True))["headline row"] == token.name
    (drawn,) = overview.figure([result])
    drawn_at = {float(x) for xs, _ in _lines(drawn) for x in xs}
    assert {token.median, token.floor} <= drawn_at
    assert result.rows[0].median not in drawn_at


def test_the_fastest_workload_of_a_gpu_that_transformers_ran_too_is_told_first(read, tmp_path):
    rates = {"plain": 100.0, "token": 300.0, "alone": 900.0}
    for kernels, rate in rates.items():
        rows = [row("fullstride", tokens_per_second=rate), row("transformers, batched", tokens_per_second=20.0)]
        read("llm", rows[: 1 if kernels == "alone" else 2], section="small", kernels=kernels)
    found = llm.finding(read_folder(tmp_path).results)
    assert found is not None
    assert found.value == number(300.0)
    assert "15.0 x those of transformers, batched" in found.text
    assert "kernels token" in found.text


def test_devices_are_drawn_beside_proportion(read):
    rows = [
        row(f"{n} {c}", devices=n, batch=4, context=c, tokens_per_second=ms(), speed_up=RANDOM.uniform(1, n + 1))
        for c in CONTEXTS
        for n in DEVICES
    ]
    result = read("llm", rows, model="qwen3-0.6b", section="parallel", kernels="token")
    assert decoding.is_steps(result)
    (drawn,) = llm.figures([result])
    lines = _lines(drawn)
    assert lines[1] == (list(DEVICES), list(DEVICES))
    assert lines[2][1] == [m.extra["speed_up"] for m in result.rows[3:]]
    assert [r[0] for r in llm.tables([result], _judge)[0].rows] == ["1", "2", "4"] * 2


def test_the_kernels_that_others_are_compared_with_are_drawn_where_one_device_has_two(read):
    fast, same = RANDOM.uniform(1, 2), RANDOM.uniform(0.2, 1)
    own = [(1, "token", 1.0), (1, "paged", same), (2, "paged", fast)]
    rows = [
        row(f"{n} {k}", devices=n, batch=4, context=64, tokens_per_second=ms(), speed_up=x, kernels=k)
        for n, k, x in own
    ]
    result = read("llm", rows, model="qwen3-8b", section="parallel", kernels="token+paged")
    (drawn,) = llm.figures([result])
    assert _lines(drawn)[0] == ([1, 2], [1.0, fast])
    assert [r[3] for r in llm.tables([result], _judge)[0].rows] == ["token", "paged", "paged"]


def test_paged_attention_is_drawn_in_shares_of_the_copy_rate(read):
    shares = {(b, way): RANDOM.uniform(0.1, 1) for b in BATCHES for way in ("paged", "gather")}
    rows = [row(f"batch {b}: {way}", tokens=9, share_of_copy_rate=s) for (b, way), s in shares.items()]
    result = read("paged-attention", rows, model="32-8", section="contexts-500-2048", block=64)
    (drawn,) = paged.figures([result])
    first, second, copy = _lines(drawn)
    assert first[1] == pytest.approx([100 * shares[b, "paged"] for b in BATCHES])
    assert second[1] == pytest.approx([100 * shares[b, "gather"] for b in BATCHES])
    assert copy[1] == [100, 100]
    found = paged.finding([result])
    assert found is not None
    assert found.value == f"{100 * shares[8, 'paged']:.0f} %"
    assert paged.tables([result], _judge)[0].rows[1][:2] == ["1", "gather"]


def test_scaling_has_a_row_for_each_way_and_a_dot_for_each_number_of_processes(read):
    kinds = [("unet", "ddp", "nccl"), ("unet", "fsdp", "copies"), ("dit_b2", "ddp", "nccl")]
    every = {(kind, n): RANDOM.uniform(0.5, 1) for kind in kinds for n in (2, 4) if (kind, n) != (kinds[1], 4)}
    rows = [row("unet, 1 process", model="unet", ratio=1.0, processes=1, kind="ddp", efficiency=1.0)]
    for ((model, kind, by), n), e in every.items():
        extra = {"model": model, "kind": kind, "transfers": by, "processes": n, "efficiency": e}
        rows.append(row(f"{model} {n} {kind}", ratio=1.0, state_bytes=1 << 31, **extra))
    result = read("meanflow-scaling", [*rows, row("dit, memory", model="dit", ratio=None, processes=2, kind="fsdp")])
    (drawn,) = scaling.figures([result])
    axes = drawn.figure.axes[0]
    names = [text.get_text() for text in axes.texts if text.get_text()]
    assert names == [f"{model}, 100 % in the JVP: {kind}, {by}" for model, kind, by in kinds]
    for n, dots in zip((2, 4), axes.collections, strict=True):
        wanted = {kinds.index(kind): 100 * e for (kind, count), e in every.items() if count == n}
        assert {y: x for x, y in np.asarray(dots.get_offsets())} == pytest.approx(wanted)
    assert axes.get_xlim()[0] > 0
    cells = scaling.tables([result], _judge)[0].rows[1]
    assert cells[-2:] == [f"{100 * every[kinds[0], 2]:.1f} %", "2.00"]


def test_times_without_a_floor_of_their_own_have_none_in_the_overview(read, tmp_path):
    read("train-step", [row("TrainStep", over_flat={})], model="base", section="host")
    read("meanflow-scaling", [row("xl, memory", model="xl", processes=1)], model="xl", rows="memory")
    read("meanflow-scaling", [row("b2", model="b2", processes=1)], model="b2", rows="ratio-100")
    results = read_folder(tmp_path).results
    table = overview.table(results, _judge)
    floors = {row[1]: row[3:5] for row in table.rows}
    assert floors["TrainStep"] == floors["xl, memory"] == ["", ""]
    (b2,) = (m for result in results for m in result.rows if m.name == "b2")
    assert floors["b2"] == [number(b2.floor), marked(b2.over_floor)]
    (drawn,) = overview.figure(results)
    assert [text.get_text() for text in drawn.figure.axes[0].texts][::2] == ["meanflow-scaling: b2"]


def test_two_gpus_have_a_dot_each(tmp_path):
    names = ("FM MSE", *(f"MeanFlow {share}%" for share in (0, 25, 100)))
    times = {"NVIDIA H100": ms(), "NVIDIA H200": ms()}
    for gpu, time in times.items():
        rows = [row(f"{name}, graph", name=name, backend="graph") for name in names]
        rows = [replace(one, timing=replace(one.timing, samples_ms=(time,))) for one in rows]
        machine = {"cpu": "x", "cores": 2, "gpu": {"name": gpu}, "commit": None, "date": "2031-02-03"}
        write_result(replace(made("meanflow-step"), rows=rows, environment=machine), tmp_path)
    results = read_folder(tmp_path).results
    axes = meanflow_step.figures(results)[0].figure.axes[0]
    labels = [text.get_text() for text in axes.texts if "batch" in text.get_text()]
    assert {label.rpartition(" (")[2] for label in labels} == {"H100)", "H200)"}
    assert sorted(x for x, _ in np.asarray(axes.collections[1].get_offsets())) == pytest.approx(sorted(times.values()))
    (drawn,) = overview.figure(results)
    assert sorted(x for x, _ in np.asarray(drawn.figure.axes[0].collections[1].get_offsets())) == pytest.approx(
        sorted(times.values())
    )


def test_whole_steps_and_other_memory_orders_are_told_apart(tmp_path):
    names = ("FM MSE", *(f"MeanFlow {share}%" for share in (0, 25, 100)))
    times = {"": 30.0, "channels_last": 20.0, "full step, channels_last": 40.0}
    for told, time in times.items():
        rows = [row(f"{name}, graph", name=name, backend="graph", batch=64) for name in names]
        rows = [replace(one, timing=replace(one.timing, samples_ms=(time,))) for one in rows]
        whole = {"step": "full"} if "full" in told else {}
        order = {"memory_order": "channels_last"} if "channels" in told else {}
        write_rows(tmp_path, "meanflow-step", rows, model="unet", precision="bf16", batch_size=64, **whole, **order)
    results = read_folder(tmp_path).results
    table, _ = meanflow_step.tables(results, _judge)
    shown = {f"unet bf16, batch 64{', ' * bool(told)}{told}": number(time) for told, time in times.items()}
    assert {line[0]: line[2] for line in table.rows} == shown
    axes = meanflow_step.figures(results)[0].figure.axes[0]
    labels = [text.get_text() for text in axes.texts if "batch" in text.get_text()]
    assert len({label.removesuffix(" ...") for label in labels}) == len(times)
    assert len({overview.label(result) for result in results}) == 2
    assert "full step" in " ".join(overview.label(result) for result in results)


def test_what_clients_get_stands_beside_the_engine_alone(read):
    speeds = {count: (ms(), ms()) for count in (1, 4, 16)}
    rows = [
        row(
            f"{count} at once",
            batch=count,
            tokens_per_second=served,
            engine_tokens_per_second=alone,
            share_of_the_engine=served / alone,
            first_token_ms={"median": 12.5, "p90": 20.0, "p99": 31.0},
            first_token_floor_ms=4.25,
        )
        for count, (served, alone) in speeds.items()
    ]
    result = read("llm-serve", rows, model="smollm2", prompt=128, answer=64, kernels="plain")
    (drawn,) = serving.figures([result])
    assert _lines(drawn)[1] == ([1, 4, 16], [served for served, _ in speeds.values()])
    drawn.figure.canvas.draw()
    ticks = [text.get_text() for text in drawn.figure.axes[0].get_yticklabels(which="both") if text.get_text()]
    assert ticks
    assert all(float(text.replace(",", "")) > 0 for text in ticks)
    (table,) = serving.tables([result], _judge)
    assert table.rows[2][:4] == ["16", number(12.5), number(31.0), number(4.25)]
    finding = serving.finding([result])
    assert finding is not None
    assert finding.value == f"{100 * speeds[16][0] / speeds[16][1]:.0f} %"
    assert "16 clients" in finding.text


def test_the_attack_under_which_health_takes_longest_stands_for_a_hostile_run(read):
    waits = {"idle": 2.5, "numbers": 31.25, "brackets": 12.0}
    rows = [
        row(
            name,
            request_ms={"count": 9.0, "median": 20.0, "p99": 40.0, "max": 60.5},
            health_ms={"count": 9.0, "median": 1.0, "p99": p99, "max": 99.0},
            **({} if name == "idle" else {"attack_answers": {"400": 17}, "attacks_per_second": 3.75}),
        )
        for name, p99 in waits.items()
    ]
    result = read("llm-hostile", rows, model="smollm2", kernels="plain")
    assert hostile.headline(result).name == "numbers"
    (table,) = hostile.tables([result], _judge)
    assert table.rows[0] == ["idle", *map(number, (20.0, 40.0, 60.5, 1.0, 2.5, 99.0)), "", ""]
    assert table.rows[1][-3:] == [number(99.0), "3.75", "17 x 400"]
    finding = hostile.finding([result])
    assert finding is not None
    assert finding.value == f"{number(31.25)} ms"
    assert f"(numbers), {number(2.5)} idle" in finding.text


def test_a_step_is_called_by_a_gpus_host_where_there_is_one(tmp_path):
    def written(device):
        rows = [row(name, over_flat=ms(), arrays=9) for name in ("TrainStep grouped", "filter_jit")]
        return write_rows(tmp_path, "train-step", rows, device=device, section="host").results

    written("cpu")
    results = written("cuda")
    steps = {result.data["device"]: result.rows[0].median for result in results}
    assert steps.keys() == {"cpu", "cuda"}
    for order in (results, results[::-1]):
        finding = train_step.finding(order)
        assert finding is not None
        assert finding.value == f"{number(steps['cuda'], 3)} ms"
