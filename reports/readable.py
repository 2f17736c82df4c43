"""Text of strangers at the border: names, messages, exceptions and files become words, whatever they hold.

A record is cleaned once, where it comes in (`cleaned`); what goes out to a terminal passes `readable` on top of that.
HTML is escaped by its templates, XML by its writer; Markdown, which both would read, by `in_markdown` and `as_code`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # to a terminal: colours, titles, the cursor
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # that turn the direction of what follows
    "\u2028\u2029\ufeff\ufffe\uffff"  # lines within a line, marks of byte order
    "\ud800-\udfff]"  # halves of characters, which no encoding has
)
_ENDS = re.compile(r"[\t\r\n]")
_VERBATIM = ("script", "choices")
"""Fields of records that are programs or data, not words: they are cleaned where they are shown."""

_LONGEST = 200  # letters of a name: two lines of a terminal


def readable(text: str) -> str:
    r"""Return a text with every control character spelled; ends of lines and tabs stay.

    >>> readable("\x1b[31mred\n")
    '\\x1b[31mred\n'
    """
    return _COMMANDS.sub(_spelled, text)


def one_line(text: str) -> str:
    r"""Return a text in one line, with every control character spelled.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return _ENDS.sub(_spelled, readable(text))


def as_name(text: str) -> str:
    """Return a text as a name: one line, of which the middle is left out where it has more letters than anybody reads.

    >>> as_name("a" * 10**6)[:3], as_name("a" * 10**6)[-25:]
    ('aaa', 'aaaaaaa (1000000 letters)')
    """
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[:120]}...{text[-40:]} ({len(text)} letters)"


_FORMS = {"printed": readable, "name": as_name}
"""Fields of records whose words stand in lines, or are a name."""


def _spelled(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def cleaned(record: Any) -> Any:
    r"""Return a record with every word of it in one readable line, but for what is no word, or stands in lines.

    Args:
        record: JSON data of any depth that Python recurses to.

    >>> cleaned({"name": "a\nb", "printed": {"text": "\x1b[31mred\n"}})
    {'name': 'a\\nb', 'printed': {'text': '\\x1b[31mred\n'}}
    """
    return _cleaned(record, one_line)


def _cleaned(record: Any, words: Callable[[str], str]) -> Any:
    if isinstance(record, str):
        return words(record)
    if isinstance(record, dict):
        return {
            _cleaned(k, one_line): v if k in _VERBATIM else _cleaned(v, _FORMS.get(k, words)) for k, v in record.items()
        }
    if isinstance(record, list | tuple):
        return [_cleaned(v, words) for v in record]
    return record


def in_markdown(text: str) -> str:
    r"""Return a text as Markdown that shows it: no markup, no image, no link, no end of a table's cell.

    >>> in_markdown("<b> ![x](y) | z < 3")
    '&lt;b> ![x]\\(y) \\| z < 3'
    """
    text = re.sub(r"&(?=#?\w+;)", "&amp;", one_line(text))
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)  # what begins no tag stays as it is
    return text.replace("](", "]\\(").replace("|", "\\|")


def as_code(text: str) -> str:
    """Return a text as code in a line of Markdown.

    >>> as_code("m.py:mine"), as_code("<script>`")
    ('`m.py:mine`', '<code>&lt;script&gt;&#96;</code>')
    """
    text = one_line(text)
    if not re.search(r"[<>&`|\\]", text):
        return f"`{text}`"
    escaped = re.sub(r"[`|*_\[\]\\]", lambda found: f"&#{ord(found[0])};", html.escape(text, quote=False))
    return f"<code>{escaped}</code>"


def in_a_sheet(text: str) -> str:
    """Return a text as a cell that no spreadsheet takes for a formula.

    >>> in_a_sheet("=1+1"), in_a_sheet("mine")
    ("'=1+1", 'mine')
    """
    text = one_line(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
