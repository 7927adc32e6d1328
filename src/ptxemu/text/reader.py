"""A cursor over the tokens of PTX text, and the errors that name a place in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ptxemu.errors import ParseError
from ptxemu.text.lexer import Token, number, tokenize

__all__ = ["MAX_BYTES", "Reader"]

MAX_BYTES = 1 << 30  # of a variable, which bounds every count
_MAX_DEPTH = 100  # of brackets and scopes, one in the other


class Reader:
    """What the next tokens are.  Raises ParseError, naming the line, where they are not what they have to be."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tokens = tokenize(text)
        self.position = 0
        self.depth = 0  # of brackets and scopes that are open

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        if index < len(self.tokens):
            return self.tokens[index]
        return Token("end", "end of text", self.tokens[-1].line if self.tokens else 1)

    def next(self) -> Token:
        token = self.peek()
        self.position += 1
        return token

    def at(self, text: str) -> bool:
        return self.peek().text == text and self.peek().kind != "string"

    def accept(self, text: str) -> bool:
        if self.at(text):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if not self.at(text):
            raise self.error(f"expected `{text}`")
        return self.next()

    def error(self, why: str, token: Token | None = None) -> ParseError:
        token = token or self.peek()
        shown = self.lines[token.line - 1].strip() if token.line <= len(self.lines) else ""
        return ParseError(f"line {token.line}: {why}, found `{token.text}`: {shown}")

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside a bracket or a scope."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error(f"brackets and scopes more than {_MAX_DEPTH} deep")
        yield
        self.depth -= 1

    def word(self, what: str) -> str:
        if self.peek().kind != "word":
            raise self.error(f"expected {what}")
        return self.next().text

    def number(self) -> tuple[int, int]:
        """As `lexer.number`, of the next token."""
        token = self.next()
        if token.kind != "number":
            raise self.error("expected a number", token)
        try:
            return number(token.text)
        except ValueError as error:
            raise self.error(str(error), Token("number", token.text[:24], token.line)) from None

    def integer(self, least: int | None = None, most: int = MAX_BYTES) -> int:
        """An integer; `least` and `most` bound it where the first is given."""
        token = self.peek()
        negative = self.accept("-")
        value, float_bits = self.number()
        if float_bits:
            raise self.error("expected an integer", token)
        value = -value if negative else value
        if least is not None and not least <= value <= most:
            raise self.error(f"{value} is not in {least}..{most}", token)
        return value

    def rest_of_line(self) -> list[Token]:
        line, found = self.tokens[self.position - 1].line, []
        while self.peek().kind != "end" and self.peek().line == line:
            found.append(self.next())
        return found
