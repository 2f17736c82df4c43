"""Parameters: as many as the formula says, all registered, all used, tied where declared."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.counts import surplus_cause
from veriformer.properties.definitions.counts import COUNTED, expected_count, total, why_unknown
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.calling import has_graph
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_MODULES = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("softmax", "attention"))
_COUNT = "Course notes, section 8.1; derivation in veriformer.reference.counting."


def count(module: nn.Module) -> int:
    """Return the number of parameters by identity: a tied one counts once, buffers never."""
    return sum({id(p): p.numel() for p in module.parameters()}.values())


def _is_module(case: Case, built: Built) -> nn.Module:
    if not isinstance(built.module, nn.Module):
        case.reject("not an nn.Module")
    return built.module


@holds(
    "parameters.exact-count",
    statement="The number of parameters is the closed form in the sizes, whatever the sequence length.",
    formula="encoder layer 12 d^2 + 13 d at d_ff = 4 d; decoder layer 16 d^2 + 19 d; totals V d + N(...)",
    source=_COUNT,
    kinds=COUNTED,
    unless=(needs_module, why_unknown),
    examples_factor=0.5,
    catches=("IN01", "IN02", "IN05", "NM08", "FF02", "XA02", "parameters-bias"),
)
def parameters_are_as_many_as_the_formula_says(case: Case) -> None:
    """Every component is a matrix of known shape. Counted by identity, over the drawn sizes; for full heads the number
    of heads does not matter, and no call changes the count.
    """
    built = case.built()
    module = _is_module(case, built)
    components = expected_count(case.subject, built.config)
    wanted, before = total(components), case.apply(count, module)
    case.integer("calls", 0, 1)
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    for got, when in ((before, ""), (case.apply(count, module), " after a call")):
        listed = ", ".join(f"{c.times} x {c.name} {c.each:,}" for c in components if c.times and c.each)
        case.equal(
            got,
            wanted,
            f"the model has {got:,} parameters{when}, the formula gives {wanted:,}",
            got=f"{got:,}",
            expected=f"{wanted:,} = {listed}",
            error=abs(got - wanted),
            cause=lambda: surplus_cause(before - wanted, components, built.config),
        )
    case.witness()


def move(module: nn.Module, there: torch.dtype, back: torch.dtype) -> None:
    """Move a module to a dtype and back."""
    module.to(there).to(back)


def _reachable(value: Any, name: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Walk the tensors and modules inside lists, tuples and dicts."""
    if isinstance(value, Tensor | nn.Module):
        yield name, value
    elif depth and isinstance(value, list | tuple | set):
        for number, item in enumerate(value):
            yield from _reachable(item, f"{name}[{number}]", depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _reachable(item, f"{name}[{key!r}]", depth - 1)


def hidden_parts(module: nn.Module) -> list[str]:
    """Name trainable tensors and modules that hang on plain attributes, which parameters() does not see."""
    hidden_names = []
    known = {id(p) for p in (*module.parameters(), *module.buffers(), *module.modules())}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if (
                name in ("_parameters", "_buffers", "_modules")
                or name.endswith("_hooks")
                or name == "_non_persistent_buffers_set"
            ):
                continue
            for label, found in _reachable(value, f"{path}.{name}".lstrip(".")):
                if isinstance(found, nn.Module):
                    hidden = any(id(p) not in known for p in found.parameters())
                else:
                    hidden = isinstance(found, nn.Parameter)
                if hidden and id(found) not in known:
                    hidden_names.append(label)
    return hidden_names


@holds(
    "parameters.registered",
    statement="Every parameter is registered: state dict, deepcopy, .to() and pickle give the same outputs.",
    formula="f = load(build(), f.state_dict()) = deepcopy(f) = f.to(dtype).to(back)",
    source="torch.nn.Module: what is not registered is neither saved, moved nor trained.",
    kinds=_MODULES,
    unless=needs_module,
    examples_factor=0.3,
    catches=("IN05", "PE08", "CM05"),
)
def nothing_is_left_behind(case: Case) -> None:
    """A layer in a Python list is in no state dict; a tensor in an attribute stays when the model moves. A class that
    cannot be pickled (defined inside a function) is not judged by pickling.
    """
    built = case.built()
    module = _is_module(case, built)
    hidden = case.apply(hidden_parts, module)
    case.equal(
        hidden,
        [],
        f"{hidden[0] if hidden else ''!r} holds parameters and is not registered: "
        "it is neither saved, moved nor trained",
        got="a plain attribute",
        expected="a registered module, parameter or buffer",
    )
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    before = case.call(built, *tensors, *inputs.extras).detach().clone()
    twins: list[tuple[str, nn.Module]] = [("deepcopy", case.copy_of(built).module)]
    wide = torch.float64 if torch.float64 in judged_dtypes(case.bench) else built.dtype
    moved = case.copy_of(built).module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own: copied ScriptModules are looked at for a gradient
        case.apply(move, moved, wide, built.dtype)
    twins.append(("moving to another dtype and back", moved))
    if case.subject.build is not None:
        other = _is_module(case, case.built(dtype=built.dtype, raw=True, fresh=True))
        try:
            other.load_state_dict(module.state_dict())
        except RuntimeError as problem:
            told = str(problem).strip().replace("\n", " ")[:200]
            case.require(False, "its state dict cannot be loaded into a new model of the same sizes", got=told)
        twins.append(("its state dict, loaded into a new model,", other))
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # torch's own refusals too
        twins.append(("pickle", pickle.loads(pickle.dumps(module))))
    for way, twin in twins:
        after = case.call(replace(built, module=twin.eval()), *tensors, *inputs.extras)
        case.close(after, before, f"{way} changes the output", constants_allowed=True)
    case.witness()


@holds(
    "parameters.tied",
    statement="Output projection and token embedding are one parameter if and only if they are declared so.",
    formula="tied: W_out is E, after loading a state dict and after an optimiser step",
    source="Vaswani et al. 2017, section 3.4; Press & Wolf 2017.",
    kinds=("decoder", "encoder_decoder"),
    unless=(
        needs_module,
        lambda s: None if s.fact("tied") is not None else "the fact 'tied' is not declared",
        lambda s: None if s.takes_tokens else "there are no token embeddings",
    ),
    examples_factor=0.3,
    catches=("tied-copy", "tied-not"),
)
def tying_survives(case: Case) -> None:
    """Matrices of V x D are counted by identity; a copy made once drifts apart at the first step."""
    built = case.built(fresh=True)
    module, config = _is_module(case, built), built.config
    inputs = ordinary(case.subject, config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    output = case.call(built, *tensors)
    shape = (
        max(config.vocab_size, output.shape[-1]),
        config.d_model,
    )  # a vocabulary may have rows that are never drawn

    wanted = 1 if case.subject.fact("tied") else 2 + (case.subject.kind == "encoder_decoder")
    words = "one matrix, shared" if wanted == 1 else f"{wanted} matrices of their own"
    case.apply(step, module, output)
    twin = case.copy_of(built).module
    twin.load_state_dict(module.state_dict())
    if case.subject.fact("tied") is False and case.subject.kind == "encoder_decoder" and matrices(module, shape) == 2:
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        if not any(id(m.weight) in tables for m in module.modules() if isinstance(m, nn.Linear)):
            wanted, words = 2, "two matrices, one embedding for both sides"
    for model, when in ((module, "after an optimiser step"), (twin, "after deepcopy and loading a state dict")):
        case.equal(
            found := case.apply(matrices, model, shape),
            wanted,
            f"{when} the embedding and the output projection are not {words}",
            got=f"{found} matrices of {shape[0]} x {shape[1]}",
        )
    case.witness()


def step(module: nn.Module, output: Tensor) -> None:
    """Take one step of an optimiser."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    output.square().mean().backward()
    optimiser.step()


def matrices(module: nn.Module, shape: tuple[int, int]) -> int:
    """Return how many different parameters have a shape."""
    return len({id(p) for p in module.parameters() if tuple(p.shape) == shape})


def _as_plain(output: Any) -> Any:
    """Turn a record of outputs (a ModelOutput, a dataclass) into a dict, so that all of its tensors are found."""
    return dict(vars(output)) if hasattr(output, "__dataclass_fields__") else output


@holds(
    "parameters.all-used",
    statement="Every parameter is connected to the output.",
    formula="d f / d theta exists for every theta",
    source="A parameter without a gradient is never trained.",
    kinds=_MODULES,
    unless=needs_module,
    examples_factor=0.3,
    catches=("EM07", "IN02", "ME02", "parameters-unused"),
)
def every_parameter_is_connected(case: Case) -> None:
    """All outputs of the model count, also those that the subject's forward does not pick (a pooler beside the hidden
    states). A gradient must exist; it may be zero by symmetry (softmax cancels a key bias). A matrix whose gradient is
    exactly zero though the output depends on it (a choice without a weight) is never trained either.
    """
    built = case.built()
    module = _is_module(case, built)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        case.integer("none", 0, 1)
        case.witness()
        return
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    raw: list[Any] = []
    if isinstance(module, torch.jit.ScriptModule):
        case.does_not_apply("it is a ScriptModule, whose parts torch lets nobody watch")
    hook = module.register_forward_hook(lambda m, args, output: raw.append(output))
    try:
        output = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    finally:
        hook.remove()
    outputs = [o for o in (output, *tree_leaves([_as_plain(o) for o in raw])) if isinstance(o, Tensor)]
    reached = [o for o in outputs if o.requires_grad and o.is_floating_point()]
    case.require(
        torch.stack([case.apply(has_graph, o) for o in (outputs if not reached else reached[:1])]).any(),
        "the output is connected to no parameter",
        got="no gradient",
        expected="gradients",
    )
    total = torch.stack([(o * case.normal(*o.shape, dtype=o.dtype)).sum().to(built.dtype) for o in reached]).sum()
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True, retain_graph=True)
    unused = [name for (name, _), g in zip(named, gradients, strict=True) if g is None]
    case.equal(
        case.apply(not_reached, module, total) if unused else [],
        [],
        f"{len(unused)} of {len(named)} parameters are not connected to the output",
        got=", ".join(unused[:4]) + (" ..." if len(unused) > 4 else ""),
        expected="a gradient for each",
    )
    zero = [(n, p) for (n, p), g in zip(named, gradients, strict=True) if p.ndim > 1 and g is not None and not g.any()]
    for name, parameter in zero[:3]:
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(case.normal(*kept.shape, dtype=kept.dtype) * (size_of(kept) or 1.0))
            moved = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
            parameter.copy_(kept)
        changed = (moved - output).detach().abs().max()
        case.require(
            changed <= case.tolerance(built) * size_of(output.detach()),
            f"the output depends on {name}, and its gradient is zero everywhere",
            got="a gradient of zeros",
            expected="a gradient: the output changes by " + f"{changed:.3g} with it",
            cause=lambda: "a choice (argmax, top-k, rounding) is made without a weight that is differentiable",
        )
    case.witness()


def not_reached(module: nn.Module, total: Tensor) -> list[str]:
    """Return the names of the parameters that a number does not depend on."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return [name for (name, _), g in zip(named, gradients, strict=True) if g is None]


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
    unless=(needs_module, why_unknown, _builds_any_size),
    examples_factor=0.2,
    catches=("IN02", "parameters-cap"),
)
def published_sizes_give_published_counts(case: Case) -> None:
    """Built on the meta device, which allocates nothing; only the sizes that the subject's facts can express are
    reached (a GPT-2 is tied, pre-LN, with learned positions). Sizes unlike those of exact-count show a hidden limit.
    """
    config = _PUBLISHED[case.integer("published", 0, len(_PUBLISHED) - 1)]
    assert case.subject.build is not None
    with torch.device("meta"):
        module = case.bench.call(case.subject.build, config)
    if not isinstance(module, nn.Module):
        case.does_not_apply("it is no torch module")
    wanted, got = total(expected_count(case.subject, config)), case.apply(count, module)
    case.equal(
        got,
        wanted,
        f"at d_model={config.d_model} the model has {got:,} parameters, the formula gives {wanted:,}",
        got=f"{got:,}",
        expected=f"{wanted:,}",
        error=abs(got - wanted),
        cause=lambda: surplus_cause(got - wanted, expected_count(case.subject, config), config),
    )
    case.witness()
