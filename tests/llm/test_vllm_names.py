"""Settings by vLLM's names, and by names of before."""

from typing import Any

import pytest

from fullstride.cli.llm_serve import parsed
from fullstride.errors import ConfigError
from fullstride.llm import EngineConfig, SamplingParams, Structured
from fullstride.llm.vllm_names import DIFFERENT, ENGINE, SAMPLING_BEFORE


@pytest.mark.parametrize(("theirs", "ours"), ENGINE.items())
def test_an_engine_takes_vllms_names(theirs, ours):
    value: Any = False if ours == "prefix_cache" else 77
    assert EngineConfig(**{theirs: value}) == EngineConfig(**{ours: value}) != EngineConfig()
    assert parsed("--engine", EngineConfig, [f"{theirs}={value}"]) == EngineConfig(**{ours: value})


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_means_something_else_here_is_refused_with_what_to_give(name):
    given: dict[str, Any] = {name: 0.5}
    with pytest.raises(ConfigError, match=f"^{name}=0.5 is not accepted: "):
        EngineConfig(**given)
    with pytest.raises(ConfigError, match=f"^{name}='0.5' is not accepted: "):
        parsed("--engine", EngineConfig, [f"{name}=0.5"])


def test_a_setting_by_both_of_its_names_is_refused():
    both: dict[str, Any] = {"max_length": 8, "max_model_len": 9}
    for given in (both, dict(reversed(both.items()))):
        with pytest.raises(ConfigError, match="max_length and max_model_len are the same setting"):
            EngineConfig(**given)
    with pytest.raises(ConfigError, match="max_length is given twice"):
        parsed("--engine", EngineConfig, ["max_length=8", "max_model_len=9"])


@pytest.mark.parametrize(("old", "new"), SAMPLING_BEFORE.items())
def test_names_of_before_work_with_a_warning(old, new):
    value: Any = True if old == "include_stop" else Structured("regex", "a+")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        params = SamplingParams(**{old: value})
    assert params == SamplingParams(**{new: value}) != SamplingParams()
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(params, old) == value
