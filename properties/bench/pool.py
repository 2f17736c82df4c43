"""Built models: made once per size and dtype, re-drawn to unit gain, reused; a given instance is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.constructing.uninitialised import give_values, uninitialised
from veriformer.properties.bench.guards import (
    SizesRefusedError,
    SubjectError,
    has_room,
    insist_on_room,
    is_its_own,
    limited,
)
from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.redraw import redraw_weights
from veriformer.properties.subject.palette import LONG, further, palette
from veriformer.properties.subject.raised import told
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

LARGE = 5_000_000
"""Parameters of a ready-made instance from which on what is done with it is planned by its cost."""

_COPIES = 4  # in float64, for which there must be room if several are to be kept

REFUSALS = (ValueError, AssertionError, NotImplementedError)
"""What is raised that says no to its arguments; all else is a mistake in it."""

WEIGHT_SEED = 20170612  # any fixed number: weights need to be generic, not different each run


@dataclass
class Built:
    """One model ready to be called.

    Attributes:
        module: what `Subject.forward` gets as its first argument (None for a plain function).
        config: its sizes.
        dtype: of its parameters and floating point inputs.
        is_fresh: built by the suite (weights re-drawn), rather than given.
        is_raw: built by the suite, with the weights of its own initialisation.
        seed: of torch's generator while it was built.
        is_as_built: its parameters have the dtypes that `build` gave them.
    """

    module: Any
    config: DrawnConfig
    dtype: torch.dtype
    is_fresh: bool
    is_raw: bool = False
    seed: int = WEIGHT_SEED
    is_as_built: bool = False


class ModelPool:
    """Builds and keeps the models of one subject.

    Attributes:
        told: called with every model that is handed out, while a failing case is written down.
        is_large: whether the subject is a ready-made instance of many parameters: where memory is
            short, one copy of it in another dtype is kept at a time.
    """

    def __init__(self, subject: Subject, device: torch.device, call_seconds: float = 0) -> None:
        self.subject = subject
        self.device = device
        self.call_seconds = call_seconds
        self.configs = palette(subject)
        self.reaching = further(subject)
        self.told: Callable[[Built], None] | None = None
        self.is_large = parameters_of(subject.module) >= LARGE
        self._built: dict[tuple[DrawnConfig, torch.dtype, bool], Built] = {}
        self._uninitialised: dict[DrawnConfig, tuple[str, ...]] = {}

    def get(self, config: DrawnConfig, dtype: torch.dtype, *, raw: bool = False) -> Built:
        """Return the model for these sizes, in eval mode.

        Args:
            config: sizes; one of `configs`.
            dtype: parameter dtype.
            raw: keep the weights of the subject's own initialisation.

        Raises:
            SubjectError: `build` raised, or gave parameters that hold no values.
        """
        key = (config, dtype, raw)
        if key not in self._built:
            if self.is_large and not has_room(_COPIES * parameters_of(self.subject.module) * 8, self.device):
                self._built = {k: b for k, b in self._built.items() if b.module is self.subject.module}
            self._built[key] = self._make(config, dtype, raw)
        return self._handed_out(self._built[key])

    def fresh(self, config: DrawnConfig, dtype: torch.dtype, *, raw: bool = False, seed: int = WEIGHT_SEED) -> Built:
        """Return a model of its own, free to be altered (a copy where an instance was given).

        Args:
            config: sizes.
            dtype: parameter dtype.
            raw: keep the weights of the subject's own initialisation.
            seed: of torch's generator while it is built.
        """
        return self._handed_out(self._make(config, dtype, raw, copied=True, seed=seed))

    def as_built(self, config: DrawnConfig) -> Built:
        """Return a model of its own with its own weights in the dtypes that `build` gives; inputs have that of most."""
        built = self._make(config, None, raw=True)
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        for p in built.module.parameters() if isinstance(built.module, nn.Module) else ():
            if p.is_floating_point():
                sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        return self._handed_out(replace(built, dtype=max(sizes, key=lambda dtype: sizes[dtype]), is_as_built=True))

    def _handed_out(self, built: Built) -> Built:
        if self.told:
            self.told(built)
        return built

    def _make(
        self, config: DrawnConfig, dtype: torch.dtype | None, raw: bool, copied: bool = False, seed: int = WEIGHT_SEED
    ) -> Built:
        subject, named = self.subject, dtype or torch.float32
        if subject.is_functional:
            return Built(None, config, named, is_fresh=False)
        if subject.module is not None:
            return Built(self._adopted(named, copied), config, named, is_fresh=False)
        assert subject.build is not None
        with torch.random.fork_rng(devices=[]):
            reseed(seed)
            try:
                module = limited(subject.build, (config,), {}, self.call_seconds)
            except BaseException as problem:
                if not is_its_own(problem):
                    raise
                smallest = (self.configs[0], self.reaching[LONG])
                refuses = isinstance(problem, REFUSALS) and config not in smallest
                raise (SizesRefusedError if refuses else SubjectError)(
                    f"build raised {told(problem)} (for {config}); limit the sizes with domain= or mend build"
                ) from problem
        if isinstance(module, nn.Module):
            _refuse_unallocated(module)
            give_values(module, self.uninitialised(config), WEIGHT_SEED)
            module = self._moved(module, dtype)
            if not raw:
                redraw_weights(module, WEIGHT_SEED)
        return Built(module, config, named, is_fresh=True, is_raw=raw, seed=seed)

    def uninitialised(self, config: DrawnConfig) -> tuple[str, ...]:
        """Return the parameters that `build` gives no value; looked for at the smallest sizes first."""
        build = self.subject.build
        if build is None:
            return ()
        for sizes in (self.configs[0], config):
            if sizes not in self._uninitialised:
                self._uninitialised[sizes] = uninitialised(partial(build, sizes))
            if not self._uninitialised[sizes]:
                return ()
        return self._uninitialised[config]

    def _adopted(self, dtype: torch.dtype, copied: bool) -> Any:
        module = self.subject.module
        if not isinstance(module, nn.Module):
            return module
        _refuse_unallocated(module)
        own = next(((p.dtype, p.device.type) for p in module.parameters() if p.is_floating_point()), None)
        if own in (None, (dtype, self.device.type)) and not copied:
            return module
        if self.is_large:
            insist_on_room(parameters_of(module) * dtype.itemsize, self.device, f"a copy in {dtype}")
        return self._moved(duplicate(module), dtype)

    def _moved(self, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        try:
            moved = cast(module.to(self.device), dtype).eval()
        except Exception as problem:
            raise SubjectError(f"the model cannot be moved to {self.device} and {dtype}: {told(problem)}") from problem
        return moved


def cast(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Move a module to a dtype in place; complex tables keep their imaginary part, which `Module.to` discards."""
    if dtype is None or not is_partly_complex(module):
        return module.to(dtype)
    pairs = torch.complex128 if dtype == torch.float64 else torch.complex64
    return module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t.to(pairs) if t.is_complex() else t)


