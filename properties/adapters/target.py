"""A target taken apart: which library, module or file it names, what in it, and which of several subjects."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from veriformer.properties.adapters.libraries import LIBRARIES

LIBRARY, MODULE, FILE = "library", "module", "file"
_ONE_OF_SEVERAL = re.compile(r"(?P<attribute>.*)\[(?P<index>\d{1,9})\]", re.DOTALL)


class TargetError(Exception):
    """A target that gives no subject; says which and why in one sentence.

    Attributes:
        is_usage: whether the word itself is wrong (no such file, attribute or name), rather than what it leads to.
    """

    def __init__(self, why: str, *, is_usage: bool = False) -> None:
        super().__init__(why)
        self.is_usage = is_usage


def is_a_file_alone(word: str) -> bool:
    """Whether a word names a file and nothing in it.

    >>> is_a_file_alone("mygpt.py"), is_a_file_alone("mygpt.py:GPT")
    (True, False)
    """
    target = Target.parse(word)
    return target.kind == FILE and not target.attribute


@dataclass(frozen=True)
class Target:
    """What a word names. Whoever looks into a target asks this, so that what is trusted is what is loaded.

    Attributes:
        kind: "library", "module" or "file".
        place: name of the library or module, or path of the file.
        attribute: what in it; for a library the name of one subject, or "" for all; for a file "" for what is there.
        index: which of the subjects that the attribute gives, or None for all.
    """

    kind: str
    place: str
    attribute: str
    index: int | None = None

    @classmethod
    def parse(cls, word: str) -> Target:
        """Take a word apart.

        >>> Target.parse("models.py:several[2]")
        Target(kind='file', place='models.py', attribute='several', index=2)
        >>> Target.parse("torch:/../x.py:mine")  # a name that torch does not have, and no file
        Target(kind='library', place='torch', attribute='/../x.py:mine', index=None)

        Raises:
            TargetError: it is no library, and names no place before a colon.
        """
        library, _, name = word.partition(":")
        if library in LIBRARIES:
            return cls(LIBRARY, library, name)
        place, _, attribute = word.rpartition(":")
        if not place and word.endswith(".py"):
            return cls(FILE, word, "")  # what in it is found out
        if not place:
            raise TargetError(
                f"{word!r} is no target; give package.module:attribute, path/file.py:attribute, "
                f"or one of {', '.join(LIBRARIES)}",
                is_usage=True,
            )
        index = None
        if one := _ONE_OF_SEVERAL.fullmatch(attribute):
            attribute, index = one["attribute"], int(one["index"])
        return cls(FILE if place.endswith(".py") else MODULE, place, attribute, index)

    @classmethod
    def of_record(cls, record: object) -> Target:
        """Return the target that `to_record` made a record of: data, which is held against what loading would read.

        Raises:
            TargetError: it is no record of a target, or its word would be read as another one.
        """
        try:
            if not isinstance(record, dict) or set(record) != set(cls.__dataclass_fields__):
                raise TypeError("it must have a kind, a place, an attribute and an index")
            target = cls(**record)
            if cls.parse(str(target)) == target and type(target.index) in (int, type(None)):
                return target
            raise TypeError(f"{target.kind} is not what {str(target)!r} names")
        except (TypeError, ValueError) as problem:
            raise TargetError(f"the record names no target: {problem}", is_usage=True) from None

    def to_record(self) -> dict[str, str | int | None]:
        """Return its parts, for a file."""
        return asdict(self)

    def __str__(self) -> str:
        """Give the word back."""
        word = f"{self.place}:{self.attribute}" if self.attribute or self.kind != LIBRARY else self.place
        return word if self.index is None else f"{word}[{self.index}]"
