"""What no library claims: a user's own module class, instance or function, its kind given or told by a call."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.finding import beside, offering
from veriformer.properties.adapters.beside.offers import Offer
from veriformer.properties.adapters.constructing.building import (
    NotBuiltError,
    Recipe,
    is_a_configuration,
    own_recipe,
    recipe_of,
)
from veriformer.properties.adapters.constructing.heads import widths_taken
from veriformer.properties.adapters.constructing.ready_made import returns_a_module
from veriformer.properties.adapters.constructing.size_names import meanings, size_of_name
from veriformer.properties.adapters.constructing.uninitialised import give_values, uninitialised
from veriformer.properties.adapters.functions import attention_of, is_a_softmax, softmax_of, takes_scores_parts
from veriformer.properties.adapters.masks.masking import sequence_of
from veriformer.properties.adapters.unknown.calling import understood
from veriformer.properties.adapters.unknown.parts import kind_of_table
from veriformer.properties.adapters.unknown.understanding import NotCalledError, Understood, embeds
from veriformer.properties.adapters.unknown.unused import positions_by_name, window_by_name
from veriformer.properties.adapters.unknown.wiring import stirred
from veriformer.properties.adapters.unknown.written import attempt, written
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_EITHER = ("encoder", "decoder", "encoder_decoder", "classifier")
_SEED = 1
"""Of a sample, and of what it is called on."""
_MODULES = (*_EITHER, "layer", "self_attention", "cross_attention", "norm", "feed_forward")


def first_tensor(output: Any) -> Any:
    """Return the tensor that a model means: its output, `.logits`, `.last_hidden_state`, or the first item."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple | list) and output else output


