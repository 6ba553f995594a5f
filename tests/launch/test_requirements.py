import pytest

from fullstride.launch.requirements import extras_of, requirements


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (("benchmarks", "bert", "--minutes", "1"), ("jax",)),
        (("benchmarks", "phase2"), ("torch",)),
        (("bert", "train"), ("jax",)),
        (("llm", "serve"), ("serve",)),
        (("meanflow", "train", "track=trackio"), ("torch", "track")),
        (("bert", "train", "track=prometheus"), ("jax", "track")),
        (("bert", "train", "track=none"), ("jax",)),
    ],
)
def test_a_command_brings_what_it_imports(words, extras):
    assert extras_of(list(words)) == extras


def test_masked_language_models_need_equinox_and_no_torch():
    names = {line.partition("==")[0] for line in requirements(["benchmarks", "bert"])}
    assert {"jax", "equinox", "optax"} <= names
    assert "torch" not in names
