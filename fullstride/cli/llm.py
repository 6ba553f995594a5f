"""`fullstride llm ...`; each command imports its implementation when it runs."""

from typing import Annotated

import typer

from fullstride.cli.help import App
from fullstride.cli.llm_generate import generate
from fullstride.cli.llm_serve import serve

app = App("Serve language models.", {"Commands": "pull inspect generate serve"})
app.command(
    sections={
        "Answer": "system raw max_tokens temperature top_p top_k seed stop",
        "Model": "model max_length dtype tensor_parallel_size quantize kv_cache_dtype speculative_config",
    }
)(generate)
app.command(
    sections={
        "Server": "host port name api_key limit",
        "Model": "model lora tensor_parallel_size data_parallel_size generation_config",
        "Engine": "max_length max_sequences max_tokens_per_step quantize kv_cache_dtype prefix_cache "
        "speculative_config engine",
    }
)(serve)

Source = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Folder with config.json and safetensors, GGUF file, or known name."),
]


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a known model, e.g. smollm2.")],
) -> None:
    """Fetch a known model into the cache."""
    from fullstride.errors import one_of
    from fullstride.llm.weights.loading import MODELS, find

    one_of("model", name, MODELS)
    typer.echo(find(name))


@app.command()
def inspect(source: Source) -> None:
    """Show a model's configuration and tensors."""
    from fullstride.llm.weights.inspect import show

    show(source)
