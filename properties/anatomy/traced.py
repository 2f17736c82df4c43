"""Every product, sum and lookup of one forward, below whatever torch function it was written with.

Seen at the dispatcher, `F.linear`, `@`, `einsum`, `baddbmm` and a fused attention all come down to a few operations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer.properties.bench.watches import DispatchWatch

_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
"""Products by name, with the number of operands that stand before the two factors."""

_MOST = 4000  # values that are kept: a hundred layers
_LARGEST = 4_000_000  # entries of the largest tensor that is kept


@dataclass
class Product:
    """One product of matrices, perhaps many at once.

    Attributes:
        place: path of the module that computes it; "" for the model itself.
        left: `[..., n, m]`, a copy on the CPU; parameters are kept as they are.
        right: `[..., m, p]`.
        output: `[..., n, p]`, with what `addmm` adds.
        when: number among all values of the trace.
    """

    place: str
    left: Tensor
    right: Tensor
    output: Tensor
    when: int


@dataclass
class Value:
    """One tensor of floating point numbers that an operation gave.

    Attributes:
        name: of the operation: `add`, `gelu`, `embedding`.
        place: path of the module that computes it.
        output: a copy on the CPU.
        when: number among all values of the trace.
    """

    name: str
    place: str
    output: Tensor
    when: int


@dataclass
class Lookup:
    """Rows of a table that were looked up.

    Attributes:
        place: path of the module that does.
        table: `[V, D]`.
        rows: their numbers.
        when: number of the result among the values.
    """

    place: str
    table: Tensor
    rows: Tensor
    when: int


@dataclass
class ModuleCall:
    """One call of a module that maps a tensor to one of the same shape.

    Attributes:
        place: its path.
        part: itself.
        given: its first tensor, a copy.
        made: its output, a copy.
        since: number of values that were made before it began.
        when: number of values that were made before it ended.
    """

    place: str
    part: nn.Module
    given: Tensor
    made: Tensor
    since: int
    when: int


@dataclass
class Traced:
    """What was seen of one forward, in order.

    Attributes:
        batch: samples B.
        limit: largest relative difference that is rounding.
        products: products of matrices.
        values: all other floating point tensors that are no views, products' outputs among them.
        calls: modules' calls.
        lookups: rows of tables.
        output: of the model; None if that is no tensor.
        known: what was made of it; see `once`.
    """

    batch: int
    limit: float
    products: list[Product] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    output: Tensor | None = None
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, made once for each key: several properties read the same trace."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]


class _Watch(DispatchWatch):
    """Notes operations, and the module in which each is made."""

    def __init__(self, seen: Traced, module: nn.Module, largest: int) -> None:
        super().__init__()
        self.traced = seen
        self.within: list[str] = []
        self.given: list[tuple[Tensor | None, int]] = []
        self.largest = largest
        self.is_aside = False
        # parameters and views of them are kept as they are: a large model is not copied to be looked at
        self.constant = {storage_of(p) for p in module.parameters()} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_aside:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        skipped = _PRODUCTS.get(name)
        factors = [] if skipped is None else [a for a in args if isinstance(a, Tensor)][skipped : skipped + 2]
        kept = [f.detach() if storage_of(f) in self.constant else _copy(f) for f in factors]
        result = func(*args, **(kwargs or {}))
        if name == "embedding" and args[0].ndim == 2:
            place = self.within[-1] if self.within else ""
            self.traced.lookups.append(Lookup(place, args[0].detach(), args[1].clone(), len(self.traced.values)))
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # no view
            for output in result if isinstance(result, tuple | list) else (result,):
                if isinstance(output, Tensor) and output.is_floating_point() and len(self.traced.values) < _MOST:
                    self._keep(name, output, kept)
        return result

    def copied(self, x: Tensor) -> Tensor:
        """Return a copy that is no value of the model."""
        self.is_aside = True
        try:
            return _copy(x)
        finally:
            self.is_aside = False

    def _keep(self, name: str, output: Tensor, factors: list[Tensor]) -> None:
        if output.numel() > self.largest or output.ndim < 2 or not output.numel():
            return
        place, when = self.within[-1] if self.within else "", len(self.traced.values)
        copied = _copy(output)
        self.traced.values.append(Value(name.rstrip("_"), place, copied, when))
        if len(factors) == 2:
            self.traced.products.append(Product(place, factors[0], factors[1], copied, when))


def storage_of(x: Tensor) -> int:
    """Return where the numbers of a tensor lie: views of a parameter lie where it does; 0 where it holds none."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # of a wrapper, or a parameter that holds nothing yet
        return 0


def traced(module: nn.Module, run: Callable[[], object], batch: int, limit: float) -> Traced:
    """Return what is computed while a model runs.

    Args:
        module: the model, hooked meanwhile.
        run: calls it.
        batch: samples that it is called on.
        limit: largest relative difference that is rounding.
    """
    watch = _Watch(Traced(batch, limit), module, _LARGEST)

    def enter(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple[Any, ...]) -> None:
            given = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
            fits = given is not None and given.numel() <= _LARGEST
            watch.within.append(name)
            kept = watch.copied(given) if given is not None and fits else None
            watch.given.append((kept, len(watch.traced.values)))

        return hook

    def leave(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not watch.within:
            return
        place, (given, since) = watch.within.pop(), watch.given.pop()
        if given is not None and isinstance(output, Tensor) and output.shape == given.shape:
            made, when = watch.copied(output), len(watch.traced.values)
            watch.traced.calls.append(ModuleCall(place, part, given, made, since, when))

    was_fused = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for handle in (part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)):
                stack.callback(handle.remove)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.backends.mha.set_fastpath_enabled(False)  # a whole layer in one operation cannot be taken apart
        stack.callback(torch.backends.mha.set_fastpath_enabled, was_fused)
        stack.enter_context(watch)
        output = run()
    watch.traced.output = _copy(output) if isinstance(output, Tensor) else None
    return watch.traced


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
