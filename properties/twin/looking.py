"""One traced forward, and the model's own linear maps behind what flows through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from veriformer.properties.anatomy.feed_forward import Source, map_behind
from veriformer.properties.anatomy.norms import norm_calls
from veriformer.properties.anatomy.residual import residual_sums
from veriformer.properties.anatomy.sources import same_tokens
from veriformer.properties.anatomy.traced import Product, Traced, storage_of
from veriformer.properties.twin.parts import Map, PartedError


@dataclass
class Look:
    """One traced forward and what was recognised in it.

    Attributes:
        module: the model.
        seen: its trace.
        width: D: numbers of a token in the stream.
        result: what it gave.
    """

    module: nn.Module
    seen: Traced
    width: int
    result: Tensor

    def __post_init__(self) -> None:
        self.products = {p.when: p for p in self.seen.products}
        self.own = {storage_of(p) for p in self.module.parameters()}
        self.sums = {s.product: s for s in residual_sums(self.seen, self.width)}
        self.norms = norm_calls(self.seen)
        self.limit, self.batch = self.seen.limit, self.seen.batch

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors hold the same tokens in the same order, or samples and positions change places."""
        return same_tokens(one, other, self.batch, self.limit)

    def multiple(self, one: Tensor, other: Tensor) -> float | None:
        """Return by what one tensor is another, in some order of samples and positions; None where it is none of it."""
        if one.numel() != other.numel():
            return None
        factor = float(one.double().norm() / other.double().norm().clamp(min=1e-300))
        return factor if self.same(one.cpu().double(), factor * other.cpu().double()) else None

    def map_of(self, product: Product, channels: Sequence[int], given: Tensor, what: str) -> Map:
        """Return the map that some channels of a product's output come from.

        Args:
            product: the product.
            channels: of its output.
            given: what it and perhaps a bias gave, `[..., W]`.
            what: in words, for what is told where it is no map of the model's own.

        Raises:
            PartedError: its matrix is no parameter.
        """
        if product.right.shape[:-2].numel() > 1 or given.numel() != product.output.numel():
            raise PartedError(f"{what}: it is made by many matrices at once, or is a part of what a map gives")
        matrix = product.right.reshape(product.right.shape[-2:])
        if storage_of(product.right) not in self.own:
            raise PartedError(f"{what}: its matrix is no parameter as it is, but made of some")
        plain = (product.left.double().cpu() @ product.right.double().cpu()).reshape(-1, matrix.shape[1])
        rest = given.double().reshape(-1, matrix.shape[1]) - plain
        if float((rest - rest[:1]).abs().amax()) > self.limit * float(given.abs().amax()):
            raise PartedError(f"{what}: something else than a bias is added to it")
        picked = list(channels)
        bias = rest[0][picked]
        has_bias = float(rest.abs().amax()) > self.limit * float(given.abs().amax())
        return Map(matrix.T.double().cpu()[picked], bias if has_bias else None)

    def source(self, source: Source, what: str) -> tuple[Product, Map]:
        """Return the map that a part of a value comes from."""
        product = map_behind(self.products, self.seen, source.when)
        if product is None:
            raise PartedError(f"{what}: it does not come from a linear map")
        return product, self.map_of(product, source.channels, self.seen.values[source.when].output, what)
