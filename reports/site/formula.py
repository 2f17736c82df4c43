"""A formula as it stands in a record, `o_t = sum_s w_ts v_s`, set as mathematics.

The records write formulas as one types them on a terminal, and `veriformer explain` prints them so. Here they become
pictures of glyphs with words between, piece by piece, so that a line can be broken where one would break it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib import rc_context

from veriformer.reports.formulas import as_svg

_GREEK = ("alpha", "beta", "gamma", "delta", "theta", "kappa", "lambda", "omega", "xi", "pi", "eps")
_SYMBOLS = {
    "<=>": r"\Leftrightarrow", "=>": r"\Rightarrow", "->": r"\rightarrow", "<-": r"\leftarrow", "<=": r"\leq",
    ">=": r"\geq", "!=": r"\neq", ">>": r"\gg", "~": r"\sim", "*": r"\cdot", "||": r"\Vert", "|": r"\vert",
    "=": "=", "<": "<", ">": ">", "+": "+", "-": "-", "/": "/", "//": r"/\!/", "..": r"\ldots", "...": r"\ldots",
    "{": r"\{", "}": r"\}", "<<": r"\langle", "<>": r"\rangle", "@": r"\partial",
    "inf": r"\infty", "infinity": r"\infty", "grad": r"\nabla",
}  # fmt: skip
_UPRIGHT = (
    "softmax", "log", "ln", "exp", "sin", "cos", "max", "min", "argmax", "mean", "var", "std", "norm", "scale", "base",
    "mask", "floor", "peak", "pad", "tol", "special", "FLOPs", "LN", "PE", "act",
)  # fmt: skip
_SPACE = r"\,"
_MARKS = ",;:.)"
_BREAKS = ("<=>", "=>", "=", "<=", ">=", "!=", "->", "~", "<", ">", ":")
_TOKEN = re.compile(
    r"\s+|\d+(?:\.\d+)?e-?\d+|\d+(?:\.\d+)?|<=>|=>|->|<-|<=|>=|!=|>>|\|\||\.\.\.|\.\.|//"
    r"|'[^'\sA-Za-z]+'|\.[a-z_]+(?:\([a-z]*\))?|[A-Za-z]{2,}(?:'s\b|-[A-Za-z0-9]+)"
    r"|(?!d[A-Za-z]_)[A-Za-z]{2,}(?:_[A-Za-z]{3,})+|[A-Za-z]+\d*|."
)
_SCRIPT = re.compile(r"(?:<=?|>=?)?-?(?:\d+\.\d+|[A-Za-z0-9]+)(?:(?:\.\.|[+-])[A-Za-z0-9]+(?![_(A-Za-z0-9]))*")
_CALLS = r"[_(\[=]"  # what follows a name that stands in mathematics
_INNER = re.compile(r"<(?=[^<>=;:]*,)([^<>=;:]*)>")


@dataclass(frozen=True)
class Piece:
    """A part of a formula that stays in one line: TeX, or words in between."""

    text: str
    is_tex: bool
    is_apart: bool = True  # a space stands before it


def as_html(formula: str) -> Markup:
    """Return a formula as HTML: each piece an SVG in the colour of the text, words as text."""
    told = Markup("")
    with rc_context({"mathtext.fontset": "stix"}):
        for piece in pieces(formula):
            inner = as_svg(piece.text) if piece.is_tex else Markup('<span class="words">{}</span>').format(piece.text)
            told += (" " if piece.is_apart else "") + inner
    return Markup('<div class="formula" role="math" aria-label="{}" data-search-exclude>{}</div>').format(formula, told)


def pieces(formula: str) -> list[Piece]:
    r"""Return the pieces of a formula.

    >>> [p.text for p in pieces("f(x)_t = 0 where the mask is")]
    ['f(x)_{t}', '=\\,0', 'where the mask is']
    >>> [p.text for p in pieces("w_ij >= 0, <q, k> / sqrt(d_k)")]
    ['w_{ij}', '\\geq \\,0,', '\\langle q,\\,k\\rangle \\,/\\,\\sqrt{d_{k}}']
    """
    found: list[Piece] = []
    kept: list[_Token] = []

    def close() -> None:
        text = "".join(t.text for t in kept)
        if bare := text.removeprefix(_SPACE).removesuffix(_SPACE).strip():
            found.append(Piece(bare, not kept[-1].is_word, is_apart=spaced[0]))
            spaced[0] = text.endswith((_SPACE, " "))
        kept.clear()

    spaced = [True]
    for token in _Reader(formula).tokens():
        if kept and (token.is_word != kept[-1].is_word or token.breaks_before):
            close()
        if not kept and (token.text.isspace() or token.text == _SPACE):
            spaced[0] = True
            continue
        kept.append(token)
        if token.breaks_after:
            close()
    close()
    return found


@dataclass(frozen=True)
class _Token:
    text: str
    is_word: bool = False
    breaks_before: bool = False
    breaks_after: bool = False


class _Reader:
    """Reads one formula from left to right; `in_words` is whether what was read last was a word."""

    def __init__(self, formula: str) -> None:
        text = _INNER.sub(r"⟨\1⟩", formula)
        if " / d " in text:  # derivatives: everywhere else d is a width
            text = re.sub(r"(?<![\w^)])d(\^2)?(?= )", r"∂\1", text)
        self.text, self.place, self.depth, self.in_words = text, 0, 0, False

    def tokens(self) -> Iterator[_Token]:
        while self.place < len(self.text):
            token = self._next()
            self.in_words = token.is_word
            yield token

    def _next(self) -> _Token:
        found = _TOKEN.match(self.text, self.place)
        assert found is not None
        token, self.place = found[0], found.end()
        before = self.text[: found.start()][-1:]
        if token.isspace():
            return _Token(" ", is_word=True) if self.in_words else _Token(_SPACE)
        if self.in_words and token in _MARKS and not before.isspace():
            return _Token(token, is_word=True)
        if token == "(" and before in ("", " ") and self._begins_a_remark():
            return _Token(token, is_word=True)
        if token in ("_", "^"):
            return _Token(f"{token}{{{self._script()}}}")
        if token == "sqrt" and self._follows("("):
            return _Token(rf"\sqrt{{{self._group()}}}")
        self.depth += (token in "([{⟨") - (token in ")]}⟩") if len(token) == 1 else 0
        if token[0] in "'." and len(token) > 1 and token.strip("."):
            return _Token(token, is_word=True)
        if token[0].isalpha():
            return self._name(token, before)
        if token[0].isdigit():
            return _Token(_number(token))
        if token in ",;":
            is_end = self.depth == 0
            return _Token(token, breaks_after=is_end)
        breaks = self.depth == 0 and token in _BREAKS
        return _Token(_tex(token), breaks_before=breaks)

    def _name(self, name: str, before: str) -> _Token:
        if name == "in" and re.match(r" [{\[]| V\b", self.text[self.place :]):
            return _Token(r"\in ")
        if name == "a" and self._is_article():
            return _Token(name, is_word=True)
        if len(name.rstrip("0123456789")) == 1:
            index = name[1:]
            return _Token(name[0] + (f"_{{{index}}}" if index else ""))
        is_called = re.match(_CALLS, self._rest()) is not None
        if name in ("sum", "prod") and is_called:
            return _Token(rf"\{name} ")
        is_symbol = name in _GREEK or name in _SYMBOLS
        if _is_known(name) and (is_symbol or is_called or not (self.in_words or self._goes_on_in_words())):
            return _Token(_tex(name))
        if re.fullmatch(r"d[A-Za-z]", name) and name != "do":
            return _Token(f"d{name[1]}")
        is_opened = before in tuple("([{|") or self._stands_behind(", ", name)
        is_enclosed = is_opened and self._rest()[:1] in tuple(")]}|,")
        is_size = "_" in name and (self.depth > 0 or not self.in_words)
        is_enclosed = (is_enclosed and self.depth > 0) or self._follows("|")
        if is_called or is_enclosed or is_size or re.match(r"_[A-Za-z0-9(]{1,2}(?![A-Za-z0-9])", self._rest()):
            return _Token(rf"\mathrm{{{_escaped(name)}}}")
        return _Token(name, is_word=True)

    def _stands_behind(self, mark: str, name: str) -> bool:
        return self.text[: self.place - len(name)].endswith(mark)

    def _is_article(self) -> bool:
        """Whether an `a` stands before a word, as in `a constant a row`."""
        return self.in_words or self._goes_on_in_words()

    def _goes_on_in_words(self) -> bool:
        following = re.match(r" ([a-z]{2,})(?![\w(\[_])", self._rest())
        return following is not None and not _is_known(following[1])

    def _begins_a_remark(self) -> bool:
        """Whether the bracket that was just read opens words: `(the query itself)`."""
        following = re.match(r"([A-Za-z]{3,}(?:_[a-z]{3,})*)(?=[ ),;])", self._rest())
        return following is not None and not _is_known(following[1])

    def _script(self) -> str:
        """Read what stands behind `_` or `^`."""
        if self._rest()[:1] in ("(", "{"):
            return self._group()
        found = _SCRIPT.match(self.text, self.place)
        if found is None:
            return ""
        self.place = found.end()
        parts = re.split(r"(\.\.|[+-]|<=?|>=?)", found[0])
        told = "".join(_part_of_script(part) for part in parts if part)
        if self._follows("_") and (rest := _SCRIPT.match(self.text, self.place + 1)):
            self.place = rest.end()
            told += r"\," + _part_of_script(rest[0])
        return told

    def _group(self) -> str:
        """Read up to the bracket that closes the one that stands here, and return what is in it."""
        depth, start = 0, self.place
        for at in range(start, len(self.text)):
            depth += (self.text[at] in "([{") - (self.text[at] in ")]}")
            if depth == 0:
                self.place = at + 1
                inside = _Reader(self.text[start + 1 : at])
                return "".join(rf"\mathrm{{{t.text}}}" if t.is_word else t.text for t in inside.tokens())
        raise ValueError(f"{self.text!r}: a bracket is not closed")

    def _rest(self) -> str:
        return self.text[self.place :]

    def _follows(self, mark: str) -> bool:
        return self._rest().startswith(mark)


def _part_of_script(part: str) -> str:
    if part in _SYMBOLS and not part.isalpha():
        return _tex(part)
    if part.isalpha() and (len(part) > 2 or part in ("no", "in")) and part not in (*_GREEK, "inf"):
        return rf"\mathrm{{{part}}}"
    if found := re.fullmatch(r"([A-Za-z]{3,})(\d+)", part):
        return rf"\mathrm{{{found[0]}}}"
    return _tex(part) if part in _GREEK else part


def _is_known(name: str) -> bool:
    return name in _GREEK or name in _SYMBOLS or name in _UPRIGHT


def _tex(token: str) -> str:
    if token in _GREEK:
        return "\\" + token.replace("eps", "varepsilon") + " "
    if token in _UPRIGHT:
        return rf"\mathrm{{{token}}}"
    if token in "⟨⟩∂":
        return {"⟨": r"\langle ", "⟩": r"\rangle ", "∂": r"\partial "}[token]
    told = _SYMBOLS.get(token, _escaped(token))
    return told + " " if told[-1:].isalpha() and told[0] == "\\" else told


def _number(word: str) -> str:
    """Return a number, in powers of ten where it is written so: `6e4`, `1e-3`."""
    factor, _, power = word.partition("e")
    if not power:
        return word
    return (f"{factor}\\cdot " if factor != "1" else "") + f"10^{{{power}}}"


def _escaped(text: str) -> str:
    return re.sub(r"([_#%&$])", r"\\\1", text).replace(" ", r"\ ")
