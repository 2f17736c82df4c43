"""How somebody's model is called: what goes in, which kind it is, which output is meant; found by calling it."""

from __future__ import annotations

from torch import nn

from veriformer.properties.adapters.masks import masking
from veriformer.properties.adapters.masks.masks_of_two import with_masks_of_two
from veriformer.properties.adapters.shapes.images import text_with_image
from veriformer.properties.adapters.unknown.arguments import arguments_of
from veriformer.properties.adapters.unknown.one_sequence import of_one_sequence
from veriformer.properties.adapters.unknown.parts import is_loss, loss_of
from veriformer.properties.adapters.unknown.rotating import rotating
from veriformer.properties.adapters.unknown.two_sequences import (
    of_attention,
    of_two_sequences,
    only_unknown,
    optional_second,
    second_of,
)
from veriformer.properties.adapters.unknown.understanding import NotCalledError, Understood
from veriformer.properties.subject.sizes import DrawnConfig


def understood(sample: nn.Module, sizes: DrawnConfig, kind: str | None, name: str, padding_id: str = "") -> Understood:
    """Find out how a model is called.

    Args:
        sample: in eval mode, its weights free to be altered.
        sizes: of the sample.
        kind: of subject, where the user says it.
        name: of the model.
        padding_id: source of the id of the token that pads, where there is one.

    Raises:
        NotCalledError: nothing that was tried gives what a kind gives.
    """
    arguments = arguments_of(sample.forward)
    roles = {a.role for a in arguments}
    if kind in (None, "rotary") and (turning := rotating(sample, sizes, arguments, name, kind)) is not None:
        return Understood("rotary", turning[0], None, (), tuple(turning[1]))
    if kind in (None, "loss") and is_loss(arguments) and (loss := loss_of(sample, sizes)) is not None:
        return Understood("loss", loss[0], None, (), tuple(loss[1]), declares=loss[2])
    if {"query", "key", "value"} <= roles and kind in (None, "self_attention"):
        return of_attention(sample, sizes, arguments, name)
    second = second_of(arguments, kind)
    if second is not None and text_with_image(sample, sizes, arguments) is None:
        pair = of_two_sequences(sample, sizes, kind, arguments, second, name)
        return with_masks_of_two(pair, sample, sizes, arguments, padding_id)
    try:
        found = of_one_sequence(sample, sizes, kind, arguments, name)
    except NotCalledError as refusal:
        problem, unknown = refusal, only_unknown(arguments, kind)
        for maybe in (*optional_second(arguments, kind), *unknown):
            try:
                pair = of_two_sequences(sample, sizes, kind, arguments, maybe, name)
                return with_masks_of_two(pair, sample, sizes, arguments, padding_id)
            except NotCalledError as another:
                problem = another if maybe in unknown else problem
        raise problem from problem.__cause__
    return masking.with_mask(found, sample, sizes, arguments, padding_id)
