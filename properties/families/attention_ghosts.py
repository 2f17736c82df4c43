"""Tokens by themselves give no weight to keys that stand for no token; part of `attention.attends`."""

from __future__ import annotations

from veriformer.properties.diagnosis.attention.ghosts import doubled_keys, ghosts_told, weight_of_ghosts
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream


def no_key_without_token(case: Case, stream: Stream) -> None:
    """Require that a token by itself gives no weight to keys that stand for no token, unless a sink is declared."""
    if case.subject.fact("sink") or case.subject.fact("structure") == "other":
        return
    ghosts = case.apply(weight_of_ghosts, case, stream)
    case.require(
        ghosts is None,
        "a token by itself gives weight to keys that stand for no token",
        got=f"a weight of {ghosts[0]:.3g} on {ghosts[1]} keys of one score whatever the token is" if ghosts else "none",
        expected="all weight on the token itself",
        cause=lambda: ghosts_told(ghosts),
        asks=("sink", True),
    )
    times = case.apply(doubled_keys, case, stream)
    case.equal(
        times,
        1,
        "a token by itself is seen several times: it stands in the keys more than once",
        got=f"{times} keys of one token",
        expected="one key",
        cause=lambda: (
            "a token that is put before or behind the others besides (a sink, a global token, the edge of a window) "
            "is not taken out of its usual place, and gets several times its weight"
        ),
        asks=("structure", "other"),
    )
