"""What no library claims: a user's own module class, instance or function, its kind given or told by a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

_SIZES = tuple(f.name for f in fields(DrawnConfig))
_ALIASES: dict[str, str] = {
    "dim": "d_model", "embed_dim": "d_model", "hidden_size": "d_model", "n_embd": "d_model", "width": "d_model",
    "d_hidden": "d_ff", "ffn_dim": "d_ff", "dim_feedforward": "d_ff", "intermediate_size": "d_ff", "hidden_dim": "d_ff",
    "heads": "num_heads", "n_heads": "num_heads", "n_head": "num_heads", "nhead": "num_heads",
    "num_attention_heads": "num_heads", "h": "num_heads",
    "depth": "num_layers", "n_layers": "num_layers", "n_layer": "num_layers", "layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "vocab": "vocab_size", "num_tokens": "vocab_size", "n_vocab": "vocab_size",
    "max_seq_len": "max_len", "block_size": "max_len", "max_length": "max_len", "context_length": "max_len",
    "n_classes": "num_classes", "dropout_p": "dropout", "p_drop": "dropout",
    "num_kv_heads": "num_key_value_heads", "n_kv_heads": "num_key_value_heads",
}  # fmt: skip
"""Argument names of other houses, and the size that each one means."""


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
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        return _from_class(thing, kind)
    if isinstance(thing, nn.Module):
        return _from_instance(thing, kind)
    if callable(thing) and kind is not None:
        forward = thing
        return Subject(
            kind=kind,
            name=getattr(thing, "__name__", kind),
            forward=_Function(forward),
            mask_forms=_mask_forms(forward, kind),
        )
    return None


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


def _from_class(cls: type[nn.Module], kind: str | None) -> Subject:
    given: dict[str, str] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        size = name if name in _SIZES else _ALIASES.get(name)
        if size is not None:
            given[name] = size
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"{cls.__name__} needs the argument {name!r}, which is no size that is known here; write "
                f"Subject(kind=..., build=lambda c: {cls.__name__}(...), forward=lambda m, x: m(x)); "
                f"known are: {', '.join([*_SIZES, *_ALIASES])}"
            )

    build = functools.partial(build_of, cls, given)
    return _described(cls.__name__, kind, _sample(cls, build), build=build)


def build_of(cls: type[nn.Module], given: Mapping[str, str], config: DrawnConfig) -> nn.Module:
    """Return an instance of the drawn sizes; `given` says which argument gets which size."""
    return cls(**{name: getattr(config, size) for name, size in given.items()})


def _sample(cls: type[nn.Module], build: Callable[[DrawnConfig], nn.Module]) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            return build(DrawnConfig())
    except Exception as problem:
        raise TypeError(
            f"{cls.__name__} cannot be built from drawn sizes: {type(problem).__name__}: {problem}; write "
            f"Subject(kind=..., build=lambda c: {cls.__name__}(...), forward=lambda m, x: m(x))"
        ) from problem


def _from_instance(module: nn.Module, kind: str | None) -> Subject:
    return _described(type(module).__name__, kind, module, module=module, config=_sizes_of(module))


def _sizes_of(module: nn.Module) -> DrawnConfig:
    """Read the sizes of an instance off its attributes and its embedding."""
    found: dict[str, Any] = {}
    holders = [module, getattr(module, "config", None), *module.modules()]
    for holder in holders:
        for name, size in [*((n, n) for n in _SIZES), *_ALIASES.items()]:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0 and size != "dropout":
                found.setdefault(size, value)
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is not None:
        found.setdefault("vocab_size", embedding.num_embeddings)
        found.setdefault("d_model", embedding.embedding_dim)
    if "d_model" not in found:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        found["d_model"] = linear.in_features if linear is not None else 8
    if "max_len" not in found and (end := _end_of_positions(module, found["d_model"])) is not None:
        found["max_len"] = end
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


def _described(name: str, kind: str | None, sample: nn.Module, **given: Any) -> Subject:
    chosen = kind or _told_kind(name, sample)
    names = inspect.signature(sample.forward).parameters
    forms = ("padding",) if any(n in names for n in ("attention_mask", "source_mask", "memory_mask")) else ()
    takes_tokens = any(isinstance(m, nn.Embedding) for m in sample.modules())
    inputs = None
    if chosen in ("encoder", "decoder", "encoder_decoder", "classifier"):
        inputs = "tokens" if takes_tokens else "embeddings"
    return Subject(kind=chosen, name=name, forward=call, mask_forms=forms, inputs=inputs, **given)


def _told_kind(name: str, sample: nn.Module) -> str:
    """Tell the kind by what goes in and comes out: tokens or embeddings to logits, hidden states or one row."""
    sizes = _sizes_of(sample)
    tokens = torch.randint(0, sizes.vocab_size, (2, 5), generator=torch.Generator().manual_seed(0))
    embeddings = torch.randn(2, 5, sizes.d_model, generator=torch.Generator().manual_seed(0))
    takes_tokens = any(isinstance(m, nn.Embedding) for m in sample.modules())
    was_training = sample.training
    sample.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = first_tensor(sample(tokens if takes_tokens else embeddings))
    except Exception as problem:
        raise TypeError(
            f"{name} was called with {'token ids' if takes_tokens else 'embeddings'} and raised "
            f"{type(problem).__name__}: {problem}; say what it is: pass kind=... or write a Subject"
        ) from problem
    finally:
        sample.train(was_training)
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    if len(shape) == 3 and shape[:2] == (2, 5):
        if not takes_tokens:
            return "layer"
        return "decoder" if shape[2] == sizes.vocab_size else "encoder"
    if len(shape) == 2 and shape[0] == 2:
        return "classifier"
    got = f"shape {list(shape)}" if shape else type(output).__name__
    raise TypeError(f"{name} gave {got}, which tells no kind; pass kind=... or write a Subject")
