import random

import pytest

from fullstride.llm.server.tool_readers import Named, Tagged
from tests.llm.server.test_tools import TIME, WEATHER

TEXTS = [WEATHER + "x" + TIME, "a<b <tool_call>" + WEATHER + "</tool_call>", "<" * 9]
TEXTS.append(WEATHER + "\n\nI did.\nThen\n" + TIME + "\n" + WEATHER + "\n<b\n")


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_do_not_matter(text, seed):
    def read(pieces: list[str]) -> tuple[str, list]:
        reader = Tagged({"weather", "time"}, None)
        found = [each for i, piece in enumerate(pieces) for each in reader.read(piece, i == len(pieces) - 1)]
        calls = [call["function"] for each in found for call in each.get("tool_calls", ())]
        return "".join(each.get("content", "") for each in found), calls

    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(text)), 6))
    assert read([text[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]) == read([text])
    assert read(list(text)) == read([text])


def test_forced_arguments_stream():
    reader = Named("f")
    first, second = [reader.read(piece, False)[0]["tool_calls"][0] for piece in ('{"a"', ": 1}")]
    assert first["function"] == {"name": "f", "arguments": '{"a"'}
    assert second == {"index": 0, "function": {"arguments": ": 1}"}}
    assert reader.read("", True) == []
