"""Items of a response as they are written, and the events that tell of it."""

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

Event = dict[str, Any]
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ItemWriter:
    """Writer of items from the deltas of a chat's message.

    Attributes:
        output: items that are whole.

    """

    def __init__(self):
        """Start without items."""
        self.output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._call = -1
        self._waiting: list[dict[str, Any]] = []

    def write(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[Event]:
        """Yield the events of a delta; logprobs of tokens that are not a message's have no place."""
        if delta.keys() & {"reasoning_content", "tool_calls"}:
            self._waiting = []
        if text := delta.get("reasoning_content"):
            yield from self._text("reasoning", text, [])
        if (text := delta.get("content")) or (logprobs and self._kind == "message"):
            yield from self._text("message", text or "", [*self._waiting, *_logprobs(logprobs)])
            self._waiting = []
        elif not self._kind and "content" in delta:
            self._waiting += _logprobs(logprobs)  # of a text that is held back
        for call in delta.get("tool_calls", ()):
            yield from self._called(call)

    def close(self, status: str) -> Iterator[Event]:
        """Yield the events that end the response's last item; a response without any gets an empty message."""
        if self._item is None and not self.output:
            yield from self._open("message")
        yield from self._close(status)

    @property
    def reasons(self) -> bool:
        """Return whether what is written now is reasoning."""
        return self._kind == "reasoning"

    @property
    def _kind(self) -> str:
        return self._item["type"] if self._item else ""

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"] if self._item else "", "output_index": len(self.output)}

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        yield from self._open(kind)
        item: Any = self._item
        part = item["content"][0]
        part["text"] += text
        written: Event = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            written["logprobs"] = logprobs
        yield {"type": f"response.{part['type']}.delta", **written}

    def _called(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if call["index"] != self._call or self._kind != "function_call":
            yield from self._open("function_call", call_id=call["id"], name=function["name"], arguments="")
            self._call = call["index"]
        if (text := function.get("arguments")) and self._item is not None:
            self._item["arguments"] += text
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Begin an item, unless it is a text that goes on."""
        if self._kind == kind != "function_call":
            return
        yield from self._close("completed")
        item: dict[str, Any] = {
            "id": f"{PREFIXES[kind]}_{uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        item |= {"reasoning": {"summary": []}, "message": {"role": "assistant"}}.get(kind, {})
        texts = kind != "function_call"
        self._item = item | ({"content": []} if texts else {})
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": _copy(self._item)}
        if texts:
            part = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._item["content"] = [part]
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(part)}

    def _close(self, status: str) -> Iterator[Event]:
        if (item := self._item) is None:
            return
        place = self._place()
        if self._kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if self._kind == "message" else {}
            yield {"type": f"response.{part['type']}.done", **place, "content_index": 0, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._item = None


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}


def _logprobs(given: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return list(given["content"]) if given else []
