"""Attention under masks: a masked key is as good as removed, an empty row harms nobody, all kernels agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.definitions.attention import attention_oracle, stored_attention_bound
from veriformer.properties.definitions.differences import worst_difference
from veriformer.properties.engine.attending import Attending, hides_keys_alone
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_mask, needs_part, sees_every_key
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.families.attention_module_masks import masked_keys_of_modules_are_gone
from veriformer.properties.subject.paths import Path
from veriformer.properties.subject.subject import Subject

_PAPER = "Vaswani et al. 2017, section 3.2.3."
_PLAIN = (excludes_fact("sink"), excludes_fact("query_key_norm"))


def _takes_some_mask(subject: Subject) -> str | None:
    if subject.kind == "attention" and subject.takes_mask("padding"):
        return None  # `[B, S]`
    return needs_mask("pairwise" if subject.kind == "attention" else "padding")(subject)


@holds(
    "attention.masked-equals-removed",
    statement="Masking keys equals deleting them, and nothing flows back through them.",
    formula="A(q, k, v, mask) = A(q, k_visible, v_visible); dA/dk_masked = dA/dv_masked = 0",
    source=_PAPER,
    kinds=("attention", "self_attention", "cross_attention"),
    unless=(_takes_some_mask, sees_every_key),
    sweeps_lengths=True,
    catches=("CM10", "CM11", "CM13", "CM14", "PM07", "PM13", "PM14", "PM17"),
)
def masked_keys_are_gone(case: Case) -> None:
    """exp(-inf) = 0, in the sum and in its derivative. Masked keys and values are loud (1000 times) half of the
    time, since a constant that is merely small lets them through; boolean and additive masks agree.
    """
    if case.subject.kind != "attention":
        masked_keys_of_modules_are_gone(case)
        return
    drawn = Attending(case)
    keys = drawn.key.shape[2]
    visible = torch.rand(keys, generator=case.generator) < 0.6
    visible[case.integer("kept", 0, keys - 1)] = True
    if bool(visible.all()):
        visible[(case.choices["kept"] + 1) % keys] = False
    loud = case.choice("loud", (1000.0, 1.0))
    hidden = ~visible.to(drawn.key.device)
    key = torch.where(hidden[:, None], drawn.key * loud, drawn.key)
    value = torch.where(hidden[:, None], drawn.value * loud, drawn.value)
    kept_key, kept_value = key[:, :, ~hidden], value[:, :, ~hidden]
    expected = (
        drawn.oracle(key=kept_key, value=kept_value) if _is_plain(case.subject) else drawn(None, kept_key, kept_value)
    )
    bound = drawn.bound(key=kept_key, value=kept_value)
    for name, mask in _forms(case, drawn, ~hidden):
        for path in case.paths(masks=("none",)):
            got = drawn(key=key, value=value, mask=mask, path=path)
            case.close(
                got,
                expected,
                f"masking keys ({name} mask) is not the same as deleting them",
                bound=bound,
                cause=lambda got=got: attention_cause(  # type: ignore[misc]
                    got, drawn.query, key, value, drawn.scale, (~hidden).expand(1, 1, drawn.query.shape[2], keys)
                ),
            )
        _no_gradient_through(case, drawn, key, value, mask, hidden, name)
    case.witness()


def _is_plain(subject: Subject) -> bool:
    return all(reason(subject) is None for reason in _PLAIN)


def _forms(case: Case, drawn: Attending, visible: Tensor) -> list[tuple[str, Tensor]]:
    """Return the same mask in every form that the subject takes, `[1, 1, T, S]`."""
    queries = drawn.query.shape[2]
    allow = visible.expand(1, 1, queries, len(visible)).contiguous()
    forms = [("boolean", allow)]
    if case.subject.takes_mask("additive"):
        zeros = torch.zeros(allow.shape, dtype=drawn.query.dtype, device=allow.device)
        forms.append(("additive -inf", zeros.masked_fill(~allow, -torch.inf)))
        forms.append(("additive finfo.min", zeros.masked_fill(~allow, torch.finfo(drawn.query.dtype).min)))
    return forms


def _no_gradient_through(
    case: Case, drawn: Attending, key: Tensor, value: Tensor, mask: Tensor, hidden: Tensor, name: str
) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in (key, value)]
    output = drawn(key=leaves[0], value=leaves[1], mask=mask)
    if not output.requires_grad:
        return
    for part, gradient in zip(("key", "value"), torch.autograd.grad(output.square().sum(), leaves), strict=True):
        through = gradient[:, :, hidden]
        case.exact(through, torch.zeros_like(through), f"the gradient of a masked {part} is not 0 ({name} mask)")


@holds(
    "attention.mask-semantics",
    statement="Each query attends to the keys that its row of the mask allows; masks combine.",
    formula="o_t = sum_{s: m_ts} softmax_s(...) v_s; causal and explicit mask: both must allow",
    source=_PAPER,
    kinds=("attention",),
    unless=(*_PLAIN, _takes_some_mask, sees_every_key),
    sweeps_lengths=True,
    catches=("CM02", "CM07", "CM10", "CM13", "CM14", "CM17", "CM20"),
)
def rows_follow_their_mask(case: Case) -> None:
    """Against the float64 definition under a random pairwise mask, in every form that the subject takes, and together
    with causal=True where it takes that too.
    """
    drawn = Attending(case)
    allow = drawn.drawn_mask()
    zeros = torch.zeros(allow.shape, dtype=drawn.query.dtype, device=allow.device)
    forms = [("boolean", allow)]
    if case.subject.takes_mask("additive"):
        forms.append(("additive", zeros.masked_fill(~allow, -torch.inf)))
        _biases_are_added(case, drawn, allow)
    expected, bound = drawn.oracle(allow=allow), drawn.bound()
    for name, mask in forms:
        for path in case.paths(masks=("none",)):
            got = drawn(mask=mask, path=path)
            case.close(
                got,
                expected,
                f"the output under a {name} mask is not that of the keys it allows",
                bound=bound,
                cause=lambda got=got: attention_cause(  # type: ignore[misc]
                    got, drawn.query, drawn.key, drawn.value, drawn.scale, allow
                ),
            )
    _as_many_samples_as_queries(case, drawn)
    same = min(drawn.query.shape[2], drawn.key.shape[2])  # as many queries as keys: no question of alignment
    if case.subject.accepts("causal") and same > 1:
        query, key, value = (t[:, :, :same] for t in (drawn.query, drawn.key, drawn.value))
        allow = allow[..., :same, :same].contiguous()
        both = allow & causal_region(same).to(allow.device)
        try:
            got = drawn(query, key, value, mask=allow, causal=True)
        except SubjectError:
            case.witness()  # to refuse both together is a clear answer
            return
        rows = both.expand(*query.shape[:3], -1).any(dim=-1)
        if not bool(rows.any()):
            case.reject("mask and causality together hide everything")
        case.close(
            got[rows],
            drawn.oracle(query, key, value, allow=both)[rows],
            "a mask together with causal=True is not both of them",
            bound=drawn.bound(query, key, value).expand(got.shape)[rows],
            cause=lambda: _one_of_two(case, drawn, got, (query, key, value), allow),
        )
    case.witness()


def _as_many_samples_as_queries(case: Case, drawn: Attending) -> None:
    """Call with a batch in which a mask of keys `[B, S]` has the shape of one of pairs `[T, S]`."""
    _, heads, queries, width = drawn.query.shape
    if not hides_keys_alone(case.subject) or queries < 2:
        return
    count, keys, dtype = min(queries, 5), drawn.key.shape[2], drawn.query.dtype
    query = case.normal(count, heads, count, width, dtype=dtype)
    key, value = (case.normal(count, heads, keys, width, dtype=dtype) for _ in range(2))
    allow = torch.rand(count, 1, 1, keys, generator=case.generator) < 0.6
    allow[torch.arange(count), 0, 0, torch.arange(count) % keys] = True
    allow = allow.expand(-1, -1, count, -1).contiguous().to(query.device)
    case.close(
        drawn(query, key, value, mask=allow),
        drawn.oracle(query, key, value, allow=allow),
        "with as many samples as queries the output is not that of the keys that each sample's mask allows",
        bound=drawn.bound(query, key, value),
        cause=lambda: "a mask [B, S] of keys is taken for one [T, S] of pairs where B is T",
    )


def _biases_are_added(case: Case, drawn: Attending, allow: Tensor) -> None:
    """Numbers of an additive mask stand beside the scaled scores, as they are."""
    bias = case.normal(*allow.shape, dtype=drawn.query.dtype)
    soft_cap = case.subject.fact("soft_cap")
    told = (drawn.query, drawn.key, drawn.value)
    expected = attention_oracle(*told, scale=drawn.scale, bias=bias, soft_cap=soft_cap).to(bias.device)
    got = drawn(mask=bias)

    def cause() -> str | None:
        scaled = attention_oracle(*told, scale=drawn.scale, bias=bias * drawn.scale, soft_cap=soft_cap).to(bias.device)
        shrunk = worst_difference(got, scaled, drawn.bound()).error <= 1
        return "the mask is added before the scores are scaled: its numbers are scaled too" if shrunk else None

    case.close(
        got, expected, "a finite additive mask is not added to the scaled scores", bound=2 * drawn.bound(), cause=cause
    )


def _one_of_two(case: Case, drawn: Attending, got: Tensor, inputs: tuple[Tensor, ...], allow: Tensor) -> str | None:
    """Tell which of a mask and the causal flag is forgotten where both are given."""
    flag = causal_region(allow.shape[-1]).to(allow.device)
    for words, seen in (("the mask is forgotten", flag[None, None]), ("the flag is forgotten", allow)):
        expected = drawn.oracle(*inputs, allow=seen)
        rows = seen.expand(*got.shape[:3], -1).any(dim=-1)
        if worst_difference(got[rows], expected[rows], drawn.bound(*inputs).expand(got.shape)[rows]).error <= 1:
            return f"where causal=True is given, {words}" if "mask" in words else f"where a mask is given, {words}"
    return None


@holds(
    "attention.empty-row",
    statement="A query that may attend to no key gives finite outputs and gradients, and harms no other.",
    formula="mask_t = 0  =>  |o_t|, |dq|, |dk|, |dv| < inf",
    source="PyTorch issue 41508: softmax over an empty set is 0/0.",
    kinds=("attention", "self_attention", "cross_attention"),
    unless=(_takes_some_mask, sees_every_key),
    catches=("PM01", "PM02", "PM05"),
)
def an_empty_row_harms_nobody(case: Case) -> None:
    """What the row itself gives is a convention (zeros, the mean of all values); NaN is none: it spreads to every
    parameter at the first backward pass. Declared `empty_row` is verified; of NaN that is declared gradients are too.
    """
    if case.subject.fact("empty_row") == "error":
        _raises_on_empty_rows(case)
        return
    leaves, call, empty = _with_an_empty_row(case)
    for path in case.paths(masks=("none",)):
        output = call(path)
        others = output[~empty]
        case.finite(others, "another row became NaN because one row may attend to no key")
        if case.subject.fact("empty_row") == "nan":
            continue
        narrow = ("half_precision", False) if path.autocast else None  # a constant in place of -inf, too large for it
        case.finite(output, "a query that may attend to no key gives NaN", asks=narrow or ("empty_row", "nan"))
        if case.subject.fact("empty_row") == "zeros" and case.subject.kind == "attention":  # modules add a bias
            case.exact(
                output[empty], torch.zeros_like(output[empty]), "an empty row is declared to give zeros and does not"
            )
    case.path = str(Path(mask="padded"))
    output = call(Path())
    if output.requires_grad and case.subject.fact("empty_row") != "nan":  # 0 times NaN is NaN in every derivative
        gradients = torch.autograd.grad(output[~empty].square().sum(), leaves, allow_unused=True)
        for gradient in gradients:
            if gradient is not None:
                case.finite(gradient, "a gradient became NaN because one row may attend to no key")
    case.path = ""
    case.witness()


def _with_an_empty_row(case: Case) -> tuple[list[Tensor], Callable[[Path], Tensor], Tensor]:
    """Return leaves, a function of the path that calls the subject, and which output rows are empty."""
    if case.subject.kind == "attention":
        drawn = Attending(case)
        if hides_keys_alone(case.subject):
            case.reject("its mask hides a key from every query or from none")
        allow = drawn.drawn_mask().expand(-1, -1, drawn.query.shape[2], -1).clone()
        row = case.integer("row", 0, allow.shape[2] - 1)
        allow[:, :, row] = False
        leaves = [x.detach().clone().requires_grad_() for x in (drawn.query, drawn.key, drawn.value)]
        empty = torch.zeros(drawn.query.shape[:3], dtype=torch.bool, device=allow.device)
        empty[:, :, row] = True
        return leaves, lambda path: drawn(leaves[0], leaves[1], leaves[2], allow, path=path), empty
    stream = Stream(case, case.built(), side="source" if case.subject.kind == "cross_attention" else "target")
    x = stream.draw(3, case.length("T", low=2)).requires_grad_()
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[1] = False
    parameters = (
        [p for p in stream.built.module.parameters() if p.requires_grad] if stream.built.module is not None else []
    )
    shape = x.shape[:2] if stream.per_position else (3, 6)
    empty = torch.zeros(shape, dtype=torch.bool, device=x.device)
    empty[1] = True
    return [x, *parameters], lambda path: stream(x, mask, path=path), empty


def _raises_on_empty_rows(case: Case) -> None:
    _, call, _ = _with_an_empty_row(case)
    try:
        call(Path())
    except SubjectError:
        case.witness()
        return
    case.require(False, "an empty row is declared to raise and does not", got="an output", expected="an error")


@holds(
    "attention.backend-agreement",
    statement="Every selectable backend gives the same output.",
    formula="A_backend(q, k, v, mask) = A(q, k, v, mask)",
    source="Kernels are implementations of one function.",
    kinds=("attention", "self_attention", "cross_attention", "layer", "encoder", "decoder"),
    level="extended",
    unless=needs_part("backends"),
    catches=("CM04", "CM08", "CM16", "BK04", "XA05"),
)
def backends_agree(case: Case) -> None:
    """On no mask, a boolean mask, a padding mask and the causal flag, as far as the subject takes them. A backend that
    raises on a mask does not support it; that is a clear answer.
    """
    if case.subject.kind == "attention":
        drawn = Attending(case)
        allow = drawn.drawn_mask()
        square = drawn.query.shape[2] == drawn.key.shape[2]
        ways = [("no mask", lambda path: drawn(path=path))]
        if case.subject.takes_mask("pairwise"):
            ways.append(("a boolean mask", lambda path: drawn(mask=allow, path=path)))
        if case.subject.accepts("causal") and square:
            ways.append(("the causal flag", lambda path: drawn(causal=True, path=path)))
        bound: Tensor | None = drawn.bound()
        compared = _in_half_precision(case)
    else:
        stream = Stream(case, case.built())
        x = stream.draw(2, case.length("T", low=2))
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[1, 1:] = False
        ways = [("no mask", lambda path: stream(x, path=path))]
        if case.subject.takes_mask("padding") and case.subject.kind != "cross_attention":
            ways.append(("a padding mask", lambda path: stream(x, mask, path=path)[mask]))
        bound, compared = None, 0
    for name, way in ways:
        expected = way(Path())
        for backend in case.subject.backends:
            case.path = str(Path(backend=backend))
            try:
                got = way(Path(backend=backend))
            except SubjectError:
                continue
            compared += 1
            case.close(
                got, expected, f"backend {backend!r} gives another output than the default with {name}", bound=bound
            )
    case.path = ""
    if compared:
        case.witness()


def _in_half_precision(case: Case) -> int:
    """Hold each backend to the definition in bfloat16 and float16, for which most fused kernels are; how many took it.

    Heads of 64 channels: kernels ask for multiples of 8.
    """
    if case.subject.fact("half_precision") is False:
        return 0
    compared = 0
    for dtype in (torch.bfloat16, torch.float16):
        drawn = Attending(case, d_head=64, dtype=dtype)
        ways: list[tuple[str, Tensor | None, bool]] = [("no mask", None, False)]
        if case.subject.accepts("causal") and drawn.query.shape[2] == drawn.key.shape[2]:
            ways.append(("the causal flag", causal_region(drawn.query.shape[2]), True))
        for name, allow, flag in ways:
            expected = drawn.oracle(allow=allow)
            for backend in case.subject.backends:
                case.path = str(Path(backend=backend))
                try:
                    got = drawn(causal=flag, path=Path(backend=backend))
                except SubjectError:
                    continue
                compared += 1
                case.close(
                    got.double(), expected.double(),
                    f"backend {backend!r} in {str(dtype).removeprefix('torch.')} is not the definition with {name}",
                    bound=2 * stored_attention_bound(drawn.query, drawn.key, drawn.value, drawn.scale),
                    asks=("half_precision", False),
                )  # fmt: skip
    return compared
