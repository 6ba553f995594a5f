"""GET /v1/models, /health and /ready."""

from typing import Literal

from pydantic import BaseModel


class Model(BaseModel):
    """A name that the model answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Status(BaseModel):
    """How it is."""

    status: Literal["ok", "degraded", "ready"]
