"""Multi-head attention as a module: its projections are all alive, and heads are a sum that has no order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.influence_maps import declared_region
from veriformer.properties.definitions.attention import project, softmax_oracle
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.kernels.memory_blocks import blocks_of_memory
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.subject.facts import attention_scale

_MODULES = ("self_attention", "cross_attention")
_PAPER = "Vaswani et al. 2017, section 3.2.2."
_READABLE = needs_part("projections")
_PLAIN = (excludes_fact("sink"), excludes_fact("query_key_norm"), excludes_fact("soft_cap"))


class _Module:
    """A model of its own, its projections, and one pair of inputs.

    Attributes:
        asks: what to declare where it has matrices besides its projections (a table by distance, say) and is not the
            textbook's; None where it has none.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.built: Built = case.built(fresh=True)
        self.parts: Mapping[str, Tensor] = case.bench.call(case.subject.projections, self.built.module)
        known = {p.untyped_storage().data_ptr() for p in self.parts.values()}
        all_of_it = self.built.module.parameters() if isinstance(self.built.module, nn.Module) else ()
        more = any(p.ndim > 1 and p.untyped_storage().data_ptr() not in known for p in all_of_it)
        if more and case.subject.fact("structure") == "other":
            case.does_not_apply("it has matrices besides its projections")
        self.asks = ("structure", "other") if more else None
        config = self.built.config
        self.heads = config.num_heads
        self.d_head = self.parts["q"].shape[0] // self.heads
        self.groups = self.parts["k"].shape[0] // self.d_head
        self.x = case.normal(2, case.length("T", low=2), config.d_model, dtype=self.built.dtype)
        self.memory = self.x
        if case.subject.kind == "cross_attention":
            self.memory = case.normal(2, 5, config.d_model, dtype=self.built.dtype)

    def output(self) -> Tensor:
        """Call the subject on the drawn inputs, `[B, T, D]`."""
        given = (self.x,) if self.memory is self.x else (self.x, self.memory)
        return self.case.call(self.built, *given)

    def rows(self, name: str, order: list[int]) -> Tensor:
        """Return the index of rows of a projection after permuting its heads."""
        width = self.d_head
        return torch.cat([torch.arange(h * width, (h + 1) * width) for h in order]).to(self.parts[name].device)


