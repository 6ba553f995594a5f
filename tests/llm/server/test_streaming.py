from fullstride.llm.server.streaming import merge


def test_pieces_become_a_whole():
    pieces = [
        {"index": 1, "delta": {"role": "assistant", "content": "", "refusal": None}, "finish_reason": None},
        {"index": 1, "delta": {"content": "Hel"}, "logprobs": {"content": [1]}, "finish_reason": None},
        {"index": 1, "delta": {"content": "lo"}, "logprobs": {"content": [2, 3]}, "finish_reason": None},
        {"index": 1, "delta": {}, "finish_reason": "stop", "stop_reason": 0},
    ]
    whole = None
    for piece in pieces:
        whole = merge(whole, piece)
    assert whole == {
        "index": 1,
        "delta": {"role": "assistant", "content": "Hello", "refusal": None},
        "logprobs": {"content": [1, 2, 3]},
        "finish_reason": "stop",
        "stop_reason": 0,
    }
