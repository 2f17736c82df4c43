"""Drawn queries, keys and values, and a subject of kind attention called on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.attention import attention_bound, attention_oracle
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.facts import attention_scale
from veriformer.properties.subject.paths import DEFAULT, Path
from veriformer.properties.subject.subject import Subject

TILES = (9, 17, 33)
"""Lengths of one position more than a tile of a kernel."""


def _has_parameters(built: Built) -> bool:
    return isinstance(built.module, nn.Module) and next(built.module.parameters(), None) is not None


def hides_keys_alone(subject: Subject) -> bool:
    """Whether the mask of a subject of kind attention is `[B, S]`."""
    return subject.kind == "attention" and subject.takes_mask("padding") and not subject.takes_mask("pairwise")


class Attending:
    """One drawn case of attention: sizes that all differ, unit normal q, k, v, and the declared scale.

    Attributes:
        query: `[B, H, T, K]`.
        key: `[B, H, S, K]`.
        value: `[B, H, S, E]`.
        scale: factor on q k^T that the subject declares (1/sqrt(K) by default).
    """

    def __init__(
        self,
        case: Case,
        *,
        keys: int | None = None,
        d_head: int | None = None,
        heads: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.case = case
        self.built = case.built()
        batch = case.integer("B", 1, 2)
        own = _has_parameters(self.built) and self.built.config  # of one number of heads and channels
        self.heads = own.num_heads if own else heads or case.choice("H", (2, 3, 1))
        queries = case.choice("T", (3, 2, 5, 7, 1, *TILES))  # with one query a mask has no shape
        width = own.d_head if own else d_head or case.choice("K", (4, 8, 16, 64))
        keys = keys or case.integer("S", 2, max(9, queries + 1))
        dtype = dtype or self.built.dtype
        self.query = case.normal(batch, self.heads, queries, width, dtype=dtype)
        self.key = case.normal(batch, self.heads, keys, width, dtype=dtype)
        self.value = case.normal(batch, self.heads, keys, width, dtype=dtype)
        self.scale = attention_scale(case.subject.fact("attention_scale"), width, width * self.heads)

    def __call__(
        self,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        path: Path = DEFAULT,
    ) -> Tensor:
        """Call the subject; what is not given is as drawn. Returns `[B, H, T, E]`."""
        q = self.query if query is None else query
        k = self.key if key is None else key
        v = self.value if value is None else value
        given = {"causal": True} if causal else {}
        return self.case.call(self.built, q, k, v, attention_mask=mask, path=path, **given)

    def oracle(
        self,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        allow: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return the float64 definition for the same inputs, on the subject's device."""
        q = self.query if query is None else query
        k = self.key if key is None else key
        v = self.value if value is None else value
        used = self.scale if scale is None else scale
        soft_cap = self.case.subject.fact("soft_cap")
        return attention_oracle(q, k, v, scale=used, allow=allow, soft_cap=soft_cap).to(q.device)

    def bound(self, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Return twice the rounding bound of one evaluation (two are compared), `[B, H, T, 1]`."""
        q = self.query if query is None else query
        k = self.key if key is None else key
        v = self.value if value is None else value
        return 2 * attention_bound(q, k, v, self.scale)

    def drawn_mask(self) -> Tensor:
        """Draw `[B, 1, T, S]` bool with at least one visible key in each row, and one hidden key at least.

        The same row for all queries where the subject's mask is `[B, S]`.
        """
        batch, _, length, _ = self.query.shape
        keys, queries = self.key.shape[2], 1 if hides_keys_alone(self.case.subject) else length
        allow = torch.rand(batch, 1, queries, keys, generator=self.case.generator) < 0.6
        keep = torch.randint(0, keys, (batch, 1, queries, 1), generator=self.case.generator)
        allow.scatter_(-1, keep, True)
        if bool(allow.all()):
            allow[0, 0, 0, (int(keep[0, 0, 0, 0]) + 1) % keys] = False
        return allow.expand(-1, -1, length, -1).contiguous().to(self.query.device)
