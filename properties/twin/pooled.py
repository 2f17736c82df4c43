"""How a classifier makes one vector of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from veriformer.properties.anatomy.sublayers import biased
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.parts import Map, NumberError, PartedError, Pooled

_ONE = 1e-3


def pooled(look: Look, vector: Tensor, length: int) -> Pooled:
    """Return the pooling that gives a vector for each sample, and what it pools.

    Args:
        look: the forward.
        vector: `[B, D]`, what the map to the classes is given.
        length: positions T of the sequence, behind tokens that the model puts before it.

    Raises:
        PartedError: it is none of the textbook's.
    """
    for hidden in _sequences(look, length):
        tokens = hidden.double()[:, hidden.shape[1] - length :]
        if hidden.shape[1] > length and look.same(hidden[:, 0], vector):
            return Pooled("cls", None, hidden)
        if look.same(tokens.mean(1), vector):
            return Pooled("mean", None, hidden)
        if look.same(tokens.amax(1), vector):
            return Pooled("max", None, hidden)
        if (score := _score(look, tokens, vector)) is not None:
            return Pooled("weighted", score, hidden)
    for hidden in _sequences(look, length):
        tokens = hidden.double()[:, hidden.shape[1] - length :]
        for one in (hidden[:, 0], tokens.mean(1), tokens.amax(1)):
            factor = look.multiple(vector, one)
            if factor is not None and abs(factor - 1) > _ONE:  # a first token is as it is
                raise NumberError(f"what is pooled is multiplied by {factor:.6g}")
    raise PartedError("its classes are made of no pooling of what the last layer gives: cls, mean, max or weighted")


def _sequences(look: Look, length: int) -> Iterator[Tensor]:
    """Yield what the end of the stack may be, `[B, E + T, D]`, the last first: norms' outputs and sums."""
    made = [n.made for n in reversed(look.norms)]
    made += [look.seen.values[s.when].output for s in sorted(look.sums.values(), key=lambda s: -s.when)]
    for x in made:
        if x.ndim == 3 and len(x) == look.batch and x.shape[1] >= length and x.shape[2] == look.width:
            yield x


def _score(look: Look, tokens: Tensor, vector: Tensor) -> Map | None:
    """Return the map of which the softmax over the tokens `[B, T, D]` weighs them to the vector; None without one."""
    for product in look.seen.products:
        if product.output.shape[-1] != 1 or not look.same(product.left, tokens):
            continue
        scores = biased(look.seen, product.when).double().reshape(tokens.shape[:2])
        if look.same((scores.softmax(1)[..., None] * tokens).sum(1), vector):
            return look.map_of(product, range(1), biased(look.seen, product.when), "the map to the pooling's scores")
    return None
