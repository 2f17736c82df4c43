"""How many parameters there are: as many as the formula says, at small sizes and at published ones."""

from __future__ import annotations

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.counts import shared_parts, surplus_cause
from veriformer.properties.causes.structure import beside_the_textbook, is_of_textbook_shapes, unlike_the_textbook
from veriformer.properties.definitions.costs.counts import (
    COUNTED,
    Component,
    nearest_count,
    possible_counts,
    total,
    why_unknown,
)
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.probes.module_parts import layer_lists
from veriformer.properties.probes.sizes.own_sizes import sizes_of
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_COUNT = "Course notes, section 8.1; derivation in veriformer.reference.counting."


def count(module: nn.Module) -> int:
    """Return the number of parameters by identity: a tied one counts once, buffers never."""
    return sum({id(p): p.numel() for p in module.parameters()}.values())


def _says_nothing(subject: Subject) -> str | None:
    """Apply where there is a closed form, or where maps are declared to have no biases."""
    return None if subject.fact("bias") is False else why_unknown(subject)


@holds(
    "parameters.exact-count",
    statement="The number of parameters is the closed form in the sizes, whatever the sequence length.",
    formula="encoder layer 12 d^2 + 13 d at d_ff = 4 d; decoder layer 16 d^2 + 19 d; totals V d + N(...)",
    source=_COUNT,
    kinds=COUNTED,
    unless=(needs_module, _says_nothing, excludes_fact("structure", "other")),
    asks=("structure", "other"),
    examples_factor=0.5,
    catches=("IN01", "IN02", "IN05", "NM08", "FF02", "XA02", "parameters-bias"),
    leaves_open=("activation", "norm_placement", "positions"),
)
def parameters_are_as_many_as_the_formula_says(case: Case) -> None:
    """Every component is a matrix of known shape. Counted by identity, over the drawn sizes; for full heads the number
    of heads does not matter, and no call changes the count. What nothing declares may be there or not: the bias of a
    classifier's head, grouped keys. A model that has more than the textbook's (a relative table, a gate, a gain), or
    whose weights are no parameters (integers in buffers, parametrizations), has no closed form here.
    """
    built = case.built()
    module = built.module
    if not isinstance(module, nn.Module):
        case.does_not_apply("what build gives is no nn.Module, so nothing is registered in it")
    if case.subject.fact("bias") is False:
        _none_is_biased(case, built, module)
    if (reason := why_unknown(case.subject)) is not None:
        case.does_not_apply(reason)
    before = case.apply(count, module)
    components = nearest_count(possible_counts(case.subject, sizes_of(case.bench, built)), before)
    wanted = total(components)
    case.integer("calls", 0, 1)
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    for got, when in ((before, ""), (case.apply(count, module), " after a call")):
        if got != wanted and (seen := beside_the_textbook(case)):
            case.does_not_apply(f"its blocks are not the textbook's: {seen}")
        listed = ", ".join(f"{c.times} x {c.name} {c.each:,}" for c in components if c.times and c.each)
        case.equal(
            got,
            wanted,
            f"the model has {got:,} parameters{when}, the formula gives {wanted:,}",
            got=f"{got:,}",
            expected=f"{wanted:,} = {listed}",
            error=abs(got - wanted),
            cause=lambda: _count_cause(case, built, before - wanted, components),
        )
    case.witness()


