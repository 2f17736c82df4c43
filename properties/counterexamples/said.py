"""Whether the sentence on a cause says what is done wrongly, or where alone."""

from __future__ import annotations

import re

_PLACE = re.compile(
    r"\.py:\d|its place in the batch|^influence from \d|^no influence from|in the forward of|sees keys that"
    r"|no bias, or one number|lost or hidden|is no rotation by|comes out [0-9.]+ times|^it begins with|^fails wherever"
    r"|or the kept keys and values themselves|what it keeps of those before, or|is not the derivative"
    r"|does not give the derivative|^right up to|^wrong (at|from)|^influence from|positions of later chunks are not"
    r"|give other numbers than by themselves|more than once, or misses|^the loss is wrong for|^what the mask hides"
    r"|^a fast path is taken"
)
"""Of what tells where, or that, something goes wrong, and not what is done there."""
_SAID = re.compile(r"diagonal is off by one")
"""What says so before a place is told."""


def says_what_is_wrong(cause: str) -> bool:
    """Whether a cause says more than where, or that, something goes wrong."""
    return bool(cause) and bool(_SAID.search(cause) or not _PLACE.search(cause))
