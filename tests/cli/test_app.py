import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

from benchmarks.cases.jvp.options import IMPLEMENTATIONS, AttentionOptions, NormsOptions
from benchmarks.cases.meanflow.options import SECTIONS, LoaderOptions, SamplingOptions, ScalingOptions, StepOptions
from benchmarks.cli.app import app as benchmarks
from fullstride import __version__
from fullstride.bert.training.settings import TrainSettings
from fullstride.cli.app import app
from fullstride.errors import ConfigError, OutOfMemory, Preempted
from fullstride.launch.request import LAUNCHERS
from fullstride.meanflow.config.commands import (
    ConsistencyOptions,
    EncodeOptions,
    ExportOptions,
    SampleOptions,
    ScoreOptions,
)
from fullstride.meanflow.demo import EPOCHS
from fullstride.measure.gate import GateError
from fullstride.runs.folder import write_config

COMMANDS = [
    ["doctor"],
    ["meanflow", "train"],
    ["meanflow", "sample"],
    ["benchmarks", "train-step"],
    ["meanflow", "evaluate"],
    ["meanflow", "consistency"],
    ["meanflow", "demo"],
    ["meanflow", "encode"],
    ["meanflow", "export"],
    ["llm", "pull"],
    ["llm", "inspect"],
    ["llm", "serve"],
    ["llm", "generate"],
    ["benchmarks", "meanflow-step"],
    ["benchmarks", "jvp-attention"],
    ["benchmarks", "jvp-norms"],
    ["benchmarks", "llm"],
    *(["launch", backend] for backend in LAUNCHERS),
    ["launch", "sync"],
    ["launch", "ckpts"],
    ["cache", "list"],
    ["cache", "clear"],
    *(["runs", command] for command in ("list", "show", "compare", "clean")),
]


def _run(*args: str):
    if args[:1] == ("benchmarks",):
        return CliRunner().invoke(benchmarks, list(args[1:]))
    return CliRunner().invoke(app, list(args))


def _one_line(result) -> str:
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def fake(monkeypatch):
    """Replace a function by a mock with its signature."""

    def replace(module: str, name: str):
        real = import_module(module)
        mock = create_autospec(getattr(real, name))
        monkeypatch.setattr(real, name, mock)
        return mock

    return replace


def _main(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from fullstride.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)


def test_a_mistake_exits_with_2_and_one_line_in_a_real_process():
    done = _main("meanflow", "train", "loss.meanflow_ration=0.5")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: loss.meanflow_ration=0.5: no such key; did you mean loss.meanflow_ratio?\n"


def test_what_a_terminal_cannot_show_ends_nothing():
    code = "from fullstride.cli import app as cli; cli.app = lambda: print('0.5 \\u00b1 0.1'); cli.main()"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | locale, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.5 ? 0.1\n"), done.stderr


@pytest.mark.parametrize(("old", "new"), [("bench", ""), ("experiment", ""), ("report", "report")])
def test_an_old_command_says_its_new_name_and_runs_it(old, new, tmp_path):
    line = [sys.executable, "-c", "from fullstride.cli import main; main()", old, "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == f"fullstride {old} is now: python -m benchmarks {new}".strip()
    assert done.stdout.startswith(f"Usage: python -m benchmarks {new}".strip())


def test_an_old_command_without_a_clone_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("fullstride.__file__", str(tmp_path / "fullstride" / "__init__.py"))
    result = _run("bench", "llm")
    assert result.exit_code == 2
    assert _one_line(result) == ("error: fullstride bench is now python -m benchmarks; run it from the root of a clone")


def test_the_version():
    done = _main("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fullstride {__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["meanflow"], ["benchmarks"], *COMMANDS])
def test_help(command):
    result = _run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_has_a_help_text(command):
    node = benchmarks if command[0] == "benchmarks" else app
    for name in command[:-1] if node is app else []:
        node = next(g.typer_instance for g in node.registered_groups if g.name == name)
        assert node is not None
    callback = next(
        c.callback
        for c in node.registered_commands
        if c.callback and (c.name or c.callback.__name__.replace("_", "-")) == command[-1]
    )
    assert callback.__doc__
    for parameter in inspect.signature(callback).parameters.values():
        assert parameter.annotation.__metadata__[0].help, parameter


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs=ten", "error: epochs=ten: expected an integer, got 'ten'"),
        ("model=unett", "error: model=unett: expected one of "),
        ("loss.meanflow_ratio=2", "error: loss.meanflow_ratio=2.0: expected a share in [0, 1]"),
        ("epochs", "error: epochs: expected key=value, such as epochs=20"),
        ("epochs=1\n2", "error: epochs=1 2: expected an integer, got '1\\n2'"),
    ],
)
def test_a_wrong_override_is_one_line_and_exit_code_2(fake, override, message):
    train = fake("fullstride.meanflow.training.trainer", "train")
    result = _run("meanflow", "train", override)
    assert result.exit_code == 2
    assert _one_line(result).startswith(message)
    assert not train.called


