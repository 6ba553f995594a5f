"""/openapi.json: what FastAPI makes of the routes, but for what middleware and error handlers do."""

from typing import Any

from fastapi import FastAPI

from fullstride.llm.server.middleware import OPEN_PATHS


def describe(app: FastAPI, guarded: bool) -> None:
    """Let the app's description say that validation errors are 400s, and which routes need a key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct(generate(), guarded)
        return generate()

    app.openapi = openapi


def _correct(schema: dict[str, Any], guarded: bool) -> None:
    """In place, because FastAPI keeps what it generated."""
    schemas = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if guarded:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if guarded and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
