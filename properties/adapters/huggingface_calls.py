"""How models of Hugging Face transformers are called: tokens, embeddings, pairs, with a cache."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from veriformer.properties.adapters.huggingface_backends import call, prepared
from veriformer.properties.adapters.huggingface_facts import POSITIONS_HANDED_ON
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators


def transformers() -> ModuleType:
    """Import the library, quietly."""
    name_operators()
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call an encoder on tokens `[B, T]`; attention_mask `[B, T]` True = may attend."""
    return _output(call(model, **_given(model, tokens, attention_mask)))


def forward_causally(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a causal model; with a mask positions count real tokens, as `generate` has it."""
    return _output(call(model, **_given(model, tokens, attention_mask, counted=True)))


def forward_pair(model: Any, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None) -> Any:
    """Call an encoder-decoder on source `[B, S]` and target `[B, T]`."""
    given = {"input_ids": source, "decoder_input_ids": target, "use_cache": False}
    if source_mask is not None:
        given["attention_mask"] = source_mask.long()
    if target_mask is not None:
        given["decoder_attention_mask"] = target_mask.long()
    return _output(call(model, **given))


def classify(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a classifier; hidden tokens are given as the padding token, by which some find the last one."""
    padding = getattr(model.config, "pad_token_id", None)
    if attention_mask is not None and padding is not None:
        tokens = torch.where(attention_mask, tokens, torch.full_like(tokens, padding))
    return _output(call(model, **_given(model, tokens, attention_mask)))


def embed(model: Any, embeddings: Any, attention_mask: Any = None) -> Any:
    """Call a model on embeddings `[B, T, D]`."""
    given: dict[str, Any] = {"inputs_embeds": embeddings}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask.long()
    if "use_cache" in arguments_of(model.__class__):
        given["use_cache"] = False
    return _output(call(model, **given))


def encode_embeddings(model: Any, x: Any) -> Any:
    """Call the stack of layers of a vision model on embeddings `[B, T, D]`."""
    return _output(prepared(model)[0](x))


CACHES = ("past_key_values", "cache_params", "state")
"""Names under which a model takes and gives what it keeps of the past."""


def cached(model: Any, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Any:
    """Return the logits `[B, T, V]` of chunks of tokens, one after another, through the cache that the model makes."""
    return _through(None, model, chunks, attention_mask, reorder)


def cached_at_fixed_size(model: Any, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Any:
    """Return the logits of chunks through a `StaticCache`, which has room for two tokens more."""
    room = sum(chunk.shape[1] for chunk in chunks) + 2
    past = transformers().StaticCache(config=model.config, max_cache_len=room)
    return _through(past, model, chunks, attention_mask, reorder)


def cached_in_order(model: Any, chunks: Any) -> Any:
    """Return the logits of chunks through a cache that knows neither masks nor another order of the samples."""
    return cached(model, chunks)


def _through(past: Any, model: Any, chunks: Any, attention_mask: Any, reorder: Any) -> Any:
    start, outputs = 0, []
    name = cache_of(model.__class__) or CACHES[0]
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            past = _reordered_cache(past, reorder)
            attention_mask = _reordered(attention_mask, start, reorder)
        end = start + chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :end]
        given = _given(model, chunk, mask, counted=True, start=start)
        answer = call(model, **{**given, "use_cache": True, name: past})
        past = getattr(answer, name)
        outputs.append(_output(answer))
        start = end
    return torch.cat(outputs, dim=1)


def cache_of(model_class: Any) -> str | None:
    """Return the name of what a model class keeps of the past; None if it takes nothing of the kind."""
    return next((name for name in CACHES if name in arguments_of(model_class)), None)


def _reordered_cache(past: Any, order: Any) -> Any:
    if isinstance(past, list):  # the states themselves, `[B, ...]`
        return [state[order] for state in past]
    past.reorder_cache(order)
    return past


def generate(model: Any, tokens: Any, steps: int, use_cache: bool) -> Any:
    """Return tokens `[B, T + steps]`, greedily chosen; no token ends a sequence early."""
    config = transformers().GenerationConfig(
        do_sample=False, max_new_tokens=steps, use_cache=use_cache, eos_token_id=None, pad_token_id=0
    )
    own, model.generation_config = model.generation_config, config
    try:
        return prepared(model)[0].generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    finally:
        model.generation_config = own


def _reordered(mask: Any, past: int, order: Any) -> Any:
    """Let the mask of the past go along with the samples that the cache goes on with."""
    return None if mask is None else torch.cat([mask[order, :past], mask[:, past:]], dim=1)


def _given(model: Any, tokens: Any, mask: Any, *, counted: bool = False, start: int = 0) -> dict[str, Any]:
    takes = arguments_of(model.__class__)
    given: dict[str, Any] = {"input_ids": tokens}
    if mask is not None and "attention_mask" in takes:
        given["attention_mask"] = mask.long()
    if mask is not None and counted and ("position_ids" in takes or model.config.model_type in POSITIONS_HANDED_ON):
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
    if "use_cache" in takes:
        given["use_cache"] = False
    return given


@functools.cache
def arguments_of(model_class: Any) -> frozenset[str]:
    """Return the names that the forward of a model class takes."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def _output(answer: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        found = getattr(answer, name, None)
        if found is not None:
            return found
    return answer[0] if isinstance(answer, tuple) else answer