def test_train_hands_over_the_composed_configuration(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/metrics.jsonl").write_text('{"step": 1, "squared_error": 0.5}\n')
    train = fake("fullstride.meanflow.training.trainer", "train")
    train.return_value = Path("runs/x")
    result = _run("meanflow", "train", "model=unet_tiny", "loss.logit_normal_mean=-2.0", "run_name=x")
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert said[1:3] == ["trained: runs/x", "  runs/x/checkpoints    the weights"]
    assert "  fullstride meanflow sample runs/x    # generate images" in said
    (config,) = train.call_args.args
    assert (config.model.channels, config.loss.logit_normal_mean, config.run_name) == (24, -2.0, "x")
    assert "device=auto: " in result.stdout
    assert "runs/x" in result.stdout


def test_a_named_device_needs_no_announcement(fake):
    fake("fullstride.meanflow.training.trainer", "train").return_value = Path("runs/x")
    assert "auto" not in _run("meanflow", "train", "device=cpu").stdout


def test_sample_hands_over_its_options(fake, tmp_path):
    sample = fake("fullstride.meanflow.sampling.generate", "sample_command")
    numbers = ["--steps", "7", "--num", "9", "--seed", "3", "--label", "5", "--batch-size", "4"]
    result = _run(
        "meanflow", "sample", "runs/x", "--sampler", "rk4", *numbers, "--device", "cpu", "--out", str(tmp_path),
        "--ema", "0.99", "--vae", "vae", "--precision", "bf16", "--backend", "auto",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    options = SampleOptions(
        sampler="rk4", steps=7, num=9, seed=3, label=5, out=tmp_path, batch_size=4, device="cpu", precision="bf16",
        backend="auto", ema=0.99, vae=Path("vae"),
    )  # fmt: skip
    sample.assert_called_once_with(Path("runs/x"), options)


def test_export_hands_over_its_options(fake):
    export = fake("fullstride.meanflow.sampling.export", "export_command")
    given = ["--out", "x.pt2", "--steps", "2", "--ema", "0.99", "--device", "cpu"]
    assert _run("meanflow", "export", "runs/x", *given).exit_code == 0
    options = ExportOptions(out=Path("x.pt2"), steps=2, ema=0.99, device="cpu")
    export.assert_called_once_with(Path("runs/x"), options)


def test_encode_hands_over_its_options(fake, tmp_path):
    encode = fake("fullstride.meanflow.sampling.encode", "encode_command")
    given = ["--vae", "vae", "--out", str(tmp_path), "--image-size", "64", "--flip", "--half", "--batch-size", "3"]
    given += ["--workers", "5", "--holdout", "0.2", "--shard-size", "7", "--device", "cpu"]
    result = _run("meanflow", "encode", "pictures", *given)
    assert result.exit_code == 0, result.output
    options = EncodeOptions(
        vae=Path("vae"), out=tmp_path, image_size=64, flip=True, half=True, batch_size=3, workers=5, holdout=0.2,
        shard_size=7, device="cpu",
    )  # fmt: skip
    encode.assert_called_once_with(Path("pictures"), options)


@pytest.mark.parametrize(("sampler", "steps"), [("meanflow", 1), ("dopri5", None), ("euler", None)])
def test_only_the_meanflow_sampler_has_a_default_number_of_steps(fake, sampler, steps):
    sample = fake("fullstride.meanflow.sampling.generate", "sample_command")
    assert _run("meanflow", "sample", "runs/x", "--sampler", sampler).exit_code == 0
    _, options = sample.call_args.args
    assert (options.steps, options.label) == (steps, None)


@pytest.mark.parametrize("command", ["evaluate", "consistency"])
def test_evaluation_hands_over_its_options(fake, command):
    mock = fake("fullstride.meanflow.evaluation.checkpoint", "evaluate_command")
    named = ["--features", "classifier", "--features", "efficientnet_lite0", "--data-path", "there", "--ema", "0.9"]
    named += ["--inception-weights", "w.pth", "--precision", "bf16", "--batch-size", "7"]
    named += ["--backend", "graph"]
    result = _run("meanflow", command, "runs/x", "--num-samples", "30", "--device", "cpu", *named)
    assert result.exit_code == 0, result.output
    options = (ConsistencyOptions if command == "consistency" else ScoreOptions)(
        num_samples=30, device="cpu", ema=0.9, data_path="there", inception_weights=Path("w.pth"), backend="graph",
        precision="bf16", batch_size=7, features=("classifier", "efficientnet_lite0"),
    )  # fmt: skip
    mock.assert_called_once_with(Path("runs/x"), options)


def test_multirun_hands_over_every_run(fake):
    run_all = fake("fullstride.cli.meanflow_sweep", "run_all")
    assert _run("meanflow", "train", "--multirun", "seed=0,1", "model=unet_tiny").exit_code == 0
    (runs,) = run_all.call_args.args
    assert [run[0] for run in runs] == ["seed=0", "seed=1"]
    assert _run("meanflow", "train", "--multirun", "seed=0").exit_code == 2


def test_the_demos_help_has_its_number_of_epochs():
    assert f"Number of passes over the data; by default {EPOCHS}, three minutes" in " ".join(
        _run("meanflow", "demo", "--help").stdout.split()
    )


def test_demo_hands_over_its_options(fake):
    mock = fake("fullstride.meanflow.demo", "run_demo")
    assert _run("meanflow", "demo").exit_code == 0
    mock.assert_called_once_with(Path("runs/demo"), epochs=None, seed=0)
    assert _run("meanflow", "demo", "--epochs", "2", "--out", "elsewhere", "--seed", "4").exit_code == 0
    mock.assert_called_with(Path("elsewhere"), epochs=2, seed=4)


@pytest.fixture
def bench_calls(monkeypatch) -> list[tuple]:
    calls: list[tuple] = []
    module = ModuleType("benchmarks.cases.meanflow.step")
    module.__dict__["run"] = lambda *given: calls.append(given)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_bench_hands_over_its_options(bench_calls, tmp_path):
    names = ["--device", "cpu", "--precision", "bf16", "--model", "unet_tiny", "--batch-size", "3"]
    names += ["--backend", "compile", "--backend", "eager", "--section", "profile", "--section", "scaling"]
    names += [
        "--full-step",
        "--averages",
        "2",
        "--channels-last",
        "--dropout",
        "--only",
        "100%",
        "--seconds",
        "9",
        "--jobs",
        "3",
    ]
    result = _run("benchmarks", "meanflow-step", *names, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    given: dict = {"device": "cpu", "precision": "bf16", "model": "unet_tiny", "batch_size": 3}
    given |= {"backends": ("compile", "eager"), "sections": ("profile", "scaling"), "full_step": True, "averages": 2}
    options = StepOptions(**given, channels_last=True, dropout=True, only=("100%",), jobs=3, seconds=9.0)
    assert bench_calls == [(options, tmp_path)]
    assert _run("benchmarks", "meanflow-step", "--section", "all", "--out", str(tmp_path)).exit_code == 0
    assert bench_calls[1] == (StepOptions(sections=SECTIONS), tmp_path)
    assert _run("benchmarks", "meanflow-step").exit_code == 0
    assert bench_calls[2] == (StepOptions(), Path("benchmarks/results"))


def test_the_bench_of_several_gpus_hands_over_its_options(fake, tmp_path):
    mock = fake("benchmarks.cases.meanflow.scaling", "run")
    names = ["--device", "cpu", "--model", "unet", "--ratio", "0.5", "--kind", "fsdp", "--batch-size", "3"]
    names += ["--largest", "", "--only", "ratio 50%", "--only", "memory", "--seconds", "9", "--averages", "1"]
    result = _run("benchmarks", "meanflow-scaling", *names, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    given: dict = {"device": "cpu", "models": ("unet",), "ratios": (0.5,), "kinds": ("fsdp",), "batch_size": 3}
    options = ScalingOptions(**given, largest="", only=("ratio 50%", "memory"), seconds=9.0, averages=1)
    mock.assert_called_once_with(options, tmp_path)
    assert _run("benchmarks", "meanflow-scaling").exit_code == 0
    mock.assert_called_with(ScalingOptions(), Path("benchmarks/results"))


def test_the_sampling_bench_hands_over_its_options(fake, tmp_path):
    mock = fake("benchmarks.cases.meanflow.sampling", "run")
    names = ["--device", "cpu", "--precision", "bf16", "--model", "unet_tiny", "--batch-size", "3", "--batch-size", "1"]
    names += ["--backend", "graph", "--channels-last", "--seconds", "9", "--out", str(tmp_path)]
    result = _run("benchmarks", "meanflow-sampling", *names)
    assert result.exit_code == 0, result.output
    chosen = SamplingOptions("cpu", "bf16", "unet_tiny", (3, 1), ("graph",), channels_last=True, seconds=9.0)
    mock.assert_called_once_with(chosen, tmp_path)
    assert _run("benchmarks", "meanflow-sampling").exit_code == 0
    mock.assert_called_with(SamplingOptions(), Path("benchmarks/results"))


def test_the_loaders_bench_hands_over_its_options(fake, tmp_path):
    mock = fake("benchmarks.cases.meanflow.loader", "run")
    options = ["--device", "cpu", "--batch-size", "7", "--workers", "1", "--out", str(tmp_path)]
    result = _run("benchmarks", "meanflow-loader", *options)
    assert result.exit_code == 0, result.output
    mock.assert_called_once_with(LoaderOptions("cpu", 7, 1), tmp_path)
    assert _run("benchmarks", "meanflow-loader").exit_code == 0
    mock.assert_called_with(LoaderOptions(), Path("benchmarks/results"))


@pytest.mark.parametrize(("name", "options"), [("attention", AttentionOptions), ("norms", NormsOptions)])
def test_the_derivatives_benches_hand_over_their_options(monkeypatch, tmp_path, name, options):
    module = import_module(f"benchmarks.cases.jvp.{name}")
    bench = create_autospec(module.BENCH)
    monkeypatch.setattr(module, "BENCH", bench)
    command = ["benchmarks", f"jvp-{name}", "--device", "cpu", "--out", str(tmp_path)]
    assert _run(*command).exit_code == 0
    bench.run.assert_called_with(options("cpu"), tmp_path)
    chosen = ["--precision", "fp32", "--implementation", "plain", "--shapes", "odd", "--seconds", "9", "--jobs", "2"]
    assert _run(*command, *chosen).exit_code == 0
    bench.run.assert_called_with(options("cpu", "fp32", "plain", "odd", 9.0, 2), tmp_path)
    wrong = _run(*command, "--implementation", "tritn")
    assert wrong.exit_code == 2
    assert _one_line(wrong).startswith("error: --implementation=tritn: expected one of triton, ")
    assert IMPLEMENTATIONS == import_module("fullstride.jvp.implementation").NAMES


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--precision", "bf61", "error: --precision=bf61: expected one of bf16, fp32, tf32; did you mean bf16?"),
        ("--backend", "compiled", "error: --backend=compiled: expected one of compile, compile+graph, "),
        ("--section", "profil", "error: --section=profil: expected one of profile, "),
        ("--averages", "6", "error: --averages=6: expected at most 5"),
        ("--model", "unet_tin", "error: --model=unet_tin: expected one of unet_tiny, "),
    ],
)
def test_a_wrong_bench_option_is_one_line_and_exit_code_2(bench_calls, option, value, message):
    result = _run("benchmarks", "meanflow-step", option, value)
    assert result.exit_code == 2
    assert _one_line(result).startswith(message)
    assert bench_calls == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a=1: expected 2"), 2, "error: a=1: expected 2"),
        (FloatingPointError("the loss is nan"), 1, "error: the loss is nan"),
        (GateError("u: error 1, expected at most 0.1"), 1, "error: u: error 1, expected at most 0.1"),
        (KeyboardInterrupt("stopped; saved x"), 130, "stopped; saved x"),
        (Preempted("stopped; saved x"), 0, "stopped; saved x"),
        (OutOfMemory("out of memory at 3"), 12, "error: out of memory at 3"),
        (OSError("cannot save step 3"), 1, "error: cannot save step 3"),
        (
            RuntimeError("can't allocate memory"),
            12,
            "error: out of memory; use smaller batches: can't allocate memory",
        ),
        (MemoryError(), 12, "error: out of memory; use smaller batches: MemoryError"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes."),  # as JAX's own, which is one
            12,
            "error: out of memory; use smaller batches: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'scipy'", name="scipy"),
            2,
            "error: scipy is not installed; run, from the root of a clone: pip install '.[torch]'",
        ),
    ],
)
def test_what_a_user_can_act_on_is_one_line(fake, error, code, line):
    fake("fullstride.meanflow.demo", "run_demo").side_effect = error
    result = _run("meanflow", "demo")
    assert result.exit_code == code
    assert _one_line(result) == line


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), ModuleNotFoundError("No module named 'fullstride.x'", name="fullstride.x")]
)
def test_a_bug_keeps_its_traceback(fake, error):
    fake("fullstride.meanflow.demo", "run_demo").side_effect = error
    assert _run("meanflow", "demo").exception is error