@holds(
    "attention.head-decomposition",
    statement="The output is a sum over heads of what each would give alone.",
    formula="concat(heads) W_O = sum_e A_e X W_V_e W_O_e",
    source="Elhage et al. 2021, section on attention heads as independent and additive.",
    kinds=_MODULES,
    level="extended",
    unless=(_READABLE, needs_part("weights")),
    catches=("HD01", "HD02", "HD08"),
)
def heads_add_up(case: Case) -> None:
    """A block of columns of W_O belongs to each head. The weights A_e are those that the subject itself returns, so
    this is not the definition again: it holds whatever the scores are.
    """
    module = _Module(case)
    given = (module.x,) if module.memory is module.x else (module.x, module.memory)
    weights = case.bench.call(case.subject.weights, module.built.module, *given).detach().double().cpu()
    values = project(module.memory, module.parts, "v", module.groups)
    values = values.repeat_interleave(module.heads // module.groups, dim=1)
    out = module.parts["o"].detach().double().cpu()
    total = torch.zeros(*module.x.shape[:2], out.shape[0], dtype=torch.float64)
    for head in range(module.heads):
        columns = out[:, head * module.d_head : (head + 1) * module.d_head]
        total = total + weights[:, head] @ values[:, head] @ columns.T
    if "o_bias" in module.parts:
        total = total + module.parts["o_bias"].detach().double().cpu()
    got = module.output()
    case.close(got, total.to(got.device), "the output is not the sum over heads of A X W_V W_O", asks=module.asks)
    case.witness()


@holds(
    "attention.returned-weights",
    statement="The weights that are returned are those of the definition, head by head.",
    formula="A_e = softmax(scale Q_e K_e^T)",
    source=_PAPER,
    kinds=_MODULES,
    level="extended",
    unless=(_READABLE, needs_part("weights"), *_PLAIN, excludes_fact("positions", "rotary", "alibi", "t5", "relative")),
    catches=("SM01", "SC01"),
)
def returned_weights_are_the_real_ones(case: Case) -> None:
    """A model that draws its attention maps from another computation than its output misleads whoever reads them."""
    module = _Module(case)
    given = (module.x,) if module.memory is module.x else (module.x, module.memory)
    got = case.bench.call(case.subject.weights, module.built.module, *given)
    query = project(module.x, module.parts, "q", module.heads)
    key = project(module.memory, module.parts, "k", module.groups).repeat_interleave(
        module.heads // module.groups, dim=1
    )
    scale = attention_scale(case.subject.fact("attention_scale"), module.d_head, module.built.config.d_model)
    scores = query @ key.transpose(-2, -1) * scale
    if case.subject.fact("causal"):
        scores = scores.masked_fill(~declared_region(case.subject, scores.shape[-1]), -torch.inf)
    expected = softmax_oracle(scores).to(got.device)
    case.close(got, expected, "the returned weights are not softmax(scale q k^T)",
               bound=case.tolerance(module.built) * size_of(expected), asks=module.asks)  # fmt: skip
    case.witness()


@holds(
    "attention.head-permutation",
    statement="Permuting the heads in all four projections changes nothing.",
    formula="W_Q, W_K, W_V by rows and W_O by columns, the same order  =>  the same output",
    source="The sum over heads has no order.",
    kinds=_MODULES,
    level="extended",
    unless=_READABLE,
    catches=("HD01", "HD02"),
)
def heads_have_no_order(case: Case) -> None:
    """With grouped heads whole groups move. ALiBi and other biases by head break the symmetry."""
    if case.subject.fact("positions") in ("alibi", "t5", "relative"):
        case.reject("heads differ by their bias")
    module = _Module(case)
    if module.groups < 2:
        case.reject("one group has no order")
    before = module.output().detach().clone()
    order = case.permutation("order", module.groups)
    if order == sorted(order):
        order = order[1:] + order[:1]
    repeats = module.heads // module.groups
    heads = [g * repeats + r for g in order for r in range(repeats)]
    with torch.no_grad():
        for name, sequence in (("q", heads), ("k", order), ("v", order)):
            index = module.rows(name, sequence)
            for part in (name, f"{name}_bias"):
                if part in module.parts:
                    module.parts[part].copy_(module.parts[part][index].clone())
        module.parts["o"].copy_(module.parts["o"][:, module.rows("o", heads)].clone())
    case.close(module.output(), before, "permuting the heads in all projections changes the output",
               asks=module.asks)  # fmt: skip
    case.witness()


@holds(
    "attention.head-gauge",
    statement="A change of basis inside a head, undone on the other side, changes nothing.",
    formula="W_Q R, W_K R^-T and W_V G, G^-1 W_O per head  =>  the same output",
    source="Scores are Q K^T and the output is A V W_O: the bases of query-key and value spaces are free.",
    kinds=_MODULES,
    level="extended",
    unless=(_READABLE, excludes_fact("query_key_norm"), excludes_fact("positions", "rotary")),
    catches=("HD01", "HD02", "HD08"),
)
def bases_inside_heads_are_free(case: Case) -> None:
    """R and G are orthogonal, so that rounding does not grow. Rotary positions fix the query-key basis."""
    module = _Module(case)
    before = module.output().detach().clone()
    width, repeats = module.d_head, module.heads // module.groups
    turns = [torch.linalg.qr(case.normal(width, width, dtype=torch.float64))[0] for _ in range(2 * module.groups)]
    with torch.no_grad():
        for head in range(module.heads):
            group = head // repeats
            rows = slice(head * width, (head + 1) * width)
            _turn(module.parts, "q", rows, turns[2 * group])
            module.parts["o"][:, rows] = (module.parts["o"][:, rows].double() @ turns[2 * group + 1].T).to(
                module.x.dtype
            )
        for group in range(module.groups):
            rows = slice(group * width, (group + 1) * width)
            _turn(module.parts, "k", rows, turns[2 * group])
            _turn(module.parts, "v", rows, turns[2 * group + 1])
    case.close(module.output(), before, "a change of basis inside a head, undone on the other side, changes the output",
               asks=module.asks)  # fmt: skip
    case.witness()


def _turn(parts: Mapping[str, Tensor], name: str, rows: slice, basis: Tensor) -> None:
    for part in (name, f"{name}_bias"):
        if part in parts:
            parts[part][rows] = (basis @ parts[part][rows].double()).to(parts[part].dtype)


@holds(
    "attention.projections-live",
    statement="Each of the four projections has an effect and a gradient of its own.",
    formula="d f / d W != 0 for W in {W_Q, W_K, W_V, W_O}; keys and values from the memory, queries from the input",
    source=_PAPER,
    kinds=_MODULES,
    unless=_READABLE,
    catches=("HD08", "XA01", "KV01", "HD07"),
)
def every_projection_matters(case: Case) -> None:
    """Zeroing W_V (and its bias) must leave the output bias alone; changing W_Q or W_K must change the output. For
    cross-attention the gradient tells which input a projection reads.
    """
    module = _Module(case)
    before = module.output()
    for name in ("q", "k", "v", "o"):
        kept = module.parts[name].detach().clone()
        with torch.no_grad():
            module.parts[name].mul_(-1.5)
        after = module.output()
        with torch.no_grad():
            module.parts[name].copy_(kept)
        case.differs(after, before, f"changing the {name} projection does not change the output")
    with torch.no_grad():
        for part in ("v", "v_bias"):
            if part in module.parts:
                module.parts[part].zero_()
    silent = module.output()
    rest = (
        module.parts["o_bias"].detach()
        if "o_bias" in module.parts
        else torch.zeros(silent.shape[-1], dtype=silent.dtype)
    )
    error = (silent - rest.to(silent.device)).detach().abs().amax()
    limit = case.tolerance(module.built) * size_of(before)
    case.require(
        error <= limit,
        "with the value projection zeroed something else than the output bias remains: values come from elsewhere",
        asks=module.asks,
        got=f"{error:.3g}",
        expected="0",
        error=error,
        tolerance=limit,
    )
    case.witness()


@holds(
    "cross_attention.memory-permutation",
    statement="Permuting the memory changes nothing; its length and its padding do not matter.",
    formula="f(x, P m) = f(x, m)",
    source="Keys and values of the memory are a set; positions, if any, came in before.",
    kinds=("cross_attention", "encoder_decoder"),
    level="extended",
    unless=lambda s: (
        "the memory is encoded with positions"
        if s.kind == "encoder_decoder" and s.fact("positions") != "none"
        else None
    ),
    sweeps_lengths=True,
    farthest=257,
    catches=("XA01", "XA04", "XA07"),
)
def the_memory_is_a_set(case: Case) -> None:
    """Query and memory lengths differ (equal lengths hide a mask of the wrong side)."""
    stream = Stream(case, case.built(), side="source")
    length = case.length("T", low=2)
    memory = stream.draw(2, length)
    order = case.permutation("order", length)
    if order == sorted(order):
        order = order[1:] + order[:1]
    masked = case.subject.takes_mask("padding") and case.flag("masked")
    mask = torch.ones(2, length, dtype=torch.bool, device=memory.device) if masked else None
    if mask is not None:
        mask[0, : length // 2] = False
    case.close(
        stream(memory[:, order], None if mask is None else mask[:, order]),
        stream(memory, mask),
        "permuting the memory changes the output",
        cause=lambda: blocks_of_memory(case, stream),
    )
    case.witness()


@holds(
    "cross_attention.memory-matters",
    statement="The output depends on the memory, and on every position of it.",
    formula="d f(x, m)_t / d m_s != 0",
    source="Vaswani et al. 2017, section 3.2.3: keys and values come from the encoder.",
    kinds=("cross_attention", "encoder_decoder"),
    catches=("XA01", "XA02", "XA08"),
)
def the_memory_is_read(case: Case) -> None:
    """A decoder that attends to itself instead passes every test of shape. Every query sees every position; in
    attention itself no query sees another.
    """
    stream = Stream(case, case.built(), side="source")
    memory = stream.draw(6, case.length("T", low=2))
    for at in sorted({case.integer("at", 0, memory.shape[1] - 1), memory.shape[1] - 1}):
        _is_read(case, stream, memory, at)
    other = Stream(case, stream.built, side="target")
    target = other.draw(6, 4)
    case.differs(other(other.other(target)), other(target), "replacing the queries' side changes no output")
    if case.subject.kind == "cross_attention":
        first = torch.cat([other.other(target)[:, :1], target[:, 1:]], dim=1)
        case.close(
            other(first)[:, 1:], other(target)[:, 1:], "replacing one query changes the outputs of others",
            cause=lambda: _of_other_queries(other, first, target),
        )  # fmt: skip
    case.witness()


def _of_other_queries(stream: Stream, changed: Tensor, target: Tensor) -> str:
    """Tell what is shared among queries from rows of several samples that come out at one another's places."""
    if torch.equal(stream(changed[:1])[:, 1:], stream(target[:1])[:, 1:]):
        moved = (stream(changed) != stream(target)).any(-1)[:, 1:].nonzero().tolist()
        places = ", ".join(f"{t + 1} of sample {b}" for b, t in moved[:4])
        return (
            f"for one sample it is right; in a batch the first queries of {len(target)} samples move the outputs "
            f"{places}{' ...' if len(moved) > 4 else ''}: rows of several samples are put together in another order "
            "than theirs (chunks of queries that are flattened over samples before they are joined, say)"
        )
    return "weights are shared out among queries: the softmax, or a mean, runs over them"


def _is_read(case: Case, stream: Stream, memory: Tensor, at: int) -> None:
    """Require one position of the memory to reach every query."""
    changed = memory.clone()
    changed[:, at] = stream.other(memory)[:, at]
    before, after = stream(memory), stream(changed)
    case.differs(after, before, f"replacing position {at} of the memory changes no output")
    if case.subject.fact("sparse"):
        return
    blind = (after == before).flatten(2).all(-1).all(0)
    case.require(
        ~blind.any(),
        f"replacing position {at} of the memory changes the outputs of some queries alone",
        got=f"none at {blind.nonzero().flatten().tolist()[:8]}",
        expected="every query attends to all of the memory",
        cause=lambda: _masked_by_the_other_side(stream, memory),
        asks=("sparse", True),
    )


def _masked_by_the_other_side(stream: Stream, memory: Tensor) -> str | None:
    """Tell a causal mask: no query sees what stands behind its own index."""
    with torch.no_grad():
        before, changed = stream(memory), memory.clone()
        changed[:, -1] = stream.other(memory)[:, -1]
        seen = (stream(changed) != before).flatten(2).any(-1).any(0)
    last = memory.shape[1] - 1
    if not seen[:last].any() and bool(seen[last:].all()):
        return "a causal mask is laid over the memory: a query sees no more of it than its own index"
    return None
