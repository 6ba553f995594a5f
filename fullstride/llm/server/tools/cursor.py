"""Reading of a text that is still being written: each step waits, by a `yield`, until enough of it is there."""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Calls = list[tuple[str, str]]
# How an object that has keys begins, or a list of such; and how any object begins.
CALL = re.compile(r'(\[\s*)?(\{\s*("|$)|$)')
OBJECT = re.compile(r"\{|$")
# What JSON has outside its texts.
OUTSIDE = frozenset(' \t\r\n{}[],:"+-.0123456789eEtrufalsn')
MOST_OF_A_WORD = 256


class NoCallError(ValueError):
    """Error of a text that is no call."""


class JsonScanner:
    """Scanner for the end of JSON within a text; it reads each character once."""

    def __init__(self, start: int = 0, beginning: re.Pattern[str] = CALL):
        """Start at an index of the text, with JSON that begins like this."""
        self._start, self._beginning = start, beginning
        self._at, self._depth = start, 0
        self._quoted = self._escaped = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Index behind the JSON, or None if it goes on.

        Args:
            text: what was given before, and more.

        Raises:
            NoCallError: if there can be none.

        """
        while self._start < len(text) and text[self._start].isspace():
            self._start += 1
        # Of a long text no more than its beginning is looked at each time.
        if self._at - self._start < MOST_OF_A_WORD and not self._beginning.match(text, self._start):
            raise NoCallError
        while self._at < len(text) and self._end is None:
            char, self._at = text[self._at], self._at + 1
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char not in OUTSIDE:
                raise NoCallError
            else:
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0 and char in "}]":
                    self._end = self._at
        return self._end


class Cursor:
    """Place in a text that grows.

    Attributes:
        text: text so far; only ever added to.
        last: whether it is whole.
        at: index of what is read next.

    """

    def __init__(self):
        """Start without text."""
        self.text = ""
        self.last = False
        self.at = 0

    @property
    def rest(self) -> str:
        """The text that is not read yet."""
        return self.text[self.at :]

    def spaces(self) -> Reading[None]:
        """Pass over whitespace."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or self.last:
                return
            yield

    def ahead(self, *tags: str) -> Reading[str | None]:
        """Return whichever of these the text goes on with; None if none."""
        while True:
            for tag in tags:
                if self.text.startswith(tag, self.at):
                    return tag
            rest = self.text[self.at : self.at + max(map(len, tags))]
            if self.last or not any(tag.startswith(rest) for tag in tags):
                return None
            yield

    def take(self, *tags: str) -> Reading[str | None]:
        """Pass over whichever of these the text goes on with, and return it; None if none."""
        tag = yield from self.ahead(*tags)
        self.at += len(tag or "")
        return tag

    def needs(self, *tags: str) -> Reading[str]:
        """Pass over whichever of these the text goes on with, after whitespace.

        Raises:
            NoCallError: if it is none of them.

        """
        yield from self.spaces()
        tag = yield from self.take(*tags)
        if tag is None:
            raise NoCallError
        return tag

    def until(self, tag: str) -> Reading[str]:
        """Return the text before the next such tag, and pass over both.

        Raises:
            NoCallError: if there is none.

        """
        start = look = self.at
        while (found := self.text.find(tag, look)) < 0:
            if self.last:
                raise NoCallError
            look = max(start, len(self.text) - len(tag) + 1)
            yield
        self.at = found + len(tag)
        return self.text[start:found]

    def word(self, *ends: str) -> Reading[str]:
        """Return a name without whitespace around it, up to the first of these ends, which is not passed over.

        Raises:
            NoCallError: if there is none within about `MOST_OF_A_WORD` characters.

        """
        most = MOST_OF_A_WORD + max(map(len, ends))
        while True:
            near = self.text[self.at : self.at + most]
            found = min((i for end in ends if (i := near.find(end)) >= 0), default=-1)
            if found >= 0:
                self.at += found
                return near[:found].strip()
            if self.last or len(near) == most:
                raise NoCallError
            yield

    def json(self, beginning: re.Pattern[str] = CALL) -> Reading[str]:
        """Return the JSON that comes next, and pass over it.

        Raises:
            NoCallError: if there is none.

        """
        scanner = JsonScanner(self.at, beginning)
        while (end := scanner.end(self.text)) is None:
            if self.last:
                raise NoCallError
            yield
        start, self.at = self.at, end
        return self.text[start:end]

    def several(self, one: Callable[[], Reading[Calls]]) -> Reading[Calls]:
        """Return the calls of one reading after another, as far as they can be read.

        Raises:
            NoCallError: if the first one cannot be.

        """
        calls = yield from one()
        end = self.at
        try:
            while found := (yield from one()):
                calls, end = calls + found, self.at
        except NoCallError:
            pass
        self.at = end
        return calls
