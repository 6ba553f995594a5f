import logging
import re
from dataclasses import asdict, fields, is_dataclass
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.config.overrides import compose, sweep
from fullstride.meanflow.config.presets import KEYS, PRESETS, chosen, config_from_dict, keys_of
from fullstride.meanflow.config.recipes import RECIPES
from fullstride.meanflow.config.schema import LossConfig, TrainConfig
from fullstride.settings.fields import written

LOG_SPELLING = (
    "data=digits model=unet loss=meanflow loss.meanflow_ratio=0.75 loss.logit_normal_mean=-2.0 "
    "loss.logit_normal_std=2.0 loss.weighting_power=0.75 loss.use_batch_time=true data.batch_size=128 "
    "optimizer.lr=1e-4 gradient_accumulation_steps=4 precision=bf16 epochs=20 eval_every=5 save_every=5 "
    "run_name=overfit resume=true"
)


def unet(overrides: list[str]) -> UNetConfig:
    model = compose(overrides).model
    assert isinstance(model, UNetConfig)
    return model


def test_no_override_gives_the_defaults_as_real_dataclasses():
    config = compose([])
    assert config == TrainConfig()
    assert type(config) is TrainConfig
    assert [type(getattr(config, f.name)) for f in fields(TrainConfig)] == [
        type(getattr(TrainConfig(), f.name)) for f in fields(TrainConfig)
    ]
    assert type(unet([]).channel_mult) is list


def test_the_experiment_logs_spelling_is_accepted():
    expected = TrainConfig(
        loss=LossConfig(
            meanflow_ratio=0.75, logit_normal_mean=-2.0, logit_normal_std=2.0, weighting_power=0.75, use_batch_time=True
        ),
        gradient_accumulation_steps=4,
        precision="bf16",
        epochs=20,
        eval_every=5,
        save_every=5,
        run_name="overfit",
        resume=True,
    )
    assert compose([str(override) for override in LOG_SPELLING.split()]) == expected


def test_the_tiny_network_and_flow_matching_are_presets():
    config = compose(["loss=mse", "model=unet_tiny"])
    tiny = unet(["loss=mse", "model=unet_tiny"])
    assert (tiny.name, tiny.channels, tiny.channel_mult, tiny.num_blocks) == ("unet_tiny", 24, [1, 2], 1)
    assert tiny.attention_resolutions == []
    assert (config.loss.name, config.loss.meanflow_ratio, config.loss.weighting_power) == ("mse", 0.0, 0.0)


def test_a_key_overrides_its_preset_in_any_order():
    for overrides in (["model=unet_tiny", "model.channels=32"], ["model.channels=32", "model=unet_tiny"]):
        assert unet(overrides).channels == 32


def test_two_calls_share_nothing():
    unet(["model=unet_tiny"]).channel_mult.append(7)
    compose([]).evaluation.steps.clear()
    assert unet(["model=unet_tiny"]).channel_mult == [1, 2]
    assert compose([]).evaluation.steps == [1, 2, 4]


TAUGHT = ("loss.teacher_ema", "loss.teacher_guidance")
# Numbers, flags and lists that one objective has, or that exclude what the others are given.
OWN_KEYS = {
    "meanflow loss.tangent=teacher loss.teacher=x model.class_conditional=true": dict.fromkeys(TAUGHT, 0.5),
    "imf_whole model=mit_tiny": {"loss.largest_scale": 2.5, "loss.scale_power": 0.5, "model.head_blocks": 2},
    "perceptual": {"loss.perceptual_weight": 0.5, "loss.perceptual_until": 0.5},
    "cmt loss.teacher=x": {"loss.path_steps": 4, "loss.path_pairs": 2},
    "alphaflow": {"loss.flow_until": 0.25, "loss.exact_from": 0.5, "loss.least_alpha": 0.5},
}


