"""The causal flag of an attention kernel: which keys it hides, whatever the numbers of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.engine.attending import Attending
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds

_PLAIN = (excludes_fact("sink"), excludes_fact("query_key_norm"), excludes_fact("window"))


def _bottom_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _top_left(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


@holds(
    "causality.alignment",
    statement="Where queries and keys differ in number the causal mask is aligned to the last key.",
    formula="query t of T sees keys 0 .. t + S - T",
    source="Cached decoding: the newest query has seen every key; the other alignment hides all but the first.",
    kinds=("attention",),
    level="extended",
    unless=(*_PLAIN, lambda s: None if s.accepts("causal") else "the subject takes no causal flag"),
    catches=("CM07", "CM08"),
)
def the_last_query_sees_all_keys(case: Case) -> None:
    """Applies to attention with a causal flag. PyTorch's is_causal is documented to align to the top left, which is a
    convention of that primitive; a subject that declares causal_alignment='top-left' is held to that.
    """
    drawn = Attending(case)
    aligned = _top_left if case.subject.fact("causal_alignment") == "top-left" else _bottom_right
    few = min(max(1, drawn.query.shape[2] - 1), drawn.key.shape[2])
    for keys in (drawn.key.shape[2], few):
        key, value = drawn.key[:, :, :keys], drawn.value[:, :, :keys]
        allow = aligned(drawn.query.shape[2], keys).to(key.device)
        seeing = allow.any(dim=-1)  # of queries that see no key attention.empty-row speaks
        expected = drawn.oracle(key=key, value=value, allow=allow)[:, :, seeing]
        bound = drawn.bound(key=key, value=value)[:, :, seeing]
        for path in case.paths(masks=("none",)):
            try:
                got = drawn(key=key, value=value, causal=True, path=path)
            except SubjectError:
                if keys != few:
                    raise
                break  # a kernel may refuse more queries than keys
            case.close(
                got[:, :, seeing],
                expected,
                f"with {len(allow)} queries and {keys} keys the causal mask is not aligned to the last key"
                if aligned is _bottom_right
                else f"with {len(allow)} queries and {keys} keys the causal mask is not aligned as declared",
                bound=bound,
                asks=("causal_alignment", "top-left"),
                cause=lambda got=got, key=key, value=value, allow=allow: attention_cause(
                    got, drawn.query, key, value, drawn.scale, allow[None, None]
                ),  # type: ignore[misc]
            )
    _behind_a_block(case, drawn)
    case.witness()


def _behind_a_block(case: Case, drawn: Attending) -> None:
    """With as many queries as keys there is one alignment; lengths one block of a kernel and more."""
    length, (heads, width) = case.choice("far", (12, 19, 35, 67)), drawn.query.shape[1::2]
    query, key, value = (case.normal(1, heads, length, width, dtype=drawn.query.dtype) for _ in range(3))
    try:
        got = drawn(query, key, value, causal=True)
    except SubjectError:
        return  # a kernel of short sequences
    allow = causal_region(length).to(got.device)
    case.close(
        got,
        drawn.oracle(query, key, value, allow=allow),
        f"with {length} queries and as many keys causal=True does not hide just the later keys",
        bound=drawn.bound(query, key, value),
        cause=lambda: attention_cause(got, query, key, value, drawn.scale, allow[None, None]),
    )
