"""PTX text to tokens."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ptxemu.errors import ParseError

__all__ = ["Token", "as_float", "number", "tokenize"]

MAX_DIGITS = 128  # of an integer, leading zeros included
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:[^"\\\n]|\\.)*")', re.DOTALL)
_TOKEN = re.compile(
    r"""
    (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |(?:\d+\.\d*|\.\d+|\d+(?=[eE][-+]?\d))(?:[eE][-+]?\d+)?|\d+U?)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<mark>[\[\]{}(),;:|!@+\-<>=])
  | (?P<newline>\n)
  | (?P<space>[ \t\r\f\v]+)
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # "string", "number", "word", "directive" or "mark"
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """The tokens of PTX text.  Raises ParseError at a character that begins none."""
    text = _COMMENT.sub(lambda m: m.group(1) or "\n" * m.group().count("\n") or " ", text)
    tokens, line, position = [], 1, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            shown = text[position:].partition("\n")[0]
            raise ParseError(f"line {line}: `{shown}` begins no PTX token")
        position = match.end()
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind != "space":
            tokens.append(Token(kind, match.group(), line))
    return tokens


def number(text: str) -> tuple[int, int]:
    """The value of a number token and its kind: 0 for an integer, 32 or 64 for the bits of a float.

    Raises ValueError for more than 64 bits, or digits that its base does not have.
    """
    prefix = text[:2].lower()
    if prefix == "0f":
        return int(text[2:], 16), 32
    if prefix == "0d":
        return int(text[2:], 16), 64
    if prefix != "0x" and re.search(r"[.eE]", text):
        return int.from_bytes(struct.pack("<d", float(text)), "little"), 64
    digits = text.rstrip("U")
    if len(digits) > MAX_DIGITS:
        raise ValueError("an integer of more than 64 bits")
    base = 0 if prefix in ("0x", "0b") else 8 if len(digits) > 1 and digits.startswith("0") else 10
    try:
        value = int(digits, base)
    except ValueError:
        raise ValueError("a number with digits that its base does not have") from None
    if value >> 64:
        raise ValueError("an integer of more than 64 bits")
    return value, 0


def as_float(value: int, float_bits: int, element: int) -> int:
    """A float constant as the bits of a float of `element` bytes."""
    decoded = struct.unpack("<f" if float_bits == 32 else "<d", value.to_bytes(float_bits // 8, "little"))[0]
    return int.from_bytes(struct.pack({2: "<e", 4: "<f", 8: "<d"}[element], decoded), "little")
