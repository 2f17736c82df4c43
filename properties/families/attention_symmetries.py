"""Attention: what it does not notice (orders, shifts, rotations, repetitions), and its two limits."""

from __future__ import annotations

import torch

from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.engine.attending import Attending
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, sees_every_key
from veriformer.properties.engine.property import holds

_KIND = ("attention",)
_BY_DOT_PRODUCT = (excludes_fact("query_key_norm"), excludes_fact("soft_cap"), excludes_fact("sink"))


@holds(
    "attention.key-value-permutation",
    statement="Permuting keys and values together changes nothing; permuting queries permutes the outputs.",
    formula="A(q, P k, P v) = A(q, k, v); A(P q, k, v) = P A(q, k, v)",
    source="Course notes, chapter 10, section 4.1: attention sees a set.",
    kinds=_KIND,
    unless=sees_every_key,
    catches=("SM01", "HD01", "HD02"),
)
def keys_are_a_set(case: Case) -> None:
    """The sum over keys has no order. A mask permutes along."""
    drawn = Attending(case)
    keys, queries = drawn.key.shape[2], drawn.query.shape[2]
    order = case.permutation("keys", keys)
    if order == sorted(order):
        order = order[1:] + order[:1]
    allow = drawn.drawn_mask() if case.subject.takes_mask("pairwise") and case.flag("masked") else None
    for path in case.paths(masks=("none",)):
        got = drawn(
            key=drawn.key[:, :, order],
            value=drawn.value[:, :, order],
            mask=None if allow is None else allow[..., order],
            path=path,
        )
        case.close(
            got,
            drawn(mask=allow, path=path),
            "permuting keys and values together changes the output",
            bound=drawn.bound(),
        )
    turned = case.permutation("queries", queries)
    got = drawn(query=drawn.query[:, :, turned], mask=None if allow is None else allow[:, :, turned])
    case.close(
        got, drawn(mask=allow)[:, :, turned], "permuting the queries does not permute the outputs", bound=drawn.bound()
    )
    case.witness()


@holds(
    "attention.key-shift",
    statement="Adding one constant vector to all keys changes nothing.",
    formula="A(q, k + c, v) = A(q, k, v)",
    source="<q, k_s + c> = <q, k_s> + <q, c>: a shift of a row of scores, which softmax cancels.",
    kinds=_KIND,
    unless=(*_BY_DOT_PRODUCT, sees_every_key),
    catches=("SM01", "CM14"),
)
def a_common_key_shift_cancels(case: Case) -> None:
    """Fails for a softmax over queries, whose columns are shifted by different amounts."""
    drawn = Attending(case)
    shift = case.normal(*drawn.key.shape[:2], 1, drawn.key.shape[-1], dtype=drawn.key.dtype, scale=3.0)
    shifted = drawn.key + shift
    # k + c is rounded: one u of the larger key in every term of a score, which the bound of shifted keys contains
    bound = drawn.bound(key=shifted) + drawn.bound()
    case.close(drawn(key=shifted), drawn(), "adding one vector to all keys changes the output", bound=2 * bound)
    case.witness()


@holds(
    "attention.orthogonal-gauge",
    statement="Rotating queries and keys by one orthogonal matrix changes nothing.",
    formula="A(q R, k R, v) = A(q, k, v), R R^T = I",
    source="<q R, k R> = <q, k>: scores are inner products.",
    kinds=_KIND,
    level="extended",
    unless=excludes_fact("query_key_norm"),
    catches=("SC04", "attention-cosine"),
)
def scores_are_inner_products(case: Case) -> None:
    """R is drawn uniformly (QR of a normal matrix). A score that is not an inner product (a distance, a sum of
    absolute values) notices.
    """
    drawn = Attending(case)
    width, dtype = drawn.key.shape[-1], drawn.key.dtype
    rotation = torch.linalg.qr(case.normal(width, width, dtype=torch.float64))[0].to(dtype)
    query, key = drawn.query @ rotation, drawn.key @ rotation
    # the rotation adds a product over K to each operand; |q R| <= sqrt(K) max|q|, so the bound grows at most by that
    growth = 1 + rounding_bound(dtype, width) / epsilon(dtype)
    case.close(
        drawn(query=query, key=key),
        drawn(),
        "rotating queries and keys together changes the output",
        bound=drawn.bound(query=query, key=key) * growth,
    )
    case.witness()


