"""Where the subjects of a table come from: libraries, modules, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MANY = {"library": "libraries", "module": "modules", "file": "files"}


def place_of(target: str) -> str:
    """Return the library, module or file of a target; "" of a subject that was made where it was judged.

    >>> place_of("torch:softmax"), place_of("C:/models/gpt.py:GPT"), place_of("gpt.py"), place_of("")
    ('torch', 'C:/models/gpt.py', 'gpt.py', '')
    """
    place = target.rpartition(":")[0]
    return target if target.endswith(".py") else place if place.endswith(".py") else target.partition(":")[0]


def counted(places: Iterable[str]) -> str:
    """Return how many libraries, modules and files there are, in words.

    >>> counted(["torch", "gpt.py", "torch", "models/bert.py"])
    '1 library and 2 files'
    >>> counted(["my.models"]), counted([""])
    ('1 module', '')
    """
    kinds = Counter(_sort(place) for place in {*places} if place)
    return _listed([many(kinds[kind], kind, word) for kind, word in _MANY.items() if kinds[kind]])


def sorts(places: Iterable[str]) -> str:
    """Return what sorts of places there are, in words; models where none is known.

    >>> sorts(["torch", "gpt.py"]), sorts([""])
    ('libraries and files', 'models')
    """
    found = {_sort(place) for place in places if place}
    return _listed([word for kind, word in _MANY.items() if kind in found]) or "models"


def many(count: int, one: str, several: str = "") -> str:
    """Return a count and its noun.

    >>> many(1, "model"), many(2, "library", "libraries")
    ('1 model', '2 libraries')
    """
    return f"{count} {one if count == 1 else several or one + 's'}"


def _sort(place: str) -> str:
    return "file" if place.endswith(".py") else "module" if "." in place else "library"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