def test_every_number_flag_and_list_can_be_set():
    spelled = {int: "4", float: "0.5", bool: "true", list[int]: "[2,3]", list[float]: "[0.5,0]"}
    values = {int: 4, float: 0.5, bool: True, list[int]: [2, 3], list[float]: [0.5, 0.0]}
    # An expected time is multiplied by the first, so that 0.5 is refused; 0.5 is wider than a power function can be.
    own = {"watch.checkpoint_factor": 2.5, "ema.widths": [0.25, 0.125]}
    reached = set()
    for model in ("unet", "song_unet", "dit_b2", "token_dit"):
        keys = {name: key.kind for name, key in keys_of(chosen({"model": model})).items() if key.kind in spelled}
        keys |= {"guard.spike": int} | ({"model.time_max_frequency": int} if model == "unet" else {})
        del keys["overwrite"]  # excluded by resume
        for taught in TAUGHT:
            del keys[taught]  # excluded by the guidance of the target
        # Each is excluded by the other's data; both have a share held out.
        data, other = ("latents", "image_size") if model == "dit_b2" else ("image_folder", "latent_scale")
        del keys[f"data.{other}"]
        if model != "song_unet":
            del keys["data.augment"]  # excluded by the network
        if "dit" in model:
            del keys["channels_last"]  # it has no convolutions
        if model == "dit_b2":
            del keys["data.allow_changed"], keys["data.skip_damaged"], keys["data.max_megapixels"]  # of pictures
        else:
            del keys["data.num_classes"]  # of latents
        choices = [f"model={model}", f"data={data}", "data.path=folder", "loss.time_law=v1", "optimizer=muon"]
        config = compose([*choices, *(f"{key}={own.get(key, spelled[kind])}" for key, kind in keys.items())])
        for key, kind in keys.items():
            assert attrgetter(key)(config) == own.get(key, values[kind]), key
        reached |= set(keys)
    for loss, group in OWN_KEYS.items():
        compose([*f"loss={loss}".split(), *(f"{key}={value}" for key, value in group.items())])
        reached |= set(group)
    assert reached == {name for name, key in KEYS.items() if key.kind in spelled} - {"overwrite"}


@pytest.mark.parametrize(
    "name", ["1e-4", "lr=1e-4,p=1", "true", "a b", "x[0](1)", "it's", "{a: 1}", "007", "what???", "a,[b]"]
)
def test_text_is_taken_as_written(name):
    assert compose([f"run_name={name}"]).run_name == name
    assert compose([f"output_dir=/tmp/{name}/x\\"]).output_dir == f"/tmp/{name}/x\\"


