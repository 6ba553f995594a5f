"""Which of the project's extras brings a package, and how it is installed."""

from collections.abc import Sequence

# Whatever is not here is torch's.
EXTRAS = {
    **dict.fromkeys(("equinox", "jax", "jaxlib", "optax", "orbax", "tokenizers"), "jax"),
    **dict.fromkeys(("fastapi", "httpx", "llguidance", "prometheus_client", "uvicorn"), "serve"),
    **dict.fromkeys(("modal", "packaging", "submitit", "yaml"), "launch"),
}
# What torch and jax both bring.
SHARED = ("jaxtyping", "safetensors")
# Commands whose second word is the area.
NAMED_SECOND = ("bench", "experiment")


def extra_of(package: str, command: Sequence[str] = ()) -> str:
    """The extra with which a command has a package and all else that it needs.

    Args:
        package: name of a module, as it is imported.
        command: the command line's first words, such as `("bench", "llm")`.

    """
    area = next(iter(command[1:] if command[:1] and command[0] in NAMED_SECOND else command), "")
    top = package.partition(".")[0]
    if area == "llm":
        return "serve"  # the others lack a part of what the engine imports
    return "jax" if area == "bert" and top in SHARED else EXTRAS.get(top, "torch")


def how_to_install(extra: str) -> str:
    """What to do about packages of an extra that are missing.

    It names a folder, not the project: an index of packages may have somebody else's under that name.
    """
    return f"run, from the root of a clone: pip install '.[{extra}]'"
