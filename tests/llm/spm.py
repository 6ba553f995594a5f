"""A small SentencePiece vocabulary, and SentencePiece's BPE in its plainest form."""

from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, trainers

from fullstride.llm.text.tokenizer import Tokenizer as Wrapped
from tests.llm.tiny import TEXTS

NOWHERE = Path("made")

UNKNOWN, NORMAL, CONTROL, BYTE = 2, 1, 3, 6


def make_vocabulary(rows: int = 420) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and token types as a GGUF lists them: marks, 256 bytes, pieces by their rank, characters last."""
    backend = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=rows - 259, show_progress=False)
    backend.train_from_iterator(["▁" + text.replace(" ", "▁") for text in TEXTS], trainer)
    pieces = sorted(backend.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return tokens, scores, [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)


def encode(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Join the neighbours that make the best piece, the first of equals, as long as any do; then bytes for the rest."""
    known = {piece: token for token, piece in enumerate(tokens) if token >= 259}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(scores[known[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in known]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [token for s in symbols for token in ([known[s]] if s in known else [3 + byte for byte in s.encode()])]


def make_words() -> tuple[Wrapped, dict[str, int]]:
    """Whole words with the space before them, as SentencePiece has them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁The", "▁sky", "▁is", "▁blue"]
    ids = {piece: token for token, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<s>", "</s>"])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return Wrapped(backend, eos=(2,), bos=1), ids
