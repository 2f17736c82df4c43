"""Parameters: all registered, all used, tied where declared."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built, cast
from veriformer.properties.causes.registered import assignments, not_carried, tie_broken, tying_cause, untied_cause
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.derivatives.unused_parts import why_not_connected
from veriformer.properties.engine.calling import has_graph
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.violations import NotSpokenOfError
from veriformer.properties.families.dead_parts import moved_by, parts_count, without_graph
from veriformer.properties.families.parameters_renewed import new_weights_are_taken
from veriformer.properties.families.rounded_weights import cancelled_words
from veriformer.properties.families.vocabulary_matrices import (
    counts_wrongly,
    factorised,
    matrices,
    matrices_but_further_tables,
    shares_with_the_target,
)
from veriformer.properties.families.whole_images import all_of_it_is_connected, of_what_is_judged
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS

_ANOTHER_SEED = 20210611
"""What a new model draws differs from what the one had that wrote the state dict."""

_OTHER_DRAWS = 12  # an expert that is chosen for one token in twenty is missed in 12 draws of ten once in 500

_MODULES = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("softmax", "attention"))


def _is_module(case: Case, built: Built) -> nn.Module:
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("what build gives is no nn.Module, so nothing is registered in it")
    return built.module


def move(module: nn.Module, there: torch.dtype, back: torch.dtype) -> None:
    """Move a module to a dtype and back; of complex tables, which torch would cut, both parts stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scripted module's parameters are no leaves to torch, which says so
        cast(cast(module, there), back)


def load_into(module: nn.Module, saved: nn.Module) -> None:
    """Load the state dict of one module into another."""
    module.load_state_dict(saved.state_dict())


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