def call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the model and pick its tensor."""
    return first_tensor(model(*args, **kwargs))


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Take a module class whose arguments are sizes, an instance, or a function (with a kind)."""
    is_class = isinstance(thing, type) and issubclass(thing, nn.Module)
    if is_class or (makes_a_module(thing) and kind in (None, *_MODULES)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _from_class(thing, kind)
    if isinstance(thing, nn.Module):
        return _from_instance(thing, kind)
    if kind in (None, "attention") and takes_scores_parts(thing) and "attention_mask" not in _arguments(thing):
        return attention_of(thing)
    if kind in (None, "softmax") and is_a_softmax(thing):
        return softmax_of(thing)
    if callable(thing) and kind is not None:
        takes_model = next(iter(_arguments(thing)), "") in MODEL_FIRST
        return Subject(
            kind=kind,
            name=getattr(thing, "__name__", kind),
            forward=thing if takes_model else _Function(thing),
            mask_forms=_mask_forms(thing, kind),
        )
    return None


def _arguments(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


_FAR = 4096
"""Positions of a table that a part which rotates is built with; vectors are put farther apart than texts are long."""

MODEL_FIRST = ("model", "module")
"""Names by which a function of somebody's says that it is called with a model first, as `Subject.forward` is."""


class _Function:
    """A plain function as a forward: it gets no model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__signature__ = inspect.signature(_with_model(function))

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _with_model(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters.values())
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
    only = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]

    def stand_in() -> None:
        """Carry the signature."""

    stand_in.__signature__ = inspect.Signature([model, *only])  # type: ignore[attr-defined]
    return stand_in


def _mask_forms(function: Callable[..., Any], kind: str) -> tuple[str, ...]:
    names = inspect.signature(function).parameters
    usual = ("pairwise",) if kind == "attention" else ("padding",)
    return usual if any(n in names for n in ("attention_mask", "source_mask", "memory_mask")) else ()


def _from_class(thing: Any, kind: str | None) -> Subject:
    """Take a class at drawn sizes; at its own where it cannot be called at those."""
    try:
        recipe = recipe_of(thing)
        found = _at(recipe, thing, kind)
        return found if found.kind != "rotary" else _of_heads(found, recipe, thing)
    except (NotBuiltError, NotCalledError) as problem:
        own = own_recipe(thing)
        if own is None:
            raise
        try:
            return _at(own, thing, kind)
        except TypeError:
            raise problem from problem.__cause__


def _of_heads(found: Subject, recipe: Recipe, thing: Any) -> Subject:
    """Return the subject of a part that rotates, as wide as a head and with a table that is far longer than a text."""
    source = re.sub(r"c\.max_len\b", str(_FAR), recipe.source)
    if "c.num_heads" not in source and "c.d_head" not in source:
        source = re.sub(r"c\.d_model\b", "c.d_head", source)
    try:
        return _at(replace(recipe, source=source), thing, "rotary")
    except (NotBuiltError, NotCalledError):
        return found


def _at(recipe: Recipe, thing: Any, kind: str | None) -> Subject:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        build = attempt(recipe.source, "build", recipe.names)
        sample = build(DrawnConfig())
    if not isinstance(sample, nn.Module):
        raise TypeError(f"{thing.__name__} gave a {type(sample).__name__}, which is no module; write a Subject")
    give_values(sample, uninitialised(lambda: build(DrawnConfig())), seed=0)
    sizes = DrawnConfig() if recipe.sizes else sizes_of(sample)
    fixed = _fixed(sample, recipe.sizes) if recipe.sizes else {}
    sizes = replace(sizes, **{name: value for name, (value,) in fixed.items()})
    found, offers = _understood(thing.__name__, kind, sample, sizes, recipe.padding_id)
    sizes = _at_its_length(thing.__name__, found, sizes, recipe.sizes)
    notes, domain = recipe.notes, dict[str, Any](fixed)
    if not recipe.sizes:
        rates = {m.p for m in sample.modules() if isinstance(m, nn.Dropout)}
        domain = {f.name: (getattr(sizes, f.name),) for f in fields(DrawnConfig)} | {
            "dropout": tuple(rates)[:1] or (0.0,)
        }
    if {"d_model", "num_heads"} <= recipe.sizes and not found.part and not fixed:
        more, told = _widths_taken(recipe, found)
        domain, notes = {**domain, **more}, (*notes, *([told] if told else []))
    if "vocab_size" in domain:
        domain["vocab_size"] = (sizes.vocab_size - found.counts_from_one,)
    source = recipe.source
    if found.part:
        made = re.search(r"return (.*)\n$", source)
        assert made is not None
        source = _of_a_part(source, made.start(1), made[1], found.part)
    given: dict[str, Any] = {}
    if found.image is not None:
        given = {"image": found.image, "patches": written(PATCHES.format(enters=found.enters), "patches", {})}
    if found.counts_from_one:
        source = re.sub(r"c\.vocab_size\b(?! \+ 1)", "c.vocab_size + 1", source)
    if found.one_longer:
        source = re.sub(r"c\.max_len\b", "(c.max_len + 1)", source)
    subject = _subject(
        thing.__name__, sample, found, build=written(source, "build", recipe.names), domain=domain, **given
    )
    notes = (*notes, *_of_complex_tables(sample))
    return offering(replace(subject, notes=(*notes, *subject.notes)), sample, offers)


def _of_complex_tables(sample: nn.Module) -> list[str]:
    """Return what is to be said of tables that torch cuts when a model is moved to another dtype."""
    tables = [name for name, t in (*sample.named_parameters(), *sample.named_buffers()) if t.is_complex()]
    if not tables:
        return []
    return [f"{tables[0]} is complex: model.to(dtype) discards its imaginary part, float32 included; here it is kept"]


def _at_its_length(name: str, found: Understood, sizes: DrawnConfig, drawn: frozenset[str]) -> DrawnConfig:
    """Return the sizes with the one length that a model takes.

    Raises:
        NotCalledError: the length, or the channels, change with the sizes that are drawn.
    """
    if not found.own_sizes:
        return sizes
    if "max_len" in drawn or (drawn and found.own_sizes["d_model"] != sizes.d_model):
        raise NotCalledError(
            f"{name} takes sequences of {found.own_sizes['max_len']} positions alone, which change with its sizes; "
            "give an instance of it, or write a Subject whose forward lays shorter ones out"
        )
    own = replace(sizes, **found.own_sizes) if not drawn else sizes
    return own if own.d_model % own.num_heads == 0 else replace(own, num_heads=1, num_key_value_heads=1)


def _widths_taken(recipe: Recipe, found: Understood) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the widths of heads that a class can be called at, where these are few; see `widths_taken`."""
    build = attempt(recipe.source, "build", recipe.names)

    def runs(sizes: DrawnConfig) -> None:
        with torch.random.fork_rng(devices=[]):
            x = sequence_of(found, sizes)
            found.wiring.unmasked().call(build(sizes).eval(), *(x for _ in found.wiring.inputs))

    return widths_taken(runs) if not found.counts_from_one and found.kind in _MODULES else ({}, "")


def _fixed(sample: nn.Module, drawn: frozenset[str]) -> dict[str, tuple[int]]:
    """Return the sizes that a class does not take and its model has, each as all of its domain."""
    own, names = sizes_of(sample), list[str]()
    if "vocab_size" not in drawn and embeds(sample):
        names.append("vocab_size")
    if "d_model" not in drawn:
        names += [n for n in ("d_model", "num_heads", "num_key_value_heads", "num_layers", "max_len") if n not in drawn]
    return {name: (getattr(own, name),) for name in names}


PATCHES = """import copy


def patches(model, images):
    whole, entered = copy.deepcopy(model.whole).float().eval(), []
    hook = whole.{enters}.register_forward_pre_hook(lambda part, given: entered.append(given[0]))
    whole(images.float())
    hook.remove()
    return entered[0]
"""


def _of_a_part(source: str, start: int, made: str, part: str) -> str:
    """Return the source that builds a part of a model, which knows the whole that it was taken of."""
    lines = [f"whole = {made}", f"part = {part.format(model='whole')}",
             "part.__dict__['whole'] = whole  # no part of it: what is before it and behind it is not judged with it",
             "return part"]  # fmt: skip
    head = source[:start].removesuffix("return ")
    return f"import torch\n\n\n{head}" + "\n    ".join(lines) + "\n"


def _from_instance(module: nn.Module, kind: str | None) -> Subject:
    name, config = type(module).__name__, sizes_of(module)
    found, offers = _understood(name, kind, module, config)
    if found.part:
        raise TypeError(f"{name} takes images, which are no sequence; give its stack instead, or its class")
    if found.counts_from_one:
        config = replace(config, vocab_size=config.vocab_size - 1)
    config = replace(config, **found.own_sizes)
    return offering(_subject(name, module, found, module=module, config=config), module, offers)


def makes_a_module(function: Any) -> bool:
    """Whether a function takes sizes and nothing else that it needs: one that makes a model, as `make_model(N, h)`.

    One whose source shows that it makes a module may take a configuration, too.
    """
    if not inspect.isfunction(function):
        return False
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [n for n in required if n not in meanings(required)]
    return bool(required) and (not others or (all(map(is_a_configuration, others)) and returns_a_module(function)))


def sizes_of(module: nn.Module) -> DrawnConfig:
    """Read the sizes of an instance off its attributes and its embedding."""
    found: dict[str, Any] = {}
    known = {f.name for f in fields(DrawnConfig)}
    own = next((vars(module)[n] for n in ("config", "cfg", "args", "params") if n in vars(module)), None)
    for holder in [module, own, *module.modules()]:
        values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
        for name, value in values.items():
            size = size_of_name(name) if isinstance(name, str) and isinstance(value, int) else None
            if size in known and not isinstance(value, bool) and value > 0 and size != "dropout":
                found.setdefault(str(size), value)
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is not None:
        found["vocab_size"] = embedding.num_embeddings
        found["d_model"] = embedding.embedding_dim
    if "d_model" not in found:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        found["d_model"] = linear.in_features if linear is not None else 8
    if (end := _end_of_positions(module, found["d_model"])) is not None:
        found["max_len"] = min(end, found.get("max_len", end))
    found.setdefault("num_key_value_heads", found.get("num_heads", 1))
    return DrawnConfig(**{"num_heads": 1, **found})


def _end_of_positions(module: nn.Module, d_model: int) -> int | None:
    """Return the rows of the shortest table that is called positions by its name, or None."""
    tables = [*module.named_parameters(), *module.named_buffers()]
    lengths = [
        max(table.shape[:-1])
        for name, table in tables
        if table.ndim >= 2
        and table.shape[-1] == d_model
        and ("pos" in name.lower() or name.endswith((".pe", ".wpe.weight")))
    ]
    return min(lengths, default=None)


def _understood(
    name: str, kind: str | None, sample: nn.Module, sizes: DrawnConfig, padding_id: str = ""
) -> tuple[Understood, list[Offer]]:
    """Find out how a sample is called and what it has beside, on a copy: weights are moved, its mode is changed."""
    try:
        copied = copy.deepcopy(sample)
    except Exception:  # a model that keeps a tensor with a graph, say: its weights are left alone
        copied = sample
    was_training = {m: m.training for m in sample.modules()}
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(_SEED)  # what a file is taken for is the same each time
            copied.eval()
            if copied is not sample:
                copied.to("cpu").float()
                stirred(copied)
            found = understood(copied, sizes, kind, name, padding_id)
            return found, beside(copied, found, sizes)
    finally:
        for module, mode in was_training.items():
            module.training = mode


def _subject(name: str, sample: nn.Module, found: Understood, **given: Any) -> Subject:
    notes, guesses = found.notes, dict[str, Any]()
    if found.inputs == "tokens" and (said := positions_by_name(sample)):
        guesses["positions"] = said[0]
        notes += (f"positions = {said[0]!r}: by the name {said[1]!r} in its code; declare it",)
    if found.kind == "decoder" and (window := window_by_name(sample)):
        guesses["window"] = window[0]
        notes += (f"window = {window[0]}: by the name {window[1]!r} of an attribute; declare it",)
    if found.kind == "positions":
        guesses = kind_of_table(sample)
        notes += (f"positions = {guesses['positions']!r}: by its code and its parameters; declare it",)
    return Subject(
        kind=found.kind, name=name, forward=written(found.wiring.source, "forward", {}), mask_forms=found.mask_forms,
        inputs=found.inputs if found.kind in _EITHER else None, declares=found.declares, notes=notes, guesses=guesses,
        **given,
    )  # fmt: skip
