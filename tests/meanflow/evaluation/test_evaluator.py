import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_group
from fullstride.meanflow.config.commands import ConsistencyOptions, SampleOptions, ScoreOptions
from fullstride.meanflow.config.schema import DataConfig, EvalConfig
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.dataset import Dataset, Split, to_uint8
from fullstride.meanflow.data.shards import write_latents
from fullstride.meanflow.evaluation import checkpoint as evaluate_checkpoint
from fullstride.meanflow.evaluation import evaluator as evaluate
from fullstride.meanflow.evaluation.checkpoint import CONSISTENCY, evaluate_command
from fullstride.meanflow.evaluation.evaluator import Evaluator
from fullstride.meanflow.evaluation.scores import SamplerScore, Score, one_step_ratio, score_tables
from fullstride.meanflow.metrics.classifier import FeatureClassifier
from fullstride.meanflow.metrics.energy import energy_distance
from fullstride.meanflow.metrics.reference import choose_reference
from fullstride.meanflow.sampling import generate as sampling
from fullstride.meanflow.sampling.generate import load_generator, sample_command
from fullstride.meanflow.sampling.samplers import SampleResult, sample
from fullstride.meanflow.training.trainer import train
from fullstride.step.torch import Processes
from tests.meanflow.fields import GaussianField
from tests.meanflow.sampling.fake_diffusers import Folding, autoencoder, pictures
from tests.meanflow.training.test_trainer import BATCH, config

__all__ = ["autoencoder"]  # a fixture


@pytest.fixture(scope="module")
def data():
    return load_data(DataConfig())


@pytest.fixture(scope="module")
def test_half(data):
    return data.images(data.test, torch.arange(len(data.test))), data.test.labels


