"""Loading of a model from a name, a folder in Hugging Face's layout, or a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fullstride.assets.fetch import fetch
from fullstride.errors import ConfigError, one_of, shortened
from fullstride.llm.config import DTYPES, ModelConfig
from fullstride.llm.text.tokenizer import Tokenizer
from fullstride.llm.weights.gguf_model import load_gguf
from fullstride.llm.weights.hf_folder import load_folder
from fullstride.llm.weights.hub import hub_folder, is_name
from fullstride.llm.weights.parameters import Parameters

# Models that are known by a name: the asset that each is.
MODELS = {"smollm2": "smollm2/gguf"}
# Characters; several names of tensors fit.
MOST_OF_AN_ERROR = 1200


@dataclass(frozen=True)
class LoadedModel:
    """Model that is ready to be put on devices.

    Attributes:
        config: its `dtype` is that of the parameters.
        parameters: lazily read parameters, see `Parameters`.
        tokenizer: tokenizer with the model's number of ids and end tokens.
        path: file or folder that it was loaded from.
        sampling: fields of `SamplingParams` that its files suggest.

    """

    config: ModelConfig
    parameters: Parameters
    tokenizer: Tokenizer
    path: Path
    sampling: Mapping[str, int | float] = field(default_factory=dict)


def load(source: str | Path, *, dtype: str | None = None) -> LoadedModel:
    """Open a model; its parameters are read when they are accessed.

    Args:
        source: a folder with config.json, tokenizer.json and safetensors; a GGUF file, or a folder that holds one;
            a name of `MODELS`, or of Hugging Face's hub, OWNER/NAME or OWNER/NAME@REVISION: both are fetched once and
            cached.
        dtype: float32, bfloat16 or float16; by default the dtype of the folder or file, and bfloat16 for
            quantized weights.

    Raises:
        ConfigError: if there is no such model, it is damaged, or it is of a kind that the engine does not run; the
            message names the kinds that it does.

    """
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)
    path = find(source)
    try:
        config, stored, tokenizer, sampling = load_folder(path) if path.is_dir() else load_gguf(path)
        # An end that the model has no row for can never be chosen.
        ends = tuple(token for token in dict.fromkeys((*config.eos, *tokenizer.eos)) if token < config.vocab_size)
        bos = tokenizer.bos if config.bos is None else config.bos
        config = replace(config, dtype=dtype or config.dtype, eos=ends, bos=bos)
        tokenizer = tokenizer.of_model(config.vocab_size, ends)
        return LoadedModel(config, Parameters(stored, config.dtype), tokenizer, path, sampling)
    except ConfigError as error:  # which may quote what a stranger wrote, of any length
        raise ConfigError(shortened(str(error), MOST_OF_AN_ERROR)) from error


def find(source: str | Path) -> Path:
    """The folder or GGUF file that is meant; a name's file is fetched.

    Raises:
        ConfigError: if there is none, or what could be a name of Hugging Face's hub cannot be fetched.

    """
    if str(source) in MODELS:
        return fetch(MODELS[str(source)])
    if not str(source):  # a path of nothing is the folder that one is in
        raise ConfigError(f"model='': expected a file, a folder or one of the names {', '.join(MODELS)}")
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        if is_name(str(source)):
            return hub_folder(str(source))
        raise ConfigError(f"model={source}: no such file or folder, nor one of the names {', '.join(MODELS)}")
    return path


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    held = f"{len(files)} GGUF files: name one" if files else "neither config.json nor a GGUF file"
    raise ConfigError(f"model={folder}: the folder has {held}")
