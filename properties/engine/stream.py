"""A subject seen as one map from a sequence to its outputs, whatever its kind; and what influences what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.embedding_leaf import at_embedding
from veriformer.properties.subject.palette import OTHER
from veriformer.properties.subject.paths import DEFAULT, Path, walking
from veriformer.properties.subject.subject import Subject

PER_POSITION = ("self_attention", "layer", "encoder", "decoder", "encoder_decoder")
"""Kinds with one output a position of their sequence (for encoder_decoder: of the target)."""

SEQUENCES = (*PER_POSITION, "classifier", "cross_attention")
"""Kinds that map a sequence, perhaps pooled; for cross_attention the memory is one whose order is lost."""


def sides(subject: Subject, *, masked: bool = False) -> tuple[str, ...]:
    """Return the sequences of a subject that a `Stream` can vary: "target", "source", or both.

    Args:
        subject: of a kind in `SEQUENCES`.
        masked: only those that take a padding mask.
    """
    arguments = {"target": "target_mask", "source": "source_mask"}
    if subject.kind == "cross_attention":
        return ("source",) if masked else ("target", "source")
    if subject.kind != "encoder_decoder":
        return ("target",)
    return tuple(side for side, argument in arguments.items() if not masked or subject.accepts(argument))


class Stream:
    """`stream(x, attention_mask)` for every kind in `SEQUENCES`; the other of two sequences is drawn once and kept.

    Attributes:
        built: the model behind it.
        side: which of two sequences is varied.
        per_position: whether output t belongs to input t; else all outputs belong to the whole sequence.
    """

    def __init__(self, case: Case, built: Built, *, side: str = "target", other_length: int = OTHER) -> None:
        self.case = case
        self.built = built
        self.side = side
        self.kind = case.subject.kind
        self.per_position = side == "target" and self.kind != "classifier"
        has_two = self.kind in ("encoder_decoder", "cross_attention")
        self.kept = self.draw(1, case.fitting(other_length)) if has_two else None

    def draw(self, batch: int, length: int) -> Tensor:
        """Return a sequence: tokens `[B, T]` or embeddings `[B, T, D]`."""
        if self.case.subject.takes_tokens:
            return self.case.tokens(batch, length, vocabulary=self.built.config.vocab_size)
        return self.case.normal(batch, length, self.built.config.d_model, dtype=self.built.dtype)

    def other(self, x: Tensor) -> Tensor:
        """Return a sequence of the same shape that differs from `x` at every position."""
        if x.is_floating_point():
            return self.case.normal(*x.shape, dtype=x.dtype)
        return self.case.other_tokens(x, self.built.config.vocab_size)

    def __call__(self, x: Tensor, attention_mask: Tensor | None = None, *, path: Path = DEFAULT) -> Tensor:
        """Return the outputs `[B, T, *]` (a classifier: `[B, C]`).

        Args:
            x: tokens `[B, T]` or embeddings `[B, T, D]`.
            attention_mask: `[B, T]` bool, True = may attend; None: the path decides (`ones` gives all True).
            path: the way to call.
        """
        if attention_mask is None and path.mask != "none" and self._takes_mask():
            attention_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        output = self._forward(x, attention_mask, path)
        leading = x.shape[:2] if self.per_position else x.shape[:1]
        axes = 2 if self.kind == "classifier" else 3
        if output.shape[: len(leading)] != leading or output.ndim != axes:
            wanted = "[B, *]" if axes == 2 else "[B, T, *]"
            self.case.require(
                False,
                f"the output does not have the shape of its kind: {list(output.shape)} for an input of "
                f"B={x.shape[0]}, T={x.shape[1]}",
                got=f"{list(output.shape)}",
                expected=f"{wanted}, which a {self.kind} returns",
            )
        return output

    def in_single(
        self, x: Tensor, other: Tensor, attention_mask: Tensor | None, path: Path, at: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs for two sequences of the same model in float32, at the places that are asked for.

        Args:
            x: as in a call.
            other: of the same shape.
            attention_mask: of both.
            path: as in a call, without autocast.
            at: index into the outputs.
        """
        case, autocast = self.case, path.autocast
        built = self.built if autocast else case.bench.pool.get(self.built.config, torch.float32)
        single = Stream.__new__(Stream)
        single.__dict__.update(self.__dict__, built=built)
        if self.kept is not None and self.kept.is_floating_point():
            single.kept = self.kept.float()
        plain = replace(path, autocast="", layout="", compiled=False)
        with torch.no_grad():
            first, second = (
                single(v.float() if v.is_floating_point() else v, attention_mask, path=plain)[at] for v in (x, other)
            )
        return first, second

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what the subject's forward gets for a sequence without a mask."""
        if self.kept is None:
            return (x,)
        other = self.kept.expand(len(x), *self.kept.shape[1:])
        target, source = (x, other) if self.side == "target" else (other, x)
        return (target, source) if self.kind == "cross_attention" else (source, target)

    def _takes_mask(self) -> bool:
        """Whether this side of two sequences has a mask of its own."""
        return self.kind != "encoder_decoder" or self.case.subject.accepts(f"{self.side}_mask")

    def _forward(self, x: Tensor, mask: Tensor | None, path: Path) -> Tensor:
        if self.kept is None:
            given = {"attention_mask": mask}
        elif self.kind == "cross_attention":
            given = {"memory_mask": mask if self.side == "source" else None}
        else:
            given = {f"{self.side}_mask": mask} if self._takes_mask() else {}
        return self.case.call(self.built, *self.inputs(x), **given, path=path)

    def influence(self, x: Tensor, attention_mask: Tensor | None = None, *, path: Path = DEFAULT) -> Tensor | None:
        """Return how each position of `x[0]` reaches each output position, by gradients.

        The sample is repeated T times; copy t gives the gradient of a random projection of output t, so one
        backward pass gives all rows. (With `batch_coupled` declared, one pass a row.)

        Args:
            x: one sequence `[1, T]` or `[1, T, D]`.
            attention_mask: `[1, T]`.
            path: the way to call; its mode must be "grad".

        Returns:
            `[T, T]`: entry (t, s) is the largest |d out_t / d x_s|; None where gradients cannot be had.
        """
        length = x.shape[1]
        if self.case.subject.fact("batch_coupled", False):
            rows = [self._gradients(x, attention_mask, [t], path) for t in range(length)]
            return None if any(r is None for r in rows) else torch.cat([r for r in rows if r is not None])
        repeated = x.expand(length, *x.shape[1:]).contiguous()
        mask = None if attention_mask is None else attention_mask.expand(length, -1).contiguous()
        return self._gradients(repeated, mask, list(range(length)), path)

    def _gradients(self, x: Tensor, mask: Tensor | None, outputs: list[int], path: Path) -> Tensor | None:
        found = self._with_leaf(x, mask, path)
        if found is None:
            return None
        leaf, output = found
        picked = output[range(len(outputs)), outputs]
        probe = torch.randn(picked.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        total = (picked * probe.to(picked.device, picked.dtype)).sum()
        if not total.requires_grad:
            return None
        # what is checkpointed is computed again here
        try:
            with walking(path, self.case.subject, self.built.module, self.case.bench.device):
                (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
        except RuntimeError:
            if not path.autocast:
                raise
            return None  # a constant of float32 that bfloat16 has no number for, say: see numerics.autocast
        return gradient.detach().abs().amax(dim=-1)

    def _with_leaf(self, x: Tensor, mask: Tensor | None, path: Path) -> tuple[Tensor, Tensor] | None:
        if x.is_floating_point():
            leaf = x.detach().clone().requires_grad_()
            return leaf, self(leaf, mask, path=path)
        if self.case.subject.embed is not None and self.kept is None:
            width = self.built.config.d_model
            leaf = self.case.normal(*x.shape, width, dtype=self.built.dtype).requires_grad_()
            given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
            with walking(path, self.case.subject, self.built.module, self.case.bench.device):
                return leaf, self.case.bench.call(self.case.subject.embed, self.built.module, leaf, **given)
        return self._leaf_at_embedding(x, mask, path)

    def _leaf_at_embedding(self, x: Tensor, mask: Tensor | None, path: Path) -> tuple[Tensor, Tensor] | None:
        module = self.built.module
        if not isinstance(module, nn.Module):
            return None
        if x.shape[0] == x.shape[1] > 1 and torch.equal(x, x.T):
            self.case.reject("a model that puts time first embeds the same tokens in another order")
        leaf, output = at_embedding(module, x, lambda: self(x, mask, path=path))
        if self.case.was_refused:  # called once more on a plainer path, behind the cut of the call that raised
            plain = replace(path, layout="", autocast="", compiled=False)
            leaf, output = at_embedding(module, x, lambda: self(x, mask, path=plain))
        if leaf is None:
            return None
        if self.case.bench.recorder:
            self.case.bench.recorder.cut_at_embedding(module, x, leaf)
        return leaf, output