@pytest.fixture(scope="module")
def evaluator(data):
    return Evaluator(data, EvalConfig(), torch.device("cpu"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(config(tmp_path_factory.mktemp("runs"), epochs=1))


def test_the_floor_is_the_training_half_against_the_held_out_half(data, evaluator, test_half):
    training = data.images(data.train, torch.arange(len(data.train)))
    floor = evaluator.floor
    assert floor.energy_distance == pytest.approx(energy_distance(training, test_half[0], unbiased=False))
    assert floor.energy_distance_unbiased < floor.energy_distance
    assert floor.label_accuracy > 0.99
    assert floor.features["classifier"].frechet > 0
    assert (floor.num_samples, floor.num_reference) == (898, 899)
    assert floor.features["classifier"].precision > 0.5


def test_the_floor_takes_as_many_images_as_are_generated(data):
    evaluator = Evaluator(data, EvalConfig(num_samples=50), torch.device("cpu"))
    assert (evaluator.floor.num_samples, evaluator.floor.num_reference) == (50, 50)
    own = evaluator.floor.features["classifier"]
    assert (own.num_samples, own.num_reference) == (50, 50)


def test_scores_tell_good_images_from_bad_ones(evaluator, test_half):
    images, labels = test_half
    g = torch.Generator().manual_seed(0)
    real = evaluator.score(images, labels)
    assert real.energy_distance == pytest.approx(0, abs=1e-9)
    assert real.features["classifier"].frechet == pytest.approx(0, abs=1e-4)
    assert real.features["classifier"].precision == real.features["classifier"].recall == 1
    noisy = (images + 0.5 * torch.randn(images.shape, generator=g)).clamp(-1, 1)
    noise = torch.randn(images.shape, generator=g)
    scores = [evaluator.floor, evaluator.score(noisy, None), evaluator.score(noise, labels)]
    for values in ([s.energy_distance for s in scores], [s.features["classifier"].frechet for s in scores]):
        assert values == sorted(values)
    assert scores[1].label_accuracy is None
    assert scores[2].label_accuracy < 0.3


def test_all_zero_images_are_far_from_the_floor(evaluator, test_half):
    score = evaluator.score(torch.zeros_like(test_half[0]), test_half[1])
    assert score.energy_distance > 50 * evaluator.floor.energy_distance
    assert score.features["classifier"].recall < 0.1


def test_latents_have_an_energy_distance_and_no_features(tmp_path, seed):
    g = torch.Generator().manual_seed(seed)
    moments = torch.randn(40, 8, 4, 4, generator=g)
    write_latents(tmp_path, moments, torch.arange(40) % 3)
    data = load_data(DataConfig("latents", path=str(tmp_path), holdout=0.25))
    evaluator = Evaluator(data, EvalConfig(num_samples=9), torch.device("cpu"))
    score = evaluator.score(torch.randn(9, 4, 4, 4, generator=g), torch.zeros(9, dtype=torch.long))
    assert score.energy_distance > 0
    assert score.features == {}
    assert score.label_accuracy is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_network_that_diverged_is_one_line(evaluator, test_half, run, tmp_path, monkeypatch, value):
    images, labels = test_half
    images = images.clone()
    images[3, 0, 1, 2] = value
    with pytest.raises(FloatingPointError, match=f"1 of {len(images)} samples are not finite: the network diverged"):
        evaluator.score(images, labels)
    monkeypatch.setattr(sampling, "sample", lambda *_, **__: SampleResult(images, 1.0))
    with pytest.raises(FloatingPointError, match="samples are not finite"):
        sampled(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_features_that_the_data_cannot_have_are_refused(data):
    unlabelled = dataclasses.replace(data, num_classes=0)
    assert Evaluator(unlabelled, EvalConfig(num_samples=9), torch.device("cpu")).floor.features == {}
    with pytest.raises(ConfigError, match=r"features=\[classifier\]: needs labelled pictures"):
        Evaluator(unlabelled, EvalConfig(num_samples=9, features=["classifier"]), torch.device("cpu"))


def test_one_step_of_an_exact_field_scores_as_its_solver_does(evaluator):
    """A field whose average velocity is known: the one-step images are the ODE's, so the scores agree."""
    field = GaussianField()
    one = evaluator.sampler_score(field, "meanflow", 1, 0)
    many = evaluator.sampler_score(field, "rk4", 100, 0)
    assert (one.nfe, many.nfe) == (1, 400)
    assert one.score.energy_distance == pytest.approx(many.score.energy_distance, rel=1e-3)
    assert one_step_ratio([one, many]) == pytest.approx(1, abs=1e-3)


def test_fewer_images_than_processes_score_as_those_of_one(data, monkeypatch):
    """Processes that have none to make take part all the same."""
    field, few = GaussianField(), EvalConfig(num_samples=4)
    leader = Evaluator(data, few, torch.device("cpu"))
    alone = leader.sampler_score(field, "meanflow", 2, 10)
    parts = []
    for rank in range(6):
        processes = Processes()
        processes.rank, processes.size = rank, 6
        monkeypatch.setattr(processes, "collect", lambda part: parts.append(part) or [])
        monkeypatch.setattr(processes, "led", lambda act: None)
        Evaluator(data, few, torch.device("cpu"), processes).sampler_score(field, "meanflow", 2, 10)
    together = leader._of_parts(parts, "meanflow", 2, leader._labels(), lambda images: None)
    assert alone
    assert together
    assert [len(part.images) for part in parts] == [0, 1, 1, 0, 1, 1]
    assert (together.nfe, together.score.num_samples) == (alone.nfe, alone.score.num_samples) == (2, 4)
    assert together.score.energy_distance == pytest.approx(alone.score.energy_distance, rel=1e-6)
    own, expected = (row.score.features["classifier"] for row in (together, alone))
    assert own.frechet == pytest.approx(expected.frechet, rel=1e-5)


class Perfect(torch.nn.Module):
    """One step from noise is a sample of its class: a centre, and noise of a twentieth around it."""

    def __init__(self, centres):
        super().__init__()
        self.centres, self.labels = centres, []

    def images(self, z, label):
        return (self.centres[label] + 0.05 * z).clamp(-1, 1)

    def forward(self, z, r, t, label):
        self.labels.extend(label.tolist())
        return z - self.images(z, label)


def world(counts, held_out, seed):
    """Records in memory, equally many of each class and sorted by class, and the generator that they are from."""
    g = torch.Generator().manual_seed(seed)
    perfect = Perfect(1.6 * torch.rand(len(counts), 1, 8, 8, generator=g) - 0.8)

    def split(counts):
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Split(perfect.images(torch.randn(len(labels), 1, 8, 8, generator=g), labels), labels)

    return Dataset("world", split(counts), split(held_out), len(counts), (1, 8, 8), f"{counts}{seed}"), perfect


def test_a_perfect_generator_scores_about_the_floor_where_classes_are_uneven(seed):
    data, perfect = world([540, 60], [180, 20], seed)
    evaluator = Evaluator(data, EvalConfig(), torch.device("cpu"))
    made = evaluator.sampler_score(perfect, "meanflow", 1, 2)
    assert made
    score = made.score
    assert (perfect.labels.count(0), perfect.labels.count(1)) == (180, 20)
    # Of balanced classes it would be hundreds of times as much.
    assert score.energy_distance < 3 * evaluator.floor.energy_distance
    assert score.features["classifier"].frechet < 3 * evaluator.floor.features["classifier"].frechet
    assert score.label_accuracy == 1


def test_labels_are_those_of_the_held_out_images_for_any_number_of_samples(seed):
    data, perfect = world([9] * 20, [6] * 20, seed)
    held_out = choose_reference(120, 10) // 6
    for _ in range(2):  # the same ones each time
        perfect.labels.clear()
        Evaluator(data, EvalConfig(num_samples=10), torch.device("cpu")).sampler_score(perfect, "meanflow", 1, 20)
        assert perfect.labels == held_out.tolist()
    perfect.labels.clear()
    Evaluator(data, EvalConfig(num_samples=300), torch.device("cpu")).sampler_score(perfect, "meanflow", 1, 20)
    counts = torch.tensor(perfect.labels).bincount(minlength=20)
    assert counts.sum() == 300
    # Each record twice, and half of all of them once more, which are of any class.
    assert counts.min() >= 12
    assert counts.max() <= 18
    assert (counts > 12).sum() > 14


def test_the_ratio_is_to_the_best_solver():
    def row(sampler, steps, energy):
        return SamplerScore(sampler, steps, 1.0, 0.0, Score(9, 9, energy, 0.0, None, {}))

    rows = [row("meanflow", 1, 3.0), row("meanflow", 2, 0.1), row("euler", 10, 2.0), row("rk4", 10, 1.5)]
    assert one_step_ratio(rows) == 2.0
    assert one_step_ratio([*rows, row("dopri5", None, 0.0)]) == math.inf


@pytest.mark.parametrize("name", ["deterministic", pytest.param("multiclass", marks=pytest.mark.thorough)])
def test_pictures_learnt_by_heart_have_a_floor_of_nothing_and_are_scored(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_checkpoint, "CONSISTENCY", [("meanflow", 1), ("euler", 3)])
    # Untrained: other tests train one.
    classifier = lambda data, device: FeatureClassifier(1, data.num_classes).eval().requires_grad_(False)  # noqa: E731
    monkeypatch.setattr(evaluate, "reference_classifier", classifier)
    run = train(config(tmp_path, data=DataConfig(name, batch_size=BATCH), epochs=1))
    for command, options in (("evaluation", ScoreOptions), ("consistency", ConsistencyOptions)):
        evaluate_command(run, options(num_samples=40, device="cpu"))
        found = json.loads((run / f"{command}.json").read_text())
        assert found["floor"]["energy_distance"] < 1e-9
        assert all(s["score"]["energy_distance"] > 0.01 for s in found["samplers"].values())
    out = capsys.readouterr().out
    assert "floor: 40 training images" in out
    assert f"{found['samplers']['meanflow 1']['score']['energy_distance']:.4f}" in out


@pytest.mark.parametrize("name", ["a[/b]", "a[red]b"])
def test_a_folders_name_is_no_markup(name, run, tmp_path, capsys):
    score = Score(9, 9, 1.0, 0.0, None, {})
    (table,) = score_tables([SamplerScore("meanflow", 1, 1.0, 0.0, score)], score, f"runs/{name}")
    Console().print(table)
    assert capsys.readouterr().out.startswith(f"runs/{name}: 9 samples")
    assert sampled(run, tmp_path / name, num=2).is_file()
    assert name in capsys.readouterr().out.replace("\n", "")


def test_a_checkpoint_that_the_run_removes_meanwhile_costs_no_score(run, tmp_path, monkeypatch):
    copied = shutil.copytree(run, tmp_path / "copied")
    (copied / "evaluation.json").unlink(missing_ok=True)
    right = evaluate_checkpoint.evaluate_checkpoint

    def outlived(path, *args, **given):
        found = right(path, *args, **given)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(evaluate_checkpoint, "evaluate_checkpoint", outlived)
    name = find_checkpoint(copied).name
    evaluate_command(copied, ScoreOptions(num_samples=20, device="cpu"))
    assert json.loads((copied / "evaluation.json").read_text())["checkpoint"] == name


def test_the_commands_print_their_tables(run, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_checkpoint, "CONSISTENCY", [("meanflow", 1), ("euler", 3), ("rk4", 2)])
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu"))
    out = capsys.readouterr().out
    assert all(
        name in out for name in ("meanflow 1", "meanflow 2", "meanflow 4", "20 training images", "FD-classifier")
    )
    evaluate_command(run, ConsistencyOptions(num_samples=20, device="cpu"))
    out, told = capsys.readouterr()
    assert [line.rpartition(", ")[0] for line in told.splitlines()[-3:]] == [
        "1 of 3, meanflow 1: 20 samples of 1 evaluation each",
        "2 of 3, euler 3: 20 samples of 3 evaluations each",
        "3 of 3, rk4 2: 20 samples of 8 evaluations each",
    ]
    assert all(name in out for name in ("meanflow 1", "euler 3", "rk4 2", "best solver's"))
    assert set(json.loads((run / "evaluation.json").read_text())["samplers"]) == {f"meanflow {n}" for n in (1, 2, 4)}
    consistency = json.loads((run / "consistency.json").read_text())
    assert set(consistency["samplers"]) == {"meanflow 1", "euler 3", "rk4 2"}
    assert "root mean square distance to rk4 2 from the same noise: meanflow 1 " in out
    assert consistency["rms_distances"]["to"] == "rk4 2"
    assert "rms_distances" not in json.loads((run / "evaluation.json").read_text())
    generator = load_generator(run, "cpu")
    held_out = load_data(DataConfig()).test.labels
    labels = held_out[choose_reference(len(held_out), 20)]
    images = {
        name: sample(
            generator.model, sampler=name, steps=steps, num=20, shape=(1, 8, 8), seed=evaluate.EVALUATION_SEED,
            label=labels, num_classes=10,
        ).images.clamp(-1, 1)
        for name, steps in (("meanflow", 1), ("rk4", 2))
    }  # fmt: skip
    expected = (images["meanflow"] - images["rk4"]).square().mean().sqrt().item()
    assert consistency["rms_distances"]["of"]["meanflow 1"] == pytest.approx(expected, rel=1e-4)


def test_scores_are_told_where_they_cannot_be_written_and_earlier_ones_stay(run, monkeypatch, capsys):
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu"))
    before = (run / "evaluation.json").read_bytes()
    capsys.readouterr()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*evaluation.json \(No space left on device\)"):
        evaluate_command(run, ScoreOptions(num_samples=30, device="cpu"))
    assert "meanflow 1" in capsys.readouterr().out
    assert (run / "evaluation.json").read_bytes() == before


def test_a_path_for_data_that_have_none_is_refused(run):
    with pytest.raises(ConfigError, match=r"--data-path /x: data=digits comes with scikit-learn"):
        evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", data_path="/x"))


def test_table_3_1_is_the_logs():
    assert CONSISTENCY == [
        ("meanflow", 1), ("euler", 10), ("euler", 50), ("euler", 100), ("rk4", 10), ("rk4", 50), ("rk4", 100),
    ]  # fmt: skip


def test_precision_batch_and_backend_of_a_checkpoints_scores_can_be_others(run, monkeypatch):
    """A run that was scored in TF32 on a GPU can be on a CPU, and on a device with less memory."""
    asked = []
    monkeypatch.setattr(evaluate, "sample", lambda model, **given: asked.append(given) or sample(model, **given))
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", precision="bf16", batch_size=7, backend="auto"))
    told = json.loads((run / "evaluation.json").read_text())
    assert (told["precision"], told["backend"], told["batch_size"]) == ("bf16", "auto", 7)
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu"))
    told = json.loads((run / "evaluation.json").read_text())
    assert (told["precision"], told["backend"], told["batch_size"]) == ("fp32", "eager", 512)
    taken = [(given["precision"], given["batch_size"], given["backend"]) for given in asked]
    assert taken == [("bf16", 7, "auto")] * 3 + [("fp32", 512, "eager")] * 3
    with pytest.raises(ConfigError, match=r"--precision=tf32: TF32 is CUDA's, the device is cpu; use fp32 or bf16"):
        evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", precision="tf32"))
    with pytest.raises(ConfigError, match=r"--backend=graph: CUDA graphs are CUDA's, the device is cpu"):
        evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", backend="graph"))


def test_one_sample_is_no_distribution(run):
    with pytest.raises(ConfigError, match="num_samples is 3, expected at least 4"):
        evaluate_command(run, ScoreOptions(num_samples=3, device="cpu"))


def test_any_average_can_be_scored_and_other_data_cannot(run):
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", ema=0.5))
    first = json.loads((run / "evaluation.json").read_text())
    evaluate_command(run, ScoreOptions(num_samples=20, device="cpu"))
    second = json.loads((run / "evaluation.json").read_text())
    assert first["samplers"] != second["samplers"]
    assert [(s["ema"], s["checkpoint"]) for s in (first, second)] == [
        (d, find_checkpoint(run).name) for d in (0.5, 0.9)
    ]
    with pytest.raises(ConfigError, match=r"--ema 0.1: expected one of 0.9, 0.5"):
        evaluate_command(run, ScoreOptions(num_samples=20, device="cpu", ema=0.1))


def test_data_that_were_moved_are_found_by_their_new_place(tmp_path, seed):
    g = torch.Generator().manual_seed(seed)
    write_latents(tmp_path / "old", torch.randn(60, 8, 4, 4, generator=g), torch.arange(60) % 3)
    settings = config(tmp_path, epochs=1, gradient_accumulation_steps=1)
    data = DataConfig("latents", str(tmp_path / "old"), batch_size=9, workers=0)
    run = train(dataclasses.replace(settings, data=data))
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"old: no such folder; .*; if the data were moved, give --data-path$"):
        evaluate_command(run, ScoreOptions(num_samples=0, device="cpu"))
    with pytest.raises(ConfigError, match=r"none: no such folder; [^;]*$"):
        evaluate_command(run, ScoreOptions(num_samples=0, device="cpu", data_path=str(tmp_path / "none")))
    evaluate_command(run, ScoreOptions(num_samples=0, device="cpu", data_path=str(tmp_path / "new")))
    assert (run / "evaluation.json").is_file()
    write_latents(tmp_path / "other", torch.randn(60, 8, 4, 4, generator=g), torch.arange(60) % 3)
    with pytest.raises(ConfigError, match="not the data that .* was trained on; .* --data-path"):
        evaluate_command(run, ScoreOptions(num_samples=0, device="cpu", data_path=str(tmp_path / "other")))


def picture(path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


def sampled(run, out, **kwargs):
    defaults = {"sampler": "meanflow", "steps": 1, "num": 5, "seed": 3, "label": None, "batch_size": 4}
    return sample_command(run, SampleOptions(**defaults | kwargs, out=out, device="cpu"))


def test_samples_are_files_that_the_seed_decides(run, tmp_path):
    grid = sampled(run, tmp_path / "a")
    sampled(run, tmp_path / "b", batch_size=1)
    sampled(run, tmp_path / "c", seed=4)
    assert picture(grid).size[0] > 0
    files = [f"{i:06d}.png" for i in range(5)]
    a, b, c = ([(tmp_path / d / f).read_bytes() for f in files] for d in "abc")
    assert a == b
    assert a != c
    image = picture(tmp_path / "a" / files[0])
    assert image.size == (8, 8)
    assert picture(tmp_path / "a" / "classes.png").height > 0
    assert len(set(image.tobytes())) > 2
    told = json.loads((tmp_path / "a" / "samples.json").read_text())
    assert (told["nfe"], told["precision"], told["backend"]) == (1, "fp32", "auto")


def test_samples_land_in_the_runs_folder_and_other_settings_in_a_folder_of_their_own(run, tmp_path, capsys):
    copied = shutil.copytree(run, tmp_path / "copied")
    grids = [
        sampled(copied, None, **changed)
        for changed in ({}, {"seed": 4}, {"num": 2}, {"label": 7}, {"ema": 0.5}, {"sampler": "euler"}, {"steps": 2})
    ]
    assert len(set(grids)) == len(grids)
    assert all(grid.is_file() and grid.is_relative_to(copied / "samples") for grid in grids)
    assert len(list(copied.glob("samples/*/samples.json"))) == len(grids)
    step = find_checkpoint(copied).name
    assert grids[0].parent.name == f"{step}-meanflow-1-seed-3-num-5"
    assert grids[3].parent.name == f"{step}-meanflow-1-seed-3-num-5-label-7"
    assert sampled(find_checkpoint(copied), None) == grids[0], "a checkpoint's samples are those of its run"
    out, told = capsys.readouterr()
    assert f"  {grids[0]}  " in out
    assert f"fullstride meanflow evaluate {copied}  # " in out
    assert not told, "the same set again replaces nothing that differs"


def test_a_set_of_other_settings_is_not_replaced_without_a_word(run, tmp_path, capsys):
    sampled(run, tmp_path, seed=3)
    sampled(run, tmp_path, seed=3)
    assert not capsys.readouterr().err
    sampled(run, tmp_path, seed=8)
    assert f"{tmp_path}: replacing samples made with other settings (seed: 3 -> 8)" in (capsys.readouterr().err)


@pytest.mark.parametrize(("option", "value"), [("precision", "tf32"), ("backend", "graph")])
def test_what_the_device_cannot_sample_by_is_named_as_the_option(run, tmp_path, option, value):
    with pytest.raises(ConfigError, match=rf"--{option}={value}: .* CUDA's, the device is cpu"):
        sampled(run, tmp_path / "a", **{option: value})
    assert not (tmp_path / "a").exists()


def test_a_generator_has_the_memory_order_of_its_run(tmp_path):
    order = {"memory_format": torch.channels_last}
    for name, last in (("in_order", True), ("as_usual", False)):
        train(config(tmp_path, run_name=name, epochs=1, channels_last=last))
        filters = [p for p in load_generator(tmp_path / name, "cpu").model.parameters() if p.ndim == 4]
        many = [p for p in filters if min(p.shape[1:]) > 1]
        assert many
        assert {p.is_contiguous(**order) for p in many} == {last}


def test_a_folder_holds_the_samples_of_one_call(run, tmp_path):
    """A reader of all its pictures must not find those of an earlier and larger set among them."""
    (tmp_path / "000099.png").write_text("of somebody else")
    sampled(run, tmp_path, num=5)
    sampled(run, tmp_path, num=2, label=3)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["000000.png", "000001.png", "000099.png", "grid.png", "samples.json"]


def test_latents_are_decoded_and_stay_if_they_cannot_be(autoencoder: Folding, tmp_path):
    write_latents(tmp_path / "data", torch.randn(40, 8, 4, 4), torch.arange(40) % 3)
    data = DataConfig("latents", str(tmp_path / "data"), batch_size=9, workers=0)
    run = train(dataclasses.replace(config(tmp_path, epochs=1, gradient_accumulation_steps=1), data=data))
    out, vae = tmp_path / "out", tmp_path / "vae"
    with pytest.raises(ConfigError, match="no autoencoder in diffusers' layout"):
        sampled(run, out, vae=tmp_path)
    assert not out.exists()  # told before anything is sampled
    assert sampled(run, out, num=17, vae=vae) == out / "grid.png"
    latents = load_file(out / "latents.safetensors")["latents"]
    for index, expected in enumerate(to_uint8(pictures(latents))):
        found = np.asarray(picture(out / f"{index:06d}.png"))
        assert np.array_equal(found, expected.permute(1, 2, 0).numpy())
    autoencoder.broken = True
    with pytest.raises(RuntimeError, match="no decoder"):
        sampled(run, out, num=3, seed=8, vae=vae)
    assert sorted(path.name for path in out.iterdir()) == ["latents.safetensors", "samples.json"]
    assert len(load_file(out / "latents.safetensors")["latents"]) == 3


def test_sampling_uses_the_averaged_weights(run):
    generator = load_generator(run, "cpu")
    average = read_group(find_checkpoint(run), "ema_0.9")
    assert all(torch.equal(v, average[k]) for k, v in generator.model.state_dict().items())
    assert not generator.model.training


def test_what_cannot_be_sampled_is_refused(run, tmp_path):
    for label in (10, -1):
        with pytest.raises(ConfigError, match=rf"^--label {label}: expected one of the run's classes, 0 to 9$"):
            sampled(run, tmp_path, label=label)
    with pytest.raises(ConfigError, match="did you mean euler"):
        sampled(run, tmp_path, sampler="eular")
    with pytest.raises(ConfigError, match="no checkpoint here"):
        sampled(tmp_path, tmp_path)


@pytest.mark.parametrize("label", [3, 0, -1])
def test_a_label_of_a_run_without_classes_is_refused(tmp_path, label):
    settings = config(tmp_path, epochs=1)
    settings.model.class_conditional = False
    run = train(settings)
    with pytest.raises(ConfigError, match=rf"^--label {label}: this run has no classes; leave it out$"):
        sampled(run, tmp_path / "out", label=label)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["file", "file/x", "file/x/y"])
def test_a_folder_that_takes_no_samples_is_named_before_they_are_made(run, tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()
    made = []
    monkeypatch.setattr(sampling, "sample", lambda *_, **__: made.append(1))
    with pytest.raises(OSError, match=rf"--out \S*{name}: cannot be written \(Not a directory\)"):
        sampled(run, tmp_path / name)
    assert not made
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_takes_no_samples_is_told_before_they_are_made(run, tmp_path, monkeypatch):
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    made = []
    monkeypatch.setattr(sampling, "sample", lambda *_, **__: made.append(1))
    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(OSError, match=r"--out \S*a/b: cannot be written \(Read-only file system\)"):
        sampled(run, tmp_path / "a" / "b")
    assert not made
    assert not (tmp_path / "a").exists()