@pytest.mark.parametrize(
    "args",
    [
        ["meanflow", "train", "--epochs", "3"],
        ["meanflow", "sample"],
        ["meanflow", "sample", "runs/x", "--num", "many"],
        ["meanflow", "demo", "--epochs", "0"],
        ["meanflow", "nothing"],
        ["nothing"],
    ],
)
def test_a_usage_error_exits_with_2_and_no_traceback(args):
    result = _run(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["meanflow", "train", "--epoch", "3"], "No such option: --epoch; settings go without dashes: epoch=VALUE"),
        (["bert", "train", "--batch-size=3"], "settings go without dashes: batch_size=VALUE"),
        (["benchmarks", "phase2", "--data.path", "x"], "settings go without dashes: data.path=VALUE"),
        (["benchmarks", "nothing"], "No such command 'nothing'. Expected one of: meanflow-step, "),
        (["meanflow", "trian"], "Did you mean 'train'? Expected one of: demo, presets, keys, plan, train, "),
        (["nothing"], "Expected one of: meanflow, bert, llm, "),
    ],
)
def test_a_usage_error_says_what_there_is(args, told):
    result = _run(*args)
    assert result.exit_code == 2
    assert told in result.stderr


def test_an_unknown_option_of_a_command_without_settings_is_as_it_was():
    assert "dashes" not in _run("meanflow", "sample", "runs/x", "--nums", "3").stderr