def test_quotes_around_a_value_are_taken_off():
    assert compose(["run_name='a b'", 'epochs="7"']) == TrainConfig(run_name="a b", epochs=7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.meanflow_ration=0.5", "loss.meanflow_ration=0.5: no such key; did you mean loss.meanflow_ratio?"),
        ("meanflow_ration=0.5", "no such key; did you mean loss.meanflow_ratio?"),
        ("lr=1", "lr=1: no such key; did you mean optimizer.lr?"),
        ("batch_size=4", "batch_size=4: no such key; did you mean data.batch_size or evaluation.batch_size?"),
        ("epoch=4", "epoch=4: no such key; did you mean epochs?"),
        ("ema.decay=0.9", "ema.decay=0.9: no such key; did you mean ema.decays?"),
        ("modle=unet", "modle=unet: no such key; did you mean model?"),
        ("model.name=unet_tiny", "model.name=unet_tiny: no such key; did you mean model=..., one of unet, unet_tiny,"),
        ("loss.foo=1", "loss.foo=1: no such key; expected one of loss.meanflow_ratio, loss.time_law,"),
        ("foo=1", "foo=1: no such key; expected one of epochs, gradient_accumulation_steps,"),
        ("hydra.run.dir=x", "hydra.run.dir=x: no such key; expected one of epochs,"),
        ("batch=4", "batch=4: no such key; expected one of epochs,"),
        ("watch.first_minutes=3", "no such key; did you mean watch.first_step_minutes?"),
        ("watch=never", "watch=never: expected default"),
        ("+epochs=3", "no such key; did you mean epochs?"),
        ("~loss.split=static", "no such key; did you mean loss.split?"),
        ("model=unett", "model=unett: expected one of unet, "),
        ("model=unet_tin", "model=unet_tin: expected one of unet_tiny, "),
        ("data=mnist", "data=mnist: expected one of mnist5k, "),
        ("preset=cifar", "preset=cifar: expected one of cifar10_v1, "),
        ("model.depth=3", "model.depth=3: no such key of model=unet; it is one of another model"),
        ("ema.decays=0.9", "ema.decays=0.9: expected a list of numbers such as [0.999,0.9999], got '0.9'"),
        ("evaluation.features=classifier", "expected a list of names such as [a,b], got 'classifier'"),
        ("evaluation.features=[fid]", "expected names out of classifier, efficientnet_lite0, inception"),
        ("loss=[mse]", "; did you mean mse?"),
        ("loss={name: mse}", "expected one of "),
        ("epochs=ten", "epochs=ten: expected an integer, got 'ten'"),
        ("epochs=2.5", "epochs=2.5: expected an integer, got '2.5'"),
        ("epochs=true", "expected an integer, got 'true'"),
        ("epochs=null", "expected an integer, got 'null'"),
        ("epochs=", "epochs=: expected an integer, got ''"),
        ("epochs=1,2", "epochs=1,2: expected an integer, got '1,2'"),
        ("epochs=[1]", "expected an integer, got"),
        ("epochs={a:1}", "expected an integer, got"),
        ("epochs=)", "expected an integer, got"),
        ("epochs=???", "expected an integer, got"),
        ("epochs='???'", "expected an integer, got"),
        ("epochs=${save_every}", "expected an integer, got"),
        ("optimizer.lr=fast", "optimizer.lr=fast: expected a number, got 'fast'"),
        ("resume=maybe", "resume=maybe: expected true or false, got 'maybe'"),
        ("model.channel_mult=3", "model.channel_mult=3: expected a list of integers such as [1,2], got '3'"),
        ("model.channel_mult=[1,a]", "expected a list of integers such as [1,2], got '[1,a]'"),
        ("model.channel_mult=[1,[2]]", "expected a list of integers such as [1,2]"),
        ("model.channel_mult=[ [1], 2]", "expected a list of integers such as [1,2]"),
        ("evaluation.steps=[1,???]", "expected a list of integers such as [1,2]"),
        ("model.channel_mult={a:1}", "expected a list of integers such as [1,2]"),
        ("evaluation.steps=[1,null]", "expected a list of integers such as [1,2]"),
        ("epochs", "epochs: expected key=value, such as epochs=20"),
        ("~epochs", "~epochs: expected key=value, such as epochs=20"),
        ("", ": expected key=value"),
        ("=3", "=3: no such key"),
        ("loss.meanflow_ratio=1.5", "loss.meanflow_ratio=1.5: expected a share in [0, 1]"),
        ("precision=fp16", "precision=fp16: expected one of bf16, fp32, tf32; did you mean bf16?"),
        ("run_name=../x", "run_name=../x: expected a folder's name"),
    ],
)
def test_a_mistake_is_one_line_in_our_words(override, message):
    with pytest.raises(ConfigError, match="expected|no such key") as raised:
        compose([override])
    text = str(raised.value)
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "override",
    ["loss.meanflow_ratio=0.25,0.5", "seed=range(3)", "model=unet,dit_b2", "precision=fp32,bf16", "resume=true,false"],
)
def test_several_values_are_told_to_need_multirun(override):
    with pytest.raises(ConfigError, match="; several values need `meanflow train --multirun`$") as raised:
        compose(["epochs=3", override])
    assert str(raised.value).startswith(f"{override}: expected ")
    assert len(sweep([override])) > 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["epochs=1,"],
        ["foo=1,2"],
        ["ema.decays=0.9,0.99"],
        ["epochs=ten", "seed=1,2"],
        ["seed=1", "seed=1,2"],
        ["run_name=../a,b"],
    ],
)
def test_what_a_sweep_would_not_mend_is_told_of_none(overrides):
    with pytest.raises(ConfigError) as raised:
        compose(overrides)
    assert "--multirun" not in str(raised.value)