def is_partly_complex(module: nn.Module) -> bool:
    """Whether a parameter or a buffer of a module is complex."""
    return any(t.is_complex() for t in (*module.parameters(), *module.buffers()))


def duplicate(module: Any) -> Any:
    """Return a copy of a model; what in it cannot be copied (a lock, an open file) is shared by both.

    Raises:
        SubjectError: the model itself refuses to be copied.
    """
    memo: dict[int, Any] = {}
    for _ in range(2):
        try:
            return _as_leaves(copy.deepcopy(module, dict(memo)))
        except Exception as problem:
            refusal = problem
        memo = {id(value): value.detach() if isinstance(value, Tensor) else value for value in _uncopyable(module)}
    raise SubjectError(
        f"the model refuses to be copied: {told(refusal)}; give build=, which makes as many as are needed"
    ) from refusal


def _as_leaves(copied: Any) -> Any:
    """Let the parameters of a copy be trained: those of a scripted module are copied as a result of a computation."""
    for parameter in copied.parameters() if isinstance(copied, nn.Module) else ():
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_()
    return copied


def _uncopyable(module: Any) -> list[Any]:
    """Return the attributes of a model and its parts that cannot be copied, tensors with a graph among them."""
    found: list[Any] = []
    for part in module.modules() if isinstance(module, nn.Module) else ():
        for name, value in vars(part).items():
            if name.startswith("_") or isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.is_leaf):
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # of whatever type: it says no
                found.append(value)
    return found


def parameters_of(module: Any) -> int:
    """Return the number of parameters of a module that hold values; 0 for what is no module."""
    if not isinstance(module, nn.Module):
        return 0
    lazy = nn.parameter.UninitializedParameter
    return sum(p.numel() for p in module.parameters() if not isinstance(p, lazy))


def _refuse_unallocated(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise SubjectError(
                f"parameter {name!r} holds no values (meta device or lazy); materialise the model before checking it"
            )


def callable_subject(subject: Subject, pool: ModelPool) -> Subject:
    """Return the subject with a `forward`; without one the model itself is called, with the masks that it takes.

    Raises:
        SubjectError: the model cannot be built, or is not callable.
    """
    if subject.forward is not None:
        return subject
    module = pool.get(pool.configs[0], torch.float32).module if subject.module is None else subject.module
    if not callable(module):
        raise SubjectError(f"the model is {type(module).__name__}, which cannot be called; give the subject a forward")
    like = replace(subject, build=None, module=module)
    forms = tuple(form for form in ("padding", "pairwise", "additive") if like.takes_mask(form))
    return replace(subject, forward=_call, mask_forms=forms)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
