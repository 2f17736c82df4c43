"""The stack: layers once each, in order, each on what the one before gave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.memories import layers_share_one_memory
from veriformer.properties.probes.module_parts import layer_lists
from veriformer.properties.subject.inputs import ordinary


@holds(
    "layer.composition",
    statement="The layers are applied once each, in the order of their list, each to the output of the one before; "
    "no list holds one module twice.",
    formula="h_n = layer_n(h_(n-1))",
    source="Vaswani et al. 2017, section 3.1: a stack of N identical layers.",
    kinds=("feed_forward", "layer", "encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(needs_module, excludes_fact("shared_layers")),
    asks=("structure", "other"),
    examples_factor=0.5,
    catches=("IN02",),
)
def layers_follow_one_another(case: Case) -> None:
    """Seen through hooks on the subject's own list of layers, where each maps the whole sequence `[B, T, D]` to another
    in a plain call; rows or micro-batches that go through one after another, each through all layers in turn, are
    right too and not compared. What is added between layers by design (a residual outside of them, a signal of depth)
    keeps what the one before gave: a layer that does not depend on it at all gets something else. One module that
    stands in a list twice (`[Expert()] * n`, copies of a copy) is one set of weights where there seem to be several; so
    is a norm that stands in several places. All layers of a decoder attend to one memory.
    """
    config = case.config()
    if config.num_layers < 2 and case.subject.build is not None and "num_layers" not in case.subject.domain:
        config = replace(config, num_layers=2)
    built = case.bench.pool.get(config, case.dtype())
    lists = layer_lists(built.module, built.config) if isinstance(built.module, nn.Module) else []
    of_layers = [n for n, part in built.module.named_modules() if any(_holds(part, layers) for layers in lists)]
    parts = case.apply(listed_twice, built.module, of_layers)
    case.equal(
        parts, [], f"one module stands in {', '.join(parts)} several times", got=", ".join(parts), expected="none",
        cause=lambda: f"all of {parts[0]} that seem to be several are one module with one set of weights",
        asks=("shared_layers", True),
    )  # fmt: skip
    norms = case.apply(norms_in_several_places, built.module)
    case.equal(
        norms, [], f"one norm stands in {len(norms)} places, {', '.join(norms[:3])} among them",
        got="one gain for all of them", expected="a gain of its own for each",
        cause=lambda: _one_for_several(built.module, norms), asks=("shared_layers", True),
    )  # fmt: skip
    for fact, value in (("stacked", False), ("structure", "other")):
        if case.subject.fact(fact) == value:
            case.does_not_apply(f"does not hold with {fact} = {value!r}, which is declared")
    if case.subject.kind == "encoder_decoder":
        layers_share_one_memory(case)
    if not lists:
        case.does_not_apply("no list of at least two layers is found in it")
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    run = case.caller(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    if any(isinstance(layer, torch.jit.ScriptModule) for layers in lists for layer in layers):
        case.does_not_apply("its layers are scripted, and take no hooks")
    compared = False
    for layers in lists:
        order, seen = case.apply(passed_through, layers, run)
        if not order:
            case.does_not_apply("its layers are not called as modules")
        inlined = [layer for index, layer in enumerate(layers) if index not in order]
        with off_the_record(case):
            if inlined and all(_uses(run, layer) for layer in inlined):
                case.does_not_apply("the parts of a layer are used one by one, not the layer as a module")
        if not any(isinstance(made, Tensor) for _, _, made in seen):
            case.does_not_apply("its layers give no tensor that could be compared")
        if _in_parts(seen, layers):
            case.does_not_apply(
                "a call goes through its layers several times, each time in order: by rows, or by parts"
            )
        case.equal(
            order,
            list(range(len(layers))),
            "the layers are not applied once each, in order",
            got=f"layers {order}",
            expected=f"layers {list(range(len(layers)))}",
            cause=lambda order=order, layers=layers: _order_cause(order, layers),  # type: ignore[misc]
        )
        for (_, _, made), (index, given, _) in itertools.pairwise(seen):
            if given is None or made is None or given.shape != made.shape or made.ndim != 3:
                continue
            strict = case.subject.fact("structure") == "textbook"
            if not strict and not torch.equal(given, made) and case.apply(reads_the_one_before, layers, index, run):
                case.does_not_apply(f"between layers {index - 1} and {index} something is added to the stream")
            case.exact(given, made, f"layer {index} does not get the output of layer {index - 1}")
            case.witness()
            compared = True
    if not compared:
        case.does_not_apply("its layers map no sequence [B, T, D] to another")


def norms_in_several_places(module: nn.Module) -> list[str]:
    """Return the names of a norm with parameters that is registered in several places, where there is one."""
    places: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if is_norm(part) and any(True for _ in part.parameters()):
            places.setdefault(id(part), []).append(name)
    return max(places.values(), key=len) if any(len(names) > 1 for names in places.values()) else []


def _one_for_several(module: nn.Module, norms: list[str]) -> str:
    """Say what is shared beside a norm: all that its owners hold, where they are copies of one another, or it alone."""
    owners = [name.rpartition(".")[0] for name in norms]
    held = {name: {id(p) for p in module.get_submodule(name).parameters()} for name in owners}
    copies = [name for name in held if held[name] == held[owners[0]] and name]
    if len(copies) > 1 and len({id(module.get_submodule(name)) for name in copies}) > 1:
        return (
            f"{', '.join(copies[:3])} are modules of their own that hold the very same parts, all weights included: "
            "one set of weights applied several times, as where one part is handed to each of them, or copies copy no "
            "part (copy.copy for copy.deepcopy)"
        )
    return (
        f"{', '.join(norms[:3])} are one module with one set of weights: what makes norms gives the same one each time "
        "(a cache, say, or a default argument)"
    )


def listed_twice(module: nn.Module, of_layers: list[str]) -> list[str]:
    """Return the names of the lists of parts in which one module with parameters stands more than once.

    Args:
        module: the model.
        of_layers: names of the lists of its layers, whose order is looked at.
    """
    found = []
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential) and name not in of_layers:
            own = [id(m) for m in part._modules.values() if m is not None and any(True for _ in m.parameters())]
            if len(set(own)) < len(own):
                found.append(name)
    return found


def _holds(part: nn.Module, layers: list[nn.Module]) -> bool:
    return list(part._modules.values()) == layers


class _Handed(TorchFunctionMode):
    """Notes which tensors are handed to torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def _uses(run: Callable[[], object], layer: nn.Module) -> bool:
    """Return whether a call uses most parameters of a layer: its code then stands outside of it."""
    with _Handed() as handed:
        run()
    own = [id(parameter) in handed.ids for parameter in layer.parameters()]
    return sum(own) * 2 > len(own)


