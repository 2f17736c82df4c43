"""Attention: the definition, the scale, and what follows for its values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import closed_form_tolerance
from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.causes.attention_modules import module_cause
from veriformer.properties.causes.influence_maps import declared_region
from veriformer.properties.definitions.attention import attention_bound, multi_head_oracle, project
from veriformer.properties.definitions.chance import squares_interval
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.attending import Attending
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_part, sees_every_key
from veriformer.properties.engine.property import holds
from veriformer.properties.subject.facts import attention_scale
from veriformer.properties.subject.subject import Subject

_PAPER = "Vaswani et al. 2017, equation 1."
_MODULES = ("self_attention", "cross_attention")
_PLAIN = (excludes_fact("sink"), excludes_fact("query_key_norm"))
_POSITION_FREE = excludes_fact("positions", "rotary", "alibi", "t5", "relative", "other", "sinusoidal", "learned")


def _readable(subject: Subject) -> str | None:
    return None if subject.kind == "attention" else needs_part("projections")(subject)


def _scale_of(case: Case, d_head: int, d_model: int) -> float:
    return attention_scale(case.subject.fact("attention_scale"), d_head, d_model)


@holds(
    "attention.definition",
    statement="The output is softmax(q k^T * scale) v.",
    formula="o_t = sum_s softmax_s(scale <q_t, k_s>) v_s, head by head",
    source=_PAPER,
    kinds=("attention", *_MODULES),
    unless=(*_PLAIN, _readable, _POSITION_FREE, sees_every_key),
    catches=("SC01", "SC02", "SC04", "SC05", "SM01", "SM02", "SM07", "HD01", "HD02", "HD08", "HD05", "BK02"),
)
def output_follows_the_definition(case: Case) -> None:
    """Compared with a float64 loop over samples and heads. h > 1 and T > 1, or head reshapes hide; sizes differ.

    For modules the oracle starts from the projection matrices. The scale is the declared one, else 1/sqrt(d_head).
    """
    if case.subject.kind == "attention":
        drawn = Attending(case)
        expected, bound = drawn.oracle(), drawn.bound()
        for path in case.paths(masks=("none",)):
            got = drawn(path=path)
            case.close(
                got,
                expected,
                "the output is not softmax(q k^T * scale) v",
                bound=bound,
                cause=lambda got=got: attention_cause(got, drawn.query, drawn.key, drawn.value, drawn.scale),  # type: ignore[misc]
            )
        _values_of_another_width(case, drawn)
        case.witness()
        return
    built = case.built()
    config, dtype = built.config, built.dtype
    parts = case.bench.call(case.subject.projections, built.module)
    x = case.normal(2, case.length("T", low=2), config.d_model, dtype=dtype)
    memory = x if case.subject.kind == "self_attention" else case.normal(2, 5, config.d_model, dtype=dtype)
    allow = declared_region(case.subject, x.shape[1]) if case.subject.fact("causal") else None
    d_head = parts["q"].shape[0] // config.num_heads
    scale = _scale_of(case, d_head, config.d_model)
    told = (config.num_heads, scale, allow, case.subject.fact("soft_cap"))
    expected = case.apply(_defined, x, memory, parts, *told)
    for path in case.paths(masks=("none",)):
        got = case.call(built, *((x,) if memory is x else (x, memory)), path=path)
        case.close(
            got,
            expected.to(got.device),
            "the output is not that of multi-head attention with these projection matrices",
            bound=case.tolerance(built) * size_of(expected),
            cause=lambda got=got: module_cause(case, built, got, x, memory, parts, scale, allow),  # type: ignore[misc]
        )
    case.witness()


def _defined(
    x: Tensor,
    memory: Tensor,
    parts: Mapping[str, Tensor],
    num_heads: int,
    scale: float,
    allow: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    return multi_head_oracle(x, memory, parts, num_heads=num_heads, scale=scale, allow=allow, soft_cap=soft_cap)


def _values_of_another_width(case: Case, drawn: Attending) -> None:
    """Values may be wider or narrower than queries and keys; a kernel that refuses that is not held to it."""
    batch, heads, keys, width = drawn.value.shape
    value = case.normal(batch, heads, keys, width + case.choice("E - K", (0, 2, -2)), dtype=drawn.value.dtype)
    if value.shape[-1] == width:
        return
    try:
        got = drawn(value=value)
    except SubjectError:
        return
    case.close(
        got,
        drawn.oracle(value=value),
        f"with values of {value.shape[-1]} channels and keys of {width} the output is not softmax(q k^T * scale) v",
        bound=drawn.bound(value=value),
        cause=lambda: _lost_channels(got, drawn.oracle(value=value), drawn.bound(value=value), width),
    )


def _lost_channels(got: Tensor, expected: Tensor, bound: Tensor, width: int) -> str | None:
    """Tell whether the channels that keys have too are right, and those beyond are not."""
    first = worst_difference(got[..., :width], expected[..., :width], bound).error <= 1
    return "channels beyond the width of the keys are lost or made up" if first and got.shape[-1] > width else None


@holds(
    "attention.score-variance",
    statement="For unit normal queries and keys the scaled score has variance scale^2 d_head: 1 with 1/sqrt(d_head).",
    formula="Var(scale <q, k>) = scale^2 d_k; Var(<q, k>) = d_k",
    source="Course notes, lecture 8, lemma 1.1; Vaswani et al. 2017, section 3.2.1, footnote 4.",
    kinds=("attention", *_MODULES),
    unless=(*_PLAIN, _readable, excludes_fact("soft_cap"), _POSITION_FREE),
    examples_factor=0.5,
    catches=("SC01", "SC02", "SC04", "SC05"),
)
def scaled_scores_have_the_declared_variance(case: Case) -> None:
    """With two keys the log-ratio of the weights is scale <q, k_0 - k_1>, so the scale is read off the outputs.

    Given the keys, sum of (log-ratio / (scale |k_0 - k_1|))^2 is chi-square with one degree of freedom a query: the
    interval has a false-alarm rate of 1e-12 an example. h >= 2, so that sqrt(d_model) is told from sqrt(d_head).
    """
    logits, dots, keys_apart, scale, precision = _two_key_logits(case)
    inside = (logits.abs() > 0.3) & (logits.abs() < 9)  # where the weights still tell the logit accurately
    if not bool(inside.any()):
        case.reject("no weight lies where it can be read")
    measured = (logits[inside] / dots[inside]).detach().median()
    # the log-ratio carries the relative error of two weights; it is at least 0.3
    limit = 2 * precision / 0.3
    error = (measured / scale - 1).abs()
    case.require(
        error <= limit,
        f"the scale read off the outputs is {measured:.6g}, declared is {scale:.6g}",
        got=f"{measured:.6g}",
        expected=f"{scale:.6g}",
        error=error,
        tolerance=limit,
        cause=lambda: _named_scale(float(measured), case, limit),
    )
    if case.subject.kind == "attention":
        _variance_is_right(case, logits.clamp(-12, 12), scale, keys_apart)
    case.witness()


def _variance_is_right(case: Case, logits: Tensor, scale: float, keys_apart: Tensor) -> None:
    count = logits.numel()
    low, high = squares_interval(0.5e-12, count)
    total = (logits / (scale * keys_apart)).square().sum()
    spread = (total - count) / (2 * count) ** 0.5
    case.bench.tally.note(float(spread.abs()), float((high - count) / (2 * count) ** 0.5))
    # logits beyond 12 were cut (float32 weights lose their digits there), which only makes the sum smaller
    variance = scale**2 * _width(case)
    case.require(
        (total <= high) & ((total >= low) | (logits.abs() == 12).any()),
        f"scaled scores have variance {total / count * variance:.4g} where {variance:.4g} is declared",
        got=f"z = {spread:.1f}",
        expected="a z within 7.1, outside of which lies one example in 10^12",
        error=spread.abs(),
        tolerance=7.1,
    )


def _width(case: Case) -> int:
    return int(case.choices.get("K", case.config().d_head))


def _named_scale(measured: float, case: Case, limit: float) -> str | None:
    heads = case.choices.get("H", case.config().num_heads)
    d_head = _width(case)
    for number, words in (
        (1.0, "1: the scores are not scaled"),
        ((heads * d_head) ** -0.5, "1/sqrt(d_model): d_model stands where d_head should"),
        (d_head**0.5, "sqrt(d_head): the scores are multiplied where they should be divided"),
        (1 / d_head, "1/d_head: the scale is applied twice"),
        (d_head**-0.5, "1/sqrt(d_head)"),
    ):
        if abs(measured / number - 1) <= limit:
            return f"the measured scale {measured:.6g} is {words}"
    return None


def _two_key_logits(case: Case) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return log-ratios of two weights, <q, k_0 - k_1>, |k_0 - k_1| (alike in shape), the scale, the precision."""
    if case.subject.kind == "attention":
        width = case.choice("K", (4, 16, 64, 128, 512))
        heads = case.choice("H", (2, 4))
        built = case.built()
        query = case.normal(1, heads, 128, width, dtype=built.dtype)
        key = case.normal(1, heads, 2, width, dtype=built.dtype)
        value = torch.zeros_like(key)
        value[:, :, 0, 0], value[:, :, 1, 1] = 1, 1
        weights = case.call(built, query, key, value)[..., :2].double()
        scale = _scale_of(case, width, width * heads)
        precision = float(attention_bound(query, key, value, scale).amax()) * 4
        precision = max(precision, closed_form_tolerance(case.bench, built))
    else:
        built = case.built(fresh=True)
        config = built.config
        parts = case.bench.call(case.subject.projections, built.module)
        width = parts["q"].shape[0] // config.num_heads
        groups = parts["k"].shape[0] // width
        tag = config.d_model - 1  # this channel alone reaches the values: 0 for the first key, 1 for the second
        with torch.no_grad():
            for name in ("v", "o"):
                parts[name].zero_()
                if f"{name}_bias" in parts:
                    parts[f"{name}_bias"].zero_()
            for group in range(groups):
                parts["v"][group * width, tag] = 1
            for head in range(min(config.num_heads, config.d_model)):
                parts["o"][head, head * width] = 1
        samples = 24
        memory = case.normal(samples, 2, config.d_model, dtype=built.dtype)
        memory[:, 0, tag], memory[:, 1, tag] = 0, 1
        x = memory
        if case.subject.kind == "cross_attention":
            x = case.normal(samples, 3, config.d_model, dtype=built.dtype)
        output = case.call(built, x) if x is memory else case.call(built, x, memory)
        second = output[..., : config.num_heads].double().transpose(1, 2)  # [B, H, T]: the weight of the second key
        weights = torch.stack([1 - second, second], dim=-1)
        query = project(x, parts, "q", config.num_heads).to(x.device)
        key = project(memory, parts, "k", groups).repeat_interleave(config.num_heads // groups, dim=1).to(x.device)
        if case.subject.fact("causal"):
            weights, query = weights[:, :, -1:], query[:, :, -1:]
        scale = _scale_of(case, width, config.d_model)
        # 1 - w loses the digits that w gains: at |logit| < 9 a factor of e^9, of which the median sees little
        precision = 100 * max(case.tolerance(built), closed_form_tolerance(case.bench, built))
    apart = (key[:, :, :1] - key[:, :, 1:]).double()
    dots = (query.double() * apart).sum(dim=-1)
    logits = (weights[..., 0].clamp(min=1e-300) / weights[..., 1].clamp(min=1e-300)).log()
    return logits, dots, apart.square().sum(dim=-1).sqrt().expand_as(dots), scale, precision


@holds(
    "attention.convexity",
    statement="Each output coordinate lies between the smallest and the largest visible value; equal values come back.",
    formula="min_s v_s <= o_t <= max_s v_s",
    source="Weights are non-negative and sum to one: the output is a convex combination.",
    kinds=("attention",),
    unless=(excludes_fact("sink"), sees_every_key),
    catches=("SM01", "SM07", "CM13"),
)
def outputs_are_convex_combinations(case: Case) -> None:
    """With a mask, visible values alone count. Values far from 0 show a row of weights that does not sum to one."""
    drawn = Attending(case)
    allow = drawn.drawn_mask() if case.subject.takes_mask("pairwise") and case.flag("masked") else None
    value = drawn.value + case.choice("offset", (0.0, 50.0))
    got = drawn(value=value, mask=allow)
    shape = (*drawn.query.shape[:3], drawn.key.shape[2])
    seen = torch.ones(shape, dtype=torch.bool, device=got.device) if allow is None else allow.expand(shape)
    wide = value.double()[:, :, None].expand(*shape, value.shape[-1])
    low = torch.where(seen[..., None], wide, torch.inf).amin(dim=3)
    high = torch.where(seen[..., None], wide, -torch.inf).amax(dim=3)
    inside = got.double().clamp(low, high)
    case.close(
        got.double(), inside, "an output lies outside the range of the visible values", bound=drawn.bound(value=value)
    )
    equal = value[:, :, :1].expand_as(value).contiguous()
    case.close(
        drawn(value=equal, mask=allow),
        equal[:, :, :1].expand_as(got),
        "equal values do not come back unchanged",
        bound=drawn.bound(value=equal),
    )
    case.witness()


@holds(
    "attention.value-linearity",
    statement="The output is linear in the values, and heads do not influence one another.",
    formula="A(q, k, a v + b w) = a A(q, k, v) + b A(q, k, w); head e depends on q_e, k_e, v_e alone",
    source=_PAPER,
    kinds=("attention",),
    catches=("SM02", "HD01", "HD02"),
)
def outputs_are_linear_in_the_values(case: Case) -> None:
    """Weights depend on queries and keys alone, those of one head on that head alone."""
    drawn = Attending(case, heads=case.choice("heads", (2, 3)))
    other = case.normal(*drawn.value.shape, dtype=drawn.value.dtype)
    a, b = case.choice("a", (2.0, -1.0, 0.5)), case.choice("b", (-3.0, 1.0))
    mixed = a * drawn.value + b * other
    first, second = drawn(), drawn(value=other)
    bound = drawn.bound(value=mixed) + abs(a) * drawn.bound() + abs(b) * drawn.bound(value=other)
    case.close(drawn(value=mixed), a * first + b * second, "the output is not linear in the values", bound=bound)
    head = case.integer("head", 0, drawn.heads - 1)
    changed = [x.clone() for x in (drawn.query, drawn.key, drawn.value)]
    for part in changed:
        part[:, head] = case.normal(*part[:, head].shape, dtype=part.dtype, scale=2.0)
    others = [h for h in range(drawn.heads) if h != head]
    got = drawn(*changed)
    case.close(
        got[:, others],
        first[:, others],
        f"changing head {head} alone changes the output of other heads",
        bound=drawn.bound()[:, others],
    )
    case.differs(got[:, head], first[:, head], f"changing head {head} does not change its output")
    case.witness()


@holds(
    "attention.kernel-average",
    statement="Attention is the Nadaraya-Watson average of the values with the exponential kernel.",
    formula="o_t = sum_s kappa(q_t, k_s) v_s / sum_s kappa(q_t, k_s), kappa = exp(scale <q, k>)",
    source="Course notes, lecture 8; Tsai et al. 2019, equation 2.",
    kinds=("attention",),
    level="extended",
    unless=(*_PLAIN, excludes_fact("soft_cap"), sees_every_key),
    catches=("SC01", "SM07"),
)
def attention_is_a_kernel_average(case: Case) -> None:
    """The kernel is formed without subtracting a maximum, so this oracle shares no step with the other one."""
    drawn = Attending(case)
    kernel = (drawn.query.double() @ drawn.key.double().transpose(-2, -1) * drawn.scale).exp()
    expected = kernel @ drawn.value.double() / kernel.sum(dim=-1, keepdim=True)
    case.close(drawn(), expected, "the output is not the kernel average of the values", bound=drawn.bound())
    case.witness()


@holds(
    "attention.hopfield-step",
    statement="With queries, keys and values all equal to X, attention is one update of a modern Hopfield network.",
    formula="o = X softmax(beta X^T xi), beta = scale",
    source="Ramsauer et al. 2021, equation 3.",
    kinds=("attention",),
    level="extended",
    unless=(*_PLAIN, excludes_fact("soft_cap"), sees_every_key),
    catches=("SC02", "SM01"),
)
def attention_is_a_hopfield_update(case: Case) -> None:
    """Stored patterns are the columns of X; each is its own state. Looped over states."""
    drawn = Attending(case)
    x = drawn.key
    got = drawn(query=x, key=x, value=x)
    patterns = x.double()
    states = [
        torch.einsum(
            "bhsk,bhs->bhk",
            patterns,
            torch.einsum("bhsk,bhk->bhs", patterns, patterns[:, :, t]).mul(drawn.scale).softmax(-1),
        )
        for t in range(x.shape[2])
    ]
    case.close(
        got,
        torch.stack(states, dim=2),
        "self-attention of X is not the Hopfield update of X",
        bound=drawn.bound(x, x, x),
    )
    case.witness()