def test_a_key_like_no_other_is_told_all_that_a_configuration_has():
    with pytest.raises(ConfigError) as refused:
        compose(["compile=true"])
    listed = str(refused.value).rpartition("expected one of ")[2].split(", ")
    assert sorted(listed) == sorted(field.name for field in fields(TrainConfig))


def test_every_part_of_a_configuration_is_a_group():
    config = TrainConfig()
    assert set(PRESETS) == {field.name for field in fields(config) if is_dataclass(getattr(config, field.name))}


@pytest.mark.parametrize("twice", [["epochs=3", "epochs=4"], ["model=unet", "model=unet_tiny"]])
def test_a_key_given_twice_is_refused(twice):
    key = twice[0].split("=")[0]
    with pytest.raises(ConfigError, match=f"{twice[1]}: {key} is given twice"):
        compose([twice[0], "seed=1", twice[1]])


@settings(max_examples=25, deadline=None)
@given(key=st.sampled_from([*keys_of(chosen({})), *PRESETS, "preset"]), text=st.text(max_size=12))
def test_any_text_is_taken_as_written_or_refused_in_our_words(key, text):
    try:
        config = compose([f"{key}={text}"])
    except ConfigError:
        return
    if key == "output_dir" and not text.startswith(("'", '"')):
        assert config.output_dir == text


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)
    compose(["model=unet_tiny"])
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize(("key", "usual"), [("guard.check_step", True), ("track", "none"), ("model.recompute", False)])
def test_a_key_that_an_earlier_version_did_not_save_has_its_default(key, usual):
    values = asdict(compose(["model=dit_b2", "epochs=3", "optimizer.lr=0.5"]))
    group, _, name = key.rpartition(".")
    del (values[group] if group else values)[name]
    config = config_from_dict(values)
    assert (attrgetter(key)(config), config.epochs, config.optimizer.lr) == (usual, 3, 0.5)


@pytest.mark.parametrize("key", ["loss.novel", "novel", "model.name", "novel.key"])
def test_a_saved_configuration_of_a_newer_version_is_refused_by_its_keys(key):
    values = asdict(compose([]))
    group, _, name = key.rpartition(".")
    (values.setdefault(group, {}) if group else values)[name] = "new"
    with pytest.raises(ConfigError, match=re.escape(key)):
        config_from_dict(values)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration_that_survives_a_checkpoint(name):
    path = ["data.path=somewhere"] if "imagenet" in name else []
    config = compose([f"preset={name}", *path])
    assert config.preset == name
    assert config_from_dict(asdict(config)) == config
    assert type(config_from_dict(asdict(config)).model) is type(config.model)
    for key, text in RECIPES[name].settings.items():
        value = attrgetter(key)(config)
        assert written(value) in (text, written(float(text)) if text[:1].isdigit() else text), key
    assert any(word in RECIPES[name].source for word in ("arXiv", "py-meanflow", "this project's own"))


def test_recipes_hold_the_published_numbers():
    """arXiv:2505.13447 and the two official repositories."""
    paper, v1 = compose(["preset=cifar10_paper"]), compose(["preset=cifar10_v1"])
    for config in (paper, v1):
        assert config.data.batch_size * config.gradient_accumulation_steps == 1024
        assert (config.loss.meanflow_ratio, config.loss.weighting_power, config.loss.weighting_eps) == (
            0.75,
            0.75,
            1e-3,
        )
        assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (6e-4, 0.9, 0.999)
        assert (config.ema.decays, config.ema.period, config.data.augment) == ([0.99995, 0.9999, 0.9996], 16, 0.12)
    assert (paper.loss.time_law, paper.loss.logit_normal_mean, paper.loss.logit_normal_std) == ("v0", -2.0, 2.0)
    assert (v1.loss.time_law, v1.loss.logit_normal_mean, v1.loss.r_logit_normal_mean) == ("v1", -0.6, -4.0)
    xl = compose(["preset=imagenet256_xl2", "data.path=x"])
    assert (xl.loss.omega, xl.loss.kappa, xl.loss.guidance_end, xl.loss.label_dropout) == (0.2, 0.92, 0.75, 0.1)
    b4 = compose(["preset=imagenet256_b4_cfg3", "data.path=x"])
    assert (b4.model.name, b4.epochs, b4.loss.meanflow_ratio, b4.loss.weighting_power) == ("dit_b4", 80, 0.25, 1.0)
    assert (b4.loss.logit_normal_mean, b4.loss.logit_normal_std) == (-0.4, 1.0)
    assert (b4.loss.omega, b4.loss.kappa, b4.loss.guidance_start, b4.loss.guidance_end) == (3.0, 0.0, 0.0, 1.0)
    assert (xl.data.batch_size, xl.optimizer.lr, xl.optimizer.beta2, xl.epochs) == (256, 1e-4, 0.95, 240)