def _none_is_biased(case: Case, built: Built, module: nn.Module) -> None:
    """Require that no linear map inside the layers has a bias, which are declared to have none."""
    inside = {id(part) for layers in layer_lists(module, built.config) for layer in layers for part in layer.modules()}
    maps = [name for name, m in module.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    biased: list[str] = case.apply(biased_among, module, maps)
    case.equal(
        biased,
        [],
        "a linear map has a bias, where bias=False is declared",
        got=f"{len(biased)} of {len(maps)}: " + ", ".join(biased[:3]) + (" ..." if len(biased) > 3 else ""),
        expected="none",
        cause=lambda: f"{biased[0]} has a bias",
        asks=("bias", True),
    )


def biased_among(module: nn.Module, names: list[str]) -> list[str]:
    """Return which of the linear maps of these names have a bias."""
    return [name for name in names if module.get_submodule(name).bias is not None]


def _count_cause(case: Case, built: Built, difference: int, components: list[Component]) -> str | None:
    """Name what is seen; multiples of a size are named only where all shapes are the textbook's."""
    missing, told = shared_parts(built.module)
    whole = total(components) + difference + missing
    if missing and total(nearest_count(possible_counts(case.subject, sizes_of(case.bench, built)), whole)) == whole:
        return told
    if is_of_textbook_shapes(case, built):
        return surplus_cause(difference, components, sizes_of(case.bench, built))
    return unlike_the_textbook(case, built)


_PUBLISHED = (
    DrawnConfig(
        d_model=512, num_heads=8, num_key_value_heads=8, d_ff=2048, num_layers=6, vocab_size=37000, max_len=512
    ),
    DrawnConfig(
        d_model=768, num_heads=12, num_key_value_heads=12, d_ff=3072, num_layers=12, vocab_size=50257, max_len=1024
    ),
    DrawnConfig(
        d_model=1024, num_heads=16, num_key_value_heads=16, d_ff=4096, num_layers=6, vocab_size=37000, max_len=512
    ),
    DrawnConfig(d_model=128, num_heads=8, num_key_value_heads=8, d_ff=512, num_layers=6, vocab_size=1000, max_len=128),
)
"""Sizes of Transformer base, GPT-2 small (and BERT base), Transformer big, and the course's notebook."""


def _builds_any_size(subject: Subject) -> str | None:
    if subject.build is None:
        return "a ready-made instance has one size"
    return "its domain limits the sizes" if subject.domain else None


@holds(
    "parameters.paper-table",
    statement="At published sizes the model has the published number of parameters.",
    formula="Transformer base, big, GPT-2 small, the course's 1000/128/6: counts from their configurations",
    source="Vaswani et al. 2017, table 3; Radford et al. 2019; course notes, sections 5 and 8.1.",
    kinds=COUNTED,
    level="extended",
    requires=("parameters.exact-count",),
    unless=(needs_module, why_unknown, _builds_any_size, excludes_fact("structure", "other")),
    asks=("structure", "other"),
    examples_factor=0.2,
    catches=("IN02", "parameters-cap"),
    leaves_open=("activation", "norm_placement", "positions"),
)
def published_sizes_give_published_counts(case: Case) -> None:
    """Built on the meta device, which allocates nothing; only the sizes that the subject's facts can express are
    reached (a GPT-2 is tied, pre-LN, with learned positions). Sizes unlike those of exact-count show a hidden limit.
    """
    config = _PUBLISHED[case.integer("published", 0, len(_PUBLISHED) - 1)]
    assert case.subject.build is not None
    try:
        with torch.device("meta"):
            module = case.bench.call(case.subject.build, config)
    except SubjectError as problem:
        if "meta" not in str(problem):
            raise
        case.does_not_apply(f"it cannot be built without being allocated: {problem}")
    if not isinstance(module, nn.Module):
        case.does_not_apply("what build gives is no nn.Module, so nothing is registered in it")
    got = case.apply(count, module)
    components = nearest_count(possible_counts(case.subject, config), got)
    wanted = total(components)
    if got != wanted and case.subject.fact("structure") != "textbook":
        small = case.bench.pool.get(case.bench.configs[0], torch.float32)
        own = count(small.module)
        if own != total(nearest_count(possible_counts(case.subject, sizes_of(case.bench, small)), own)):
            case.does_not_apply("its blocks are not the textbook's at other sizes either: see parameters.exact-count")
    case.equal(
        got,
        wanted,
        f"at d_model={config.d_model} the model has {got:,} parameters, the formula gives {wanted:,}",
        got=f"{got:,}",
        expected=f"{wanted:,}",
        error=abs(got - wanted),
        cause=lambda: surplus_cause(got - wanted, components, config),
    )
    case.witness()