@pytest.mark.parametrize("option", ["--num", "--batch-size", "--steps"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_sample_names_the_option_of_a_number_that_cannot_be(fake, option, value):
    sample = fake("fullstride.meanflow.sampling.generate", "sample_command")
    result = _run("meanflow", "sample", "runs/x", option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': Input should be greater than or equal to 1" in result.stderr
    sample.assert_not_called()


def test_a_path_without_a_checkpoint_is_one_line(tmp_path):
    result = _run("meanflow", "sample", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2
    assert _one_line(result).startswith(f"error: {tmp_path}: no checkpoint here")


@pytest.mark.parametrize(
    "args", [["sample"], ["evaluate"], ["consistency"], ["export", "--out", "made.pt2"]], ids=lambda args: args[0]
)
def test_a_run_of_bert_is_named_as_one(tmp_path, args):
    write_config(tmp_path, TrainSettings())
    result = _run("meanflow", args[0], str(tmp_path), *args[1:], "--device", "cpu")
    assert result.exit_code == 2
    assert _one_line(result).startswith(f"error: {tmp_path} is a BERT run, not a MeanFlow run; expected")


def test_an_absent_device_stops_before_anything_runs(fake, monkeypatch):
    import torch

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    evaluate = fake("fullstride.meanflow.evaluation.checkpoint", "evaluate_command")
    result = _run("meanflow", "evaluate", "runs/x", "--device", "mps")
    assert result.exit_code == 2
    assert _one_line(result).startswith("error: device=mps: ")
    assert not evaluate.called


def test_doctor_prints_its_report():
    result = _run("doctor")
    assert result.exit_code == 0
    assert f"fullstride {__version__}" in result.stdout
    assert "device=auto" in result.stdout


def test_no_options_metavar_is_its_name():
    """Some versions of typer (0.27) take such a metavar for the name, and the option is gone."""
    from typer.main import get_command

    def options(command):
        if hasattr(command, "commands"):
            return [found for each in command.commands.values() for found in options(each)]
        return [p for p in command.params if p.param_type_name == "option"]

    every = options(get_command(app))
    assert len(every) > 50
    assert not [p.name for p in every if p.metavar is not None and p.metavar.lower() == p.name]
