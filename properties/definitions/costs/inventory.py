"""What a module's parameters are, told by their shapes: matrices of attention, of feed-forward networks, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import nn
from torch.nn.utils import parametrize

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

ATTENTION, FEED_FORWARD, TABLE, VECTOR, OTHER = "attention", "feed-forward", "table", "vector", "other"
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)
_OLD_NORMS = ("weight_g", "weight_orig")


@dataclass
class Inventory:
    """The parameters of a module by what their shapes say.

    Attributes:
        volumes: how many entries each sort has.
        others: names and shapes of those that the textbook's model does not have.
    """

    volumes: dict[str, int] = field(default_factory=dict)
    others: dict[str, list[int]] = field(default_factory=dict)

    @property
    def volume(self) -> int:
        """All entries."""
        return sum(self.volumes.values())


def inventory(module: nn.Module, subject: Subject, config: DrawnConfig, left_out: Iterable[str] = ()) -> Inventory:
    """Return what the parameters of a module are; one that is shared counts once.

    Args:
        module: the model.
        subject: it belongs to.
        config: sizes that it was built with.
        left_out: names of parameters that do not count.
    """
    found, tables = Inventory(), {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    without = set(left_out)
    for name, parameter in module.named_parameters():
        if name in without:
            continue
        is_table = id(parameter) in tables
        sort = sort_of(tuple(parameter.shape), subject, config, is_table=is_table)
        if is_table and sort != TABLE:
            sort = OTHER
        found.volumes[sort] = found.volumes.get(sort, 0) + parameter.numel()
        if sort == OTHER:
            found.others[name] = list(parameter.shape)
    return found


def sort_of(shape: tuple[int, ...], subject: Subject, config: DrawnConfig, *, is_table: bool = False) -> str:
    """Return what a parameter of this shape is in a textbook's model of these sizes; OTHER where it is nothing there.

    A table is one before it is anything else: it may have as many rows as a feed-forward network has units.

    >>> sort_of((24, 8), Subject(kind="layer", build=print), DrawnConfig(d_model=8, num_heads=2, d_ff=20))
    'attention'
    """
    sizes = tuple(n for n in shape if n != 1)
    width, head, groups = config.d_model, config.d_head, config.num_key_value_heads
    queries, keys = config.num_heads * head, groups * head
    fused = {queries, keys, 2 * keys, queries + keys, queries + 2 * keys, 2 * queries, 3 * queries}
    attention, inner = fused | {head, 2 * head, 3 * head}, {config.d_ff, 2 * config.d_ff}
    if subject.fact("positions") == "t5":
        buckets = int(subject.fact("num_buckets", 32))
        if sorted(sizes) == sorted(n for n in (buckets, config.num_heads) if n != 1):
            return TABLE
    is_whole = subject.kind in ("encoder", "decoder", "encoder_decoder", "classifier")
    rows = {config.vocab_size, config.num_classes, int(subject.fact("max_len", config.max_len))} if is_whole else set()
    rows |= {int(subject.fact("extra_tokens", 0) or 0)} - {0}
    vectors = {width, *attention, *inner, config.vocab_size, config.num_classes}
    stacked = {1, config.num_layers} if is_whole else {1}  # the weights of all layers in one tensor
    if is_table and rows & {*_beside(sizes, width)}:
        return TABLE
    for rest in _beside(sizes, width):
        for times in stacked:
            if rest % times == 0 and rest // times in inner:
                return FEED_FORWARD
            if rest % times == 0 and rest // times in attention:
                return ATTENTION
        if rest in rows:
            return TABLE
    volume = math.prod(sizes)
    is_vector = len(sizes) == 1 or (len(sizes) == 2 and head in sizes)  # [H, K]: the bias of heads that stand apart
    if sizes and is_vector and any(volume % n == 0 and volume // n in vectors for n in stacked):
        return VECTOR
    return OTHER


def _beside(sizes: tuple[int, ...], width: int) -> Iterator[int]:
    """Yield what is left of a shape of two or more axes when axes that make up d_model are taken out."""
    if len(sizes) < 2:
        return
    for count in range(1, len(sizes)):
        for chosen in combinations(range(len(sizes)), count):
            if math.prod(sizes[i] for i in chosen) == width:
                yield math.prod(n for i, n in enumerate(sizes) if i not in chosen)


def remade_weights(module: nn.Module) -> str | None:
    """Return which weights are no parameters of a linear map's own: parametrised ones, or integers in buffers."""
    for name, part in module.named_modules():
        before = f"{name}." if name else ""
        if parametrize.is_parametrized(part):
            which = ", ".join(getattr(part, "parametrizations", {}))
            return f"{before}{which} is made anew by a parametrization"
        if old := next((p for p, _ in part.named_parameters(recurse=False) if p in _OLD_NORMS), None):
            return f"{before}{old} is one half of a weight that is made anew at every call"
        for label, buffer in part.named_buffers(recurse=False):
            if buffer.ndim > 1 and buffer.dtype in _INTEGERS:
                return f"weights are held in a buffer, {before}{label} of {str(buffer.dtype).removeprefix('torch.')}"
    return None
