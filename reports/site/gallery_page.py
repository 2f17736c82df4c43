"""Published results as pages: the Markdown of `reports/gallery/`, which other commands made, fitted to the site."""

from __future__ import annotations

import re

_RULE = re.compile(r"^\|?[\s:|-]+\|[\s:|-]*$")


def gallery_page(text: str, *, is_large: bool) -> str:
    """Return a file of the gallery as a page of the site: the same words, the columns of tables without padding.

    Args:
        text: Markdown.
        is_large: whether it is left out of the search, which would find little else.
    """
    head = "---\nhide: [navigation]\n" + ("search:\n  exclude: true\n" if is_large else "") + "---\n\n"
    lines = [_unpadded(line) if line.startswith("|") else line for line in text.splitlines()]
    told = "\n".join(lines)
    return f'{head}<div class="wide" markdown>\n\n{told}\n\n</div>\n' if "\n|" in text else f"{head}{told}\n"


def lead(text: str) -> str:
    r"""Return what a file says before its first table or section, without its title.

    >>> lead("# T\n\nOne.\nTwo.\n\n| a |\n")
    'One.\nTwo.'
    """
    body = text.split("\n", 1)[1] if text.startswith("# ") else text
    return re.split(r"^(?:\||##|```|!\[|<)", body, maxsplit=1, flags=re.MULTILINE)[0].strip()


def _unpadded(line: str) -> str:
    if _RULE.match(line):
        return re.sub(r"-{4,}", "---", line)
    return re.sub(r" {2,}", " ", line)
