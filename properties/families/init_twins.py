"""Whether what is drawn at the start is drawn for each part of a model by itself."""

from __future__ import annotations

import torch
from torch import nn

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.init import initial
from veriformer.properties.probes.module_parts import layer_lists


@holds(
    "init.layers-differ",
    statement="Where a scheme of initialisation is declared, every layer and every matrix draws weights of its own.",
    formula="W_i != W_j at the start, for layers i != j and every matrix W drawn at random",
    source="Independent draws break the symmetry between layers; cloning a layer does not (pytorch/pytorch#72253).",
    kinds=("encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(needs_part("build"), needs_fact("init"), excludes_fact("shared_layers")),
    examples_factor=0.25,
    catches=("IN04",),
)
def layers_start_apart(case: Case) -> None:
    """Speaks of declared schemes alone: torch.nn.TransformerEncoder itself clones its first layer, and leaves the
    initialisation to its user, who need not choose one by name. Constants (gains, biases, zeros) are alike by design.
    """
    built = initial(case)
    lists = layer_lists(built.module, built.config)
    if case.subject.fact("init") in ("default", "other"):
        stacks = nn.TransformerEncoder | nn.TransformerDecoder
        cloned = {id(m) for part in built.module.modules() if isinstance(part, stacks) for m in part.layers}
        lists = [layers for layers in lists if id(layers[0]) not in cloned]
    alike = case.apply(drawn_alike, built.module)
    case.equal(
        alike,
        [],
        "different parameters start with the same random numbers",
        got="; ".join(alike),
        expected="every matrix draws its own",
        cause=lambda: _alike_cause(built.module, alike[0]),
    )
    if not lists:
        if built.config.num_layers == 1 < max(c.num_layers for c in case.bench.configs):
            case.reject("one layer differs from no other")
        case.does_not_apply("no list of layers is found in it, but those that torch clones")
    for layers in lists:
        first, *others = ({n: p for n, p in layer.named_parameters() if p.ndim >= 2} for layer in layers)
        drawn = {name: p for name, p in first.items() if p.numel() > 1 and float(p.detach().std()) > 0}
        twins = [(name, p, other[name]) for name, p in drawn.items() for other in others if name in other]
        twins = [(name, one, two) for name, one, two in twins if one is not two and one.shape == two.shape]
        same = [name for name, one, two in twins if torch.equal(one, two)]  # one table is no twin
        differ = [(one != two).any() for _, one, two in twins]
        case.require(
            torch.stack(differ).all() if differ else True,
            f"{len(set(same))} matrices start the same in several layers",
            got=", ".join(sorted(set(same))[:4]),
            expected="every layer draws its own",
            cause=lambda: "the layers are copies of one layer, made after it was initialised",
        )
    case.witness()


def _alike_cause(module: nn.Module, pair: str) -> str:
    """Say that two parameters are one memory, or that they were drawn alike."""
    one, _, other = pair.partition(" and ")
    named = dict(module.named_parameters())
    if one in named and other in named and named[one].data_ptr() == named[other].data_ptr():
        return (
            f"{one} shares the memory of {other} but is another parameter, with a gradient of its own: it was made of "
            "the other's numbers (nn.Parameter of it, or .data), where it is to be the parameter itself"
        )
    return f"{pair} start as copies of one another: the same seed, or key of a generator, is used twice"


def drawn_alike(module: nn.Module) -> list[str]:
    """Return pairs of matrices inside one part that start the same, though they are two and were drawn at random.

    Layers that are alike are judged for themselves: of two matrices one path is that of the other but for its end.
    """
    drawn = [
        (name, p.detach())
        for name, p in module.named_parameters()
        if p.ndim >= 2 and p.numel() > 8 and len(p.detach().flatten()[:64].unique()) > 4
    ]
    return [
        f"{one} and {other}"
        for number, (one, p) in enumerate(drawn)
        for other, q in drawn[:number]
        if p.shape == q.shape and _digits(one) == _digits(other) and torch.equal(p, q)
    ]


def _digits(name: str) -> list[str]:
    return [word for word in name.split(".") if word.isdigit()]