def hidden_parts(module: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """Name what hangs on plain attributes with parameters that parameters() does not see, with these parameters.

    Those on the meta device hold nothing: a template that is called with weights from elsewhere.
    """
    hidden_parts = []
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
                own = found.parameters() if isinstance(found, nn.Module) else (found,)
                hidden = [p for p in own if isinstance(p, nn.Parameter) and id(p) not in known and not p.is_meta]
                if hidden and id(found) not in known:
                    hidden_parts.append((label, hidden))
    return hidden_parts


def hidden_and_read(module: nn.Module, run: Callable[[], Tensor]) -> list[str]:
    """Name what is hidden and changes the output: the parameters of a template that is called with others do not."""
    names = []
    for label, hidden in hidden_parts(module):
        with torch.no_grad():
            before = run().clone()
            kept = [p.detach().clone() for p in hidden]
            for p in hidden:
                p.copy_(torch.linspace(0.5, 1.5, p.numel()).reshape(p.shape))
            after = run()
            for p, value in zip(hidden, kept, strict=True):
                p.copy_(value)
        if not torch.equal(after, before):
            names.append(label)
    return names


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
    """A layer in a Python list is in no state dict; a tensor in an attribute stays when the model moves. What refuses
    to be copied or pickled (a class defined inside a function, a parametrised or a scripted module, one that keeps a
    tensor with a graph) is judged by its state dict alone. A template whose own parameters the output does not depend
    on, as functional_call has it, is no part of the model. Weights that are loaded after a call are those computed by.
    """
    built = case.built()
    module = _is_module(case, built)
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    if hidden_parts(module):
        hidden = case.apply(hidden_and_read, module, case.caller(built, *tensors, *inputs.extras))
        case.equal(
            hidden,
            [],
            f"{hidden[0] if hidden else ''!r} holds parameters and is not registered: "
            "it is neither saved, moved nor trained",
            got="a plain attribute",
            expected="a registered module, parameter or buffer",
            cause=lambda: (
                f"{hidden[0]} stands in a plain list or dict: ParameterList, ModuleList, ModuleDict register"
                if "[" in hidden[0]
                else None
            ),
        )
    before = case.call(built, *tensors, *inputs.extras).detach().clone()
    twins: list[tuple[str, nn.Module]] = []
    wide = torch.float64 if torch.float64 in judged_dtypes(case.bench) else built.dtype
    with contextlib.suppress(NotSpokenOfError):
        twins.append(("deepcopy", case.copy_of(built).module))
        moved = case.copy_of(built).module
        case.apply(move, moved, wide, built.dtype)
        twins.append(("moving to another dtype and back", moved))

    def fresh() -> nn.Module:
        return _is_module(case, case.bench.pool.fresh(built.config, built.dtype, raw=True, seed=_ANOTHER_SEED))

    if case.subject.build is not None:
        other = fresh()
        try:
            case.apply(load_into, other, module)
        except RuntimeError as problem:
            told = str(problem).strip().replace("\n", " ")[:200]
            case.require(False, "its state dict cannot be loaded into a new model of the same sizes", got=told)
        twins.append(("its state dict, loaded into a new model,", other))
    with contextlib.suppress(Exception):  # whatever a class that cannot be pickled raises
        twins.append(("pickle", pickle.loads(pickle.dumps(module))))
    if not twins:
        case.does_not_apply("it can neither be copied nor pickled, and there is no build to load its state dict into")
    for way, twin in twins:
        after = case.call(replace(built, module=twin.eval()), *tensors, *inputs.extras)
        case.close(
            after, before, f"{way} changes the output", constants_allowed=True,
            cause=lambda twin=twin: not_carried(module, twin),  # type: ignore[misc]
        )  # fmt: skip
    if case.subject.build is not None:
        new_weights_are_taken(case, built, module, inputs, fresh, load_into)
    case.witness()


@holds(
    "parameters.tied",
    statement="Output projection and token embedding are one parameter if and only if they are declared so.",
    formula="tied: W_out is E, after loading a state dict and after an optimiser step",
    source="Vaswani et al. 2017, section 3.4; Press & Wolf 2017.",
    kinds=("encoder", "decoder", "encoder_decoder"),
    unless=(
        needs_module,
        needs_fact("tied"),
        lambda s: None if s.takes_tokens else "there are no token embeddings",
    ),
    examples_factor=0.3,
    catches=("tied-copy", "tied-not", "EM06"),
)
def tying_survives(case: Case) -> None:
    """Matrices of V x D are counted by identity; a copy made once drifts apart at the first step. What a model says of
    its own size (num_parameters(), get_num_params() ...) counts every parameter once too; some leave out tables.
    """
    built = case.built(fresh=True)
    module, config = _is_module(case, built), built.config
    inputs = ordinary(case.subject, config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    output = case.call(built, *tensors)
    if case.subject.kind == "encoder" and output.shape[-1] < config.vocab_size:
        case.does_not_apply("it gives no logits: nothing projects to its vocabulary")
    shape = (
        max(config.vocab_size, output.shape[-1]),
        config.d_model,
    )  # a vocabulary may have rows that are never drawn

    alike = {config.d_ff, config.max_len, *(n * shape[1] for n in range(1, 5))}
    if case.subject.module is not None and shape[0] in alike:
        case.does_not_apply("other matrices of it have as many rows as its vocabulary")
    if case.subject.fact("tied") and not matrices(module, shape):
        shape = factorised(module, shape)
    if case.subject.fact("tied") and not case.apply(matrices, module, shape):
        case.does_not_apply("it has no matrix of the vocabulary by the model's width: the embedding is a product, say")
    if not any(isinstance(m, nn.Embedding) for m in module.modules()):
        case.does_not_apply("no nn.Embedding is found in it, so it is not known which matrices are to be two")
    embeds = any(isinstance(m, nn.Embedding) and m.weight.shape == shape for m in module.modules())
    if not case.subject.fact("tied") and not embeds:
        case.does_not_apply("no one table of it embeds the whole vocabulary in the model's width")
    wanted = 1 if case.subject.fact("tied") else 2 + (case.subject.kind == "encoder_decoder")
    if wanted == 1 and case.subject.kind == "encoder_decoder" and shares_with_the_target(module, shape):
        wanted = 2  # the source has a table of its own
    words = "one matrix, shared" if wanted == 1 else f"{wanted} matrices of their own"
    miscounted = case.apply(counts_wrongly, module)
    case.equal(
        miscounted, "", "what the model says of its own size counts a shared matrix twice, or takes it away twice",
        got=miscounted, expected="every parameter once, less whole tables at most",
    )  # fmt: skip
    models = [(module, "as it is built")]
    if output.requires_grad:
        case.apply(step, module, output)
        models = [(module, "after an optimiser step")]
    with contextlib.suppress(NotSpokenOfError):
        twin = case.copy_of(built).module
        twin.load_state_dict(module.state_dict())
        models.append((twin, "after deepcopy and loading a state dict"))
    if case.subject.fact("tied") is False and case.subject.kind == "encoder_decoder" and matrices(module, shape) == 2:
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        if not any(id(m.weight) in tables for m in module.modules() if isinstance(m, nn.Linear)):
            wanted, words = 2, "two matrices, one embedding for both sides"
    counted = matrices if wanted > 1 or case.subject.kind == "encoder_decoder" else matrices_but_further_tables
    for model, when in models:
        case.equal(
            found := case.apply(counted, model, shape),
            wanted,
            f"{when} the embedding and the output projection are not {words}",
            got=f"{found} matrices of {shape[0]} x {shape[1]}",
            cause=lambda: _tying(case, shape, wanted),
        )
    case.witness()


def _tying(case: Case, shape: tuple[int, int], wanted: int) -> str | None:
    """Look at a model as it is built, before its weights are drawn anew or trained."""
    with assignments() as noted:
        raw = case.bench.pool.fresh(case.config(), case.bench.pool.get(case.config(), torch.float32).dtype, raw=True)
    if wanted != 1:
        return untied_cause(raw.module, shape)
    return tie_broken(raw.module, shape, noted) or tying_cause(raw.module, shape)


def step(module: nn.Module, output: Tensor) -> None:
    """Take one step of an optimiser."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    output.square().mean().backward()
    optimiser.step()


def _as_plain(output: Any) -> Any:
    """Turn a record of outputs (a ModelOutput, a dataclass) into a dict, so that all of its tensors are found."""
    return dict(vars(output)) if hasattr(output, "__dataclass_fields__") else output


@holds(
    "parameters.all-used",
    statement="Every parameter is connected to the output.",
    formula="d f / d theta exists for every theta",
    source="A parameter without a gradient is never trained.",
    kinds=_MODULES,
    unless=(needs_module, excludes_fact("inference_only")),
    goes_wide=True,
    goes_deep=True,
    examples_factor=0.3,
    catches=("EM07", "IN02", "ME02", "parameters-unused"),
)
def every_parameter_is_connected(case: Case) -> None:
    """All outputs of the model count, also those that the subject's forward does not pick (a pooler beside the hidden
    states), and the tokens that patches of an image become where the forward begins behind them. A gradient must exist;
    it may be zero by symmetry (softmax cancels a key bias). A matrix whose gradient is exactly zero though the output
    depends on it (a choice without a weight) is never trained either. A forward without any gradient is a question: it
    may be meant for inference alone.
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
    with _noting(module, raw):
        output = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    outputs = [o for o in (output, *tree_leaves([_as_plain(o) for o in raw])) if isinstance(o, Tensor)]
    outputs += _patched(case, built)
    reached = [o for o in outputs if o.requires_grad and o.is_floating_point()]
    case.require(
        torch.stack([case.apply(has_graph, o) for o in (outputs if not reached else reached[:1])]).any(),
        "the output is connected to no parameter",
        got="no gradient",
        expected="gradients",
        cause=lambda: without_graph(case, built, inputs),
        asks=("inference_only", True),
    )
    total = torch.stack([(o * case.normal(*o.shape, dtype=o.dtype)).sum().to(built.dtype) for o in reached]).sum()
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True, retain_graph=True)
    unused = [name for (name, _), g in zip(named, gradients, strict=True) if g is None]
    lost: list[str] = case.apply(not_reached, module, total) if unused else []
    for _ in range(_OTHER_DRAWS if _are_experts(lost, named) else 0):
        others = ordinary(case.subject, built.config, case.generator, built.dtype)
        again = case.call(built, *[x.to(case.bench.device) for x in others.tensors], *others.extras)
        still: list[str] = case.apply(not_reached, module, again.sum())
        lost = [name for name in lost if name in still]
    if lost and case.subject.kind == "layer":  # of other kinds the whole is judged, whatever its forward calls
        lost = case.apply(of_what_is_judged, lost, module, bool(raw))
    case.equal(
        lost,
        [],
        f"{len(lost)} of {len(named)} parameters are not connected to the output",
        got=", ".join(lost[:4]) + (" ..." if len(lost) > 4 else ""),
        expected="a gradient for each",
        cause=lambda: why_not_connected(case, lost),
    )
    all_of_it_is_connected(case, built)
    parts_count(case, built, inputs, output, gradients)
    zero = [(n, p) for (n, p), g in zip(named, gradients, strict=True) if p.ndim > 1 and g is not None and not g.any()]
    for name, parameter in [] if case.subject.fact("structure") == "other" else zero[:3]:
        changed = moved_by(case, built, parameter, inputs, output)
        case.require(
            changed <= case.tolerance(built) * size_of(output.detach()),
            f"the output depends on {name}, and its gradient is zero everywhere",
            got="a gradient of zeros",
            expected="a gradient: the output changes by " + f"{changed:.3g} with it",
            cause=lambda n=name, p=parameter: (  # type: ignore[misc]
                cancelled_words(total, n, p)
                or "a choice (argmax, top-k, rounding) is made without a weight that is differentiable"
            ),
            asks=("structure", "other"),
        )
    case.witness()


