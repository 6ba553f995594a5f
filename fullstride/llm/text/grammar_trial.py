"""Trial compilation of grammars in a separate process that can be stopped, to measure their cost.

llguidance has limits for the tokens of a text, and none that holds for the automata that it makes first: it takes
gigabytes and minutes for an integer that is a multiple of 9,999,999.
"""

import re
from collections.abc import Callable

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.text.confined import IsolatedFunction, TooCostlyError, used_bytes
from fullstride.llm.text.grammar import GrammarVocabulary, compiled

# Schemas of 64 KiB that people write take 0.2 s and a few MiB.
SECONDS, MEMORY = 2.0, 256 << 20
# A schema's keywords that cost, and their values. Numbers count states: of remainders, of characters, of items.
KEYWORDS = re.compile(
    r'"(multipleOf|m(?:in|ax)(?:Length|Items|Properties)|pattern|enum|(?:exclusiveM|m)(?:in|ax)imum)"\s*:\s*'
    r'("(?:[^"\\]|\\.)*"|-?[\d.eE+-]+|\[[^\]]*\])'
)
# How llguidance's own limits read.
OF_LLGUIDANCE = ("fuel exhausted", "max is", "too many", "too complex", "too large")


class Trial:
    """Trial compiler of grammars; safe to share between threads, which wait for one another."""

    def __init__(self, words: GrammarVocabulary):
        """Prepare for a tokenizer's words; the process starts with the first shape."""
        self._tried = IsolatedFunction(f"{__name__}:_trier", words, seconds=SECONDS, memory=MEMORY)

    def bytes_of(self, structured: Structured, wanted: Callable[[], bool]) -> int:
        """Return the bytes of memory of the compiled grammar.

        Raises:
            TooCostlyError: if it takes more time or memory than a shape may; the message names what is to blame.
            ConfigError: if it is not accepted.
            AbandonedError: once it is not `wanted` any more.

        """
        try:
            return self._tried(structured, wanted)
        except ConfigError as error:
            if isinstance(error, TooCostlyError):
                error = f"{structured.kind} is {error}"
            elif not any(words in str(error) for words in OF_LLGUIDANCE):
                raise
            # The keyword of a schema that is most likely to be what costs so much; a grammar may hold schemas, too.
            worst = max(KEYWORDS.findall(structured.value), key=_states, default=None)
            blamed = f", and what costs most seems to be {worst[0]} = {worst[1][:40]}" if worst else ""
            raise TooCostlyError(f"{error}{blamed}; ask for less") from None


def _trier(words: GrammarVocabulary) -> Callable[[Structured], int]:
    tokenizer = words.sorted()

    def size(structured: Structured) -> int:
        before = used_bytes()
        made = compiled(tokenizer, structured)
        return max(0, used_bytes() - before) if made else 0

    return size


def _states(found: tuple[str, str]) -> float:
    """Estimate the automaton states of a keyword; for bounds of numbers, texts and lists, count characters."""
    keyword, value = found
    if keyword == "multipleOf":  # of a division by it, written without its point
        return float(value.replace(".", "").partition("e")[0] or 0)
    return float(value) if keyword.endswith(("Length", "Items", "Properties")) else float(len(value))
