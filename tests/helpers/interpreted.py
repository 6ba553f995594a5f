"""Triton's interpreter, without what takes a fifth of its time."""

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch: Callable[..., Any] = interpreter._patch_lang


def install() -> None:
    """Let the interpreter replace the language's functions once a kernel.

    It replaces them all at every call of a function within a kernel, whose end puts none of them back.
    """
    if hasattr(interpreter, "_LangPatchScope"):  # Triton 3.7
        interpreter._patch_lang = _patch_once


def _patch_once(fn: Any) -> Any:
    languages = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    if any(tl.core.is_builtin(language.arange) for language in languages):
        return _patch(fn)
    return interpreter._LangPatchScope()  # of no changes
