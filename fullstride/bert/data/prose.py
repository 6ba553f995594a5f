"""Prose out of documentation: paragraphs of words, without code, markup and drawings."""

import re
import textwrap

# ``code``, `name`, :role:`name`, *emphasis*: the words stay.
ROLE = re.compile(r"(?::[a-z:]+:)?(`{1,2})[~!]?([^`]+)\1_{0,2}")
EMPHASIS = re.compile(r"(\*{1,2})(\w[^*\n]*?)\1")
# What begins a paragraph that is no prose: prompts, directives, tables, rules, comments.
NOT_PROSE = re.compile(r"(>>>|\.\.\.|\.\. |[+|=\-#~^\"'$<{\[(@]|\w+\(|\w+ *=)")
PROMPT = ">>>"
LETTERS, WORDS = 0.85, 5


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose in a docstring or a page of reStructuredText, each in one line."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        block = textwrap.dedent(block).strip()
        line = " ".join(EMPHASIS.sub(r"\2", ROLE.sub(r"\2", block)).split())
        if not NOT_PROSE.match(block) and PROMPT not in block and _is_prose(line):
            found.append(line)
    return found


def _is_prose(line: str) -> bool:
    letters = sum(c.isalpha() or c.isspace() for c in line)
    return len(line.split()) >= WORDS and letters >= LETTERS * len(line)