def test_what_is_given_wins_over_the_recipe():
    config = compose(["preset=cifar10_paper", "model=unet", "data=fashion_mnist", "data.augment=0", "epochs=3"])
    assert isinstance(config.model, UNetConfig)
    assert (config.model.dropout, config.data.name, config.epochs) == (0.2, "fashion_mnist", 3)
    for preset in ("cifar10_paper", "cifar10_v1", "fashion_mnist"):
        uniform = compose([f"preset={preset}", "loss.time_law=uniform"]).loss
        assert (uniform.time_law, uniform.meanflow_ratio, uniform.weighting_power) == ("uniform", 0.75, 0.75)
        with pytest.raises(ConfigError, match="loss.logit_normal_mean=-2.0 loss.time_law=uniform: expected"):
            compose([f"preset={preset}", "loss.time_law=uniform", "loss.logit_normal_mean=-2"])
    v0 = compose(["preset=cifar10_v1", "loss.time_law=v0"]).loss
    assert (v0.logit_normal_mean, v0.logit_normal_std) == (-0.6, 1.6)
    plain = compose(["preset=cifar10_paper", "loss=mse"])
    assert (plain.loss.name, plain.loss.meanflow_ratio) == ("mse", 0.0)
    assert plain.optimizer.lr == 6e-4
    classes = [
        compose(["preset=imagenet256_b2", "data.path=x", *more]).data.num_classes for more in ([], ["data=mnist5k"])
    ]
    assert classes == [1000, 0]


def test_a_sweep_is_every_combination_each_under_its_own_name():
    runs = sweep(["seed=0,1", "loss.meanflow_ratio=0.25,0.75", "epochs=3", "run_name=a"])
    assert len(runs) == 4
    assert runs[1] == ["seed=0", "loss.meanflow_ratio=0.75", "epochs=3", "run_name=a_seed=0_loss.meanflow_ratio=0.75"]
    assert len({compose(run).run_name for run in runs}) == 4
    for listed in ("range(3)", "0, 1, 2", "choice(0,1,2)", "range(0,3)", "range(0,3,1)"):
        assert [compose(run).seed for run in sweep([f"seed={listed}"])] == [0, 1, 2]
    assert sweep(["run_name=a", "data.path='b,c'", "seed=0,1"])[0][0] == "data.path='b,c'"
    paths = [compose(run) for run in sweep(["data=image_folder", "data.path=../a,b/c"])]
    assert [run.run_name for run in paths] == ["sweep_data.path=__a", "sweep_data.path=b_c"]
    assert [run.data.path for run in paths] == ["../a", "b/c"]
    assert [unet(run).channel_mult for run in sweep(["model.channel_mult=[1,2],[2]"])] == [[1, 2], [2]]
    for overrides, message in (
        (["seed=0"], "no override lists values"),
        (["seed=0,1,0"], "3 runs, two of them run_name=sweep_seed=0; expected each value once"),
        (["seed=0,1", "run_name=a,b"], "run_name=a,b: expected one name"),
        (["model=glob(unet*)"], "no override lists values"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep(overrides)