@holds(
    "attention.uniform-limit",
    statement="Queries of 0 give the mean of the visible values.",
    formula="A(0, k, v) = mean_s v_s",
    source="All scores are 0, all weights equal.",
    kinds=_KIND,
    level="extended",
    unless=(excludes_fact("sink"), sees_every_key),
    catches=("SM07", "CM10", "CM14"),
)
def zero_queries_average(case: Case) -> None:
    """With a mask, the mean over visible keys alone: a mask added as 0 and 1 weighs hidden keys too."""
    drawn = Attending(case)
    allow = drawn.drawn_mask() if case.subject.takes_mask("pairwise") and case.flag("masked") else None
    zero = torch.zeros_like(drawn.query)
    shape = (*drawn.query.shape[:3], drawn.key.shape[2])
    seen = torch.ones(shape, dtype=torch.float64, device=zero.device) if allow is None else allow.expand(shape).double()
    mean = (seen / seen.sum(dim=-1, keepdim=True)) @ drawn.value.double()
    case.close(
        drawn(query=zero, mask=allow),
        mean,
        "queries of 0 do not give the mean of the visible values",
        bound=drawn.bound(query=zero),
    )
    case.witness()


@holds(
    "attention.hard-limit",
    statement="Large queries give the value of the best key.",
    formula="A(c q, k, v)_t -> v_argmax_s <q_t, k_s> as c -> infinity",
    source="Course notes, chapter 10, section 2.3.",
    kinds=_KIND,
    level="extended",
    unless=(*_BY_DOT_PRODUCT, sees_every_key),
    catches=("SM01", "SC04"),
)
def large_queries_select(case: Case) -> None:
    """Queries are multiplied by 10^4 (10^2 in float16). Rows whose two best scores lie closer than 40 after that, and
    than rounding can blur them, are left out: the second best then has a weight below e^-40.
    """
    drawn = Attending(case)
    query = drawn.query * (1e4 if drawn.query.dtype != torch.float16 else 1e2)  # float16 ends at 65504
    scores = query.double() @ drawn.key.double().transpose(-2, -1) * drawn.scale
    best = scores.topk(2, dim=-1)
    blur = scores.abs().amax(dim=-1) * query.shape[-1] * epsilon(query.dtype)  # what rounding may do to a score
    clear = best.values[..., 0] - best.values[..., 1] > 40 + blur
    if not bool(clear.any()):
        case.reject("no row has a clear winner")
    wanted = torch.gather(drawn.value, 2, best.indices[..., :1].expand(*clear.shape, drawn.value.shape[-1]))
    got = drawn(query=query)
    bound = 4 * epsilon(drawn.key.dtype) * float(drawn.value.abs().amax()) + 1e-12
    case.close(got[clear], wanted[clear], "large queries do not give the value of the best key", bound=bound)
    case.witness()


@holds(
    "attention.duplicate-keys",
    statement="Repeating every key-value pair n times changes nothing.",
    formula="A(q, [k, k], [v, v]) = A(q, k, v)",
    source="Numerator and denominator of the average both grow n-fold.",
    kinds=_KIND,
    level="extended",
    unless=(excludes_fact("sink"), sees_every_key),
    catches=("SM07", "attention-unnormalised"),
)
def repetition_changes_nothing(case: Case) -> None:
    """A normalisation by the number of keys instead of the sum of weights notices."""
    drawn = Attending(case)
    times = case.integer("n", 2, 4)
    key, value = drawn.key.repeat(1, 1, times, 1), drawn.value.repeat(1, 1, times, 1)
    case.close(
        drawn(key=key, value=value),
        drawn(),
        f"repeating every key-value pair {times} times changes the output",
        bound=drawn.bound(key=key, value=value),
    )
    case.witness()