def _patched(case: Case, built: Built) -> list[Tensor]:
    """Return the tokens that patches of an image become, where the subject says how."""
    if case.subject.patches is None or case.subject.image is None:
        return []
    image = case.normal(1, *case.subject.image, dtype=built.dtype)
    return [case.ask("patches", image, built=built)]


def _are_experts(lost: list[str], named: list[tuple[str, nn.Parameter]]) -> bool:
    """Whether what is lost has siblings in a list that are not: experts that nobody chose, perhaps."""

    def place(name: str) -> str:
        return re.sub(r"\.\d+\.", ".#.", name)

    found = {place(name) for name, _ in named if name not in lost}
    return bool(lost) and all(re.search(r"\.\d+\.", name) and place(name) in found for name in lost)


@contextlib.contextmanager
def _noting(module: nn.Module, raw: list[Any]) -> Iterator[None]:
    """Note what a module gives; a scripted one takes no hook, and gives what its forward picks."""
    if isinstance(module, torch.jit.ScriptModule):
        yield
        return
    hook = module.register_forward_hook(lambda m, args, output: raw.append(output))
    try:
        yield
    finally:
        hook.remove()


def not_reached(module: nn.Module, total: Tensor) -> list[str]:
    """Return the names of the parameters that a number does not depend on."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True, retain_graph=True)
    return [name for (name, _), g in zip(named, gradients, strict=True) if g is None]