def _in_parts(seen: list[tuple[int, Tensor | None, Tensor | None]], layers: list[nn.Module]) -> bool:
    """Return whether all layers are passed several times, in order, with other inputs each time.

    Part by part, or all parts layer by layer. A layer that goes on from its own output, or from that of the last one,
    is applied again.
    """
    times, rest = divmod(len(seen), len(layers))
    if times < 2 or rest or len({id(layer) for layer in layers}) < len(layers):
        return False
    order, once = [index for index, _, _ in seen], list(range(len(layers)))
    by_layer = [index for index in once for _ in range(times)]
    if order not in (once * times, by_layer):
        return False
    again = [n for n in range(1, len(seen)) if (n % times if order == by_layer else n % len(layers) == 0)]
    return not any(_same(seen[n][1], seen[n - 1][2]) for n in again)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def reads_the_one_before(layers: list[nn.Module], index: int, run: Callable[[], object]) -> bool:
    """Return whether what a layer gets changes with what the layer before it gave."""
    seen: list[Tensor] = []

    def alter(module: nn.Module, args: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        wave = torch.arange(first.numel(), device=first.device).reshape(first.shape).sin()
        changed = first + wave.to(first.dtype)
        return (changed, *others) if isinstance(output, tuple) else changed

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)).detach().clone())

    handle = layers[index].register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
        other = layers[index - 1].register_forward_hook(alter)
        try:
            run()
        finally:
            other.remove()
    finally:
        handle.remove()
    return len(seen) == 2 and not torch.equal(seen[0], seen[1])


def passed_through(
    layers: list[nn.Module], run: Callable[[], object]
) -> tuple[list[int], list[tuple[int, Tensor | None, Tensor | None]]]:
    """Call a model; return the order of its layers, and for each call of one its index, what it got, what it gave."""
    seen: list[tuple[int, Tensor | None, Tensor | None]] = []

    def noting(index: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            result = output[0] if isinstance(output, tuple) else output
            made = result.detach().clone() if isinstance(result, Tensor) else None
            seen.append((index, None if first is None else first.detach().clone(), made))

        return note

    handles = [layer.register_forward_hook(noting(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [index for index, _, _ in seen], seen


def _order_cause(order: list[int], layers: list[nn.Module]) -> str | None:
    if len({id(layer) for layer in layers}) < len(layers):
        return "one layer stands in the list several times; if layers share on purpose, declare shared_layers=True"
    if len(set(order)) == 1 < len(order):
        return f"layer {order[0]} is applied again and again"
    if left := [str(index) for index in range(len(layers)) if index not in order]:
        return f"never applied: layer {', '.join(left)} of the list"
    return "the order is reversed" if order == sorted(order, reverse=True) else None
