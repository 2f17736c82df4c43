"""Hugging Face transformers: any model type, model class, configuration or instance; random weights, no download.

`hf:bert` is the type's encoder, causal language model or encoder-decoder, whichever its family is made for;
`hf:BertForSequenceClassification` any class by its name. Sizes are made small by `small_configuration`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.huggingface_facts import (
    ENCODERS,
    NOT_BY_EMBEDDINGS,
    OTHER_INPUTS,
    SIZES,
    WITHOUT_MASK,
    declared_facts,
)
from veriformer.properties.adapters.shared.small_configuration import small_configuration
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

PACKAGES = ("transformers",)
DOMAIN = {
    "d_model": (32,), "num_heads": (4, 2), "num_key_value_heads": (2,), "num_layers": (2,), "d_ff": (48,),
    "vocab_size": (23,), "max_len": (64,), "num_classes": (3,),
}  # fmt: skip
"""Sizes that the configurations of all families admit; the vocabulary has `SPECIAL_TOKENS` rows more."""

_KIND_OF_SUFFIX = (
    ("ForConditionalGeneration", "encoder_decoder"),
    ("ForSequenceClassification", "classifier"),
    ("ForCausalLM", "decoder"),
    ("LMHeadModel", "decoder"),
    ("DoubleHeadsModel", "decoder"),
)
LARGEST = 4_000_000
"""Parameters of the largest model that is built: more means that a size has a name which is not known here."""

_VISION = ("vit", "deit", "beit", "dinov2", "ijepa", "vit_mae", "vit_msn", "clip_vision_model", "siglip_vision_model")
_implementation: list[str] = []


def transformers() -> ModuleType:
    """Import the library, quietly."""
    name_operators()
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@contextmanager
def attention_through(implementation: str) -> Iterator[None]:
    """Let every model that is called inside go through one implementation of attention: eager, sdpa ..."""
    _implementation.append(implementation)
    try:
        yield
    finally:
        _implementation.pop()


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call an encoder on tokens `[B, T]`; attention_mask `[B, T]` True = may attend."""
    return _output(_prepared(model)(**_given(model, tokens, attention_mask)))


def forward_causally(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a causal model; with a mask positions count real tokens, as `generate` has it."""
    return _output(_prepared(model)(**_given(model, tokens, attention_mask, counted=True)))


def forward_pair(model: Any, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None) -> Any:
    """Call an encoder-decoder on source `[B, S]` and target `[B, T]`."""
    given = {"input_ids": source, "decoder_input_ids": target, "use_cache": False}
    if source_mask is not None:
        given["attention_mask"] = source_mask.long()
    if target_mask is not None:
        given["decoder_attention_mask"] = target_mask.long()
    return _output(_prepared(model)(**given))


def classify(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a classifier; hidden tokens are given as the padding token, by which some find the last one."""
    padding = getattr(model.config, "pad_token_id", None)
    if attention_mask is not None and padding is not None:
        tokens = torch.where(attention_mask, tokens, torch.full_like(tokens, padding))
    return _output(_prepared(model)(**_given(model, tokens, attention_mask)))


def embed(model: Any, embeddings: Any, attention_mask: Any = None) -> Any:
    """Call a model on embeddings `[B, T, D]`."""
    given: dict[str, Any] = {"inputs_embeds": embeddings}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask.long()
    if "use_cache" in _arguments(model.__class__):
        given["use_cache"] = False
    return _output(_prepared(model)(**given))


def encode_embeddings(model: Any, x: Any) -> Any:
    """Call the stack of layers of a vision model on embeddings `[B, T, D]`."""
    return _output(_prepared(model)(x))


def cached(model: Any, chunks: Any, attention_mask: Any = None, reorder: Any = None) -> Any:
    """Return the logits `[B, T, V]` of chunks of tokens, one after another, through `past_key_values`."""
    past: Any = None
    model, start, outputs = _prepared(model), 0, []
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            past.reorder_cache(reorder)
            attention_mask = _reordered(attention_mask, start, reorder)
        end = start + chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :end]
        given = _given(model, chunk, mask, counted=True, start=start)
        answer = model(**{**given, "use_cache": True}, past_key_values=past)
        past = answer.past_key_values
        outputs.append(_output(answer))
        start = end
    return torch.cat(outputs, dim=1)


def generate(model: Any, tokens: Any, steps: int, use_cache: bool) -> Any:
    """Return tokens `[B, T + steps]`, greedily chosen; no token ends a sequence early."""
    config = transformers().GenerationConfig(
        do_sample=False, max_new_tokens=steps, use_cache=use_cache, eos_token_id=None, pad_token_id=0
    )
    own, model.generation_config = model.generation_config, config
    try:
        return _prepared(model).generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    finally:
        model.generation_config = own


def _reordered(mask: Any, past: int, order: Any) -> Any:
    """Let the mask of the past go along with the samples that the cache goes on with."""
    return None if mask is None else torch.cat([mask[order, :past], mask[:, past:]], dim=1)


def _given(model: Any, tokens: Any, mask: Any, *, counted: bool = False, start: int = 0) -> dict[str, Any]:
    takes = _arguments(model.__class__)
    given: dict[str, Any] = {"input_ids": tokens}
    if mask is not None and "attention_mask" in takes:
        given["attention_mask"] = mask.long()
    if mask is not None and counted and "position_ids" in takes:
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
    if "use_cache" in takes:
        given["use_cache"] = False
    return given


@functools.cache
def _arguments(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def _prepared(model: Any) -> Any:
    """Return the model, going through the implementation of attention that is chosen now."""
    if not hasattr(model, "set_attn_implementation"):
        return model
    released = model.__dict__.setdefault("_released_attention", model.config._attn_implementation)
    wanted = _implementation[-1] if _implementation else released
    if model.config._attn_implementation != wanted:
        model.set_attn_implementation(wanted)
    return model


def _output(answer: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        found = getattr(answer, name, None)
        if found is not None:
            return found
    return answer[0] if isinstance(answer, tuple) else answer


def build(model_class: Any, config_class: Any, sizes: Any, **more: Any) -> nn.Module:
    """Return a model of a class, of small sizes and random weights."""
    num_labels = {"num_labels": sizes.num_classes} if model_class.__name__.endswith("Classification") else {}
    config = small_configuration(config_class, sizes, **num_labels, **more)
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", model_class)
    _insist_on_small(make, config)
    return make(config)


def _insist_on_small(make: Callable[[Any], nn.Module], config: Any) -> None:
    """Count the parameters before any memory is taken.

    Raises:
        ValueError: there are too many.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in make(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"its smallest configuration known here has {count} parameters, more than {LARGEST}")


def _vision_stack(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__.endswith("Encoder"):
            first = list(inspect.signature(module.forward).parameters)[:1]
            if first and first[0] in ("hidden_states", "inputs_embeds"):
                return module
    if isinstance(layers := getattr(model, "layers", None), nn.ModuleList):
        return nn.Sequential(*layers)
    raise TypeError(f"{type(model).__name__} has no encoder that takes embeddings")


def build_vision(model_class: Any, config_class: Any, sizes: Any) -> nn.Module:
    """Return the stack of layers of a vision model, without its patches."""
    return _vision_stack(build(model_class, config_class, sizes))


class _Types(Mapping[str, Subject]):
    """Every model type that reads text, and some that see; subjects are made when they are asked for."""

    @functools.cached_property
    def _tasks(self) -> dict[str, str]:
        transformers()
        from transformers.models.auto import modeling_auto as auto

        found = {name: "vision" for name in _VISION if name in auto.MODEL_MAPPING_NAMES}
        found |= dict.fromkeys(auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, "encoder")
        found |= dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "decoder")
        found |= dict.fromkeys(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "encoder")
        found |= dict.fromkeys(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "encoder_decoder")
        found |= dict.fromkeys(ENCODERS & set(found), "encoder")
        known = transformers().CONFIG_MAPPING
        return {
            name: found[name]
            for name in sorted(set(found) - OTHER_INPUTS)
            if found[name] == "vision" or _reads_text_alone(known[name])
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, name: str) -> Subject:
        library = transformers()
        if name not in self._tasks:
            model_class = getattr(library, name, None)
            if not isinstance(model_class, type) or getattr(model_class, "config_class", None) is None:
                raise KeyError(name)
            return subject_of_class(model_class)
        return _subject_of_type(library, name, self._tasks[name])


SHIPPED = _Types()


def _reads_text_alone(config_class: Any) -> bool:
    """Whether a family has no part that sees or hears, nor is put together from models of other families."""
    parts = set(getattr(config_class, "sub_configs", {}) or {})
    return parts <= {"text_config", "esmfold_config"} and not getattr(config_class, "has_no_defaults_at_init", False)


def _subject_of_type(library: ModuleType, name: str, task: str) -> Subject:
    config_class = library.CONFIG_MAPPING[name]
    if task == "vision":
        return Subject(
            kind="encoder", name=f"hf:{name}", inputs="embeddings", mask_forms=(), domain=DOMAIN,
            build=functools.partial(build_vision, library.AutoModel, config_class), forward=encode_embeddings,
            declares={"causal": False, "positions": "none", **declared_facts(name)},
        )  # fmt: skip
    auto = {
        "encoder": library.AutoModel, "decoder": library.AutoModelForCausalLM,
        "encoder_decoder": library.AutoModelForSeq2SeqLM,
    }[task]  # fmt: skip
    model_class = auto._model_mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, list | tuple) else model_class
    decides = {"is_decoder": True} if task == "decoder" and hasattr(config_class, "is_decoder") else {}
    return _described(
        model_class, task, f"hf:{name}", declared_facts(name), domain={**DOMAIN, **SIZES.get(name, {})},
        build=functools.partial(build, auto, config_class, **decides),
    )  # fmt: skip


def subject_of_class(model_class: Any) -> Subject:
    """Return the subject of a model class: built from small configurations of its own `config_class`."""
    facts = declared_facts(_family(model_class))
    return _described(
        model_class, _kind_of(model_class), f"hf:{model_class.__name__}", facts,
        build=functools.partial(build, model_class, model_class.config_class), domain=DOMAIN,
    )  # fmt: skip


def _kind_of(model_class: type) -> str:
    name = model_class.__name__
    for suffix, kind in _KIND_OF_SUFFIX:
        if name.endswith(suffix):
            return kind
    return "encoder_decoder" if "decoder_input_ids" in _arguments(model_class) else "encoder"


def _described(model_class: Any, kind: str, name: str, facts: dict[str, Any], **given: Any) -> Subject:
    takes = _arguments(model_class)
    calls: dict[str, Callable[..., Any]] = {
        "encoder": forward, "decoder": forward_causally, "encoder_decoder": forward_pair, "classifier": classify,
    }  # fmt: skip
    decodes = kind == "decoder" and "past_key_values" in takes
    declares = dict(facts)
    if kind == "encoder_decoder":
        declares = {"causal": True, **declares}
    return Subject(
        kind=kind, name=name, forward=calls[kind], declares=declares,
        mask_forms=("padding",) if "attention_mask" in takes and _family(model_class) not in WITHOUT_MASK else (),
        embed=embed if _enters_by_embeddings(model_class, kind) else None,
        cache=cached if decodes else None,
        generate=generate if decodes and hasattr(model_class, "generate") else None,
        backends=_backends(model_class), **given,
    )  # fmt: skip


def _enters_by_embeddings(model_class: Any, kind: str) -> bool:
    """Whether embeddings are another entry to the same model, and not one that is documented to differ."""
    takes = "inputs_embeds" in _arguments(model_class) and kind in ("encoder", "decoder")
    return takes and _family(model_class) not in NOT_BY_EMBEDDINGS


def _family(model_class: Any) -> str:
    return getattr(model_class.config_class, "model_type", "")


def _backends(model_class: Any) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Offer the eager implementation beside the one that the library chooses by itself."""
    if not getattr(model_class, "_supports_sdpa", False):
        return {}
    return {"eager": functools.partial(attention_through, "eager")}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise model classes, instances and configurations, without importing the library for anything else."""
    if not any(
        cls.__module__.startswith("transformers.")
        for cls in (thing if isinstance(thing, type) else type(thing)).__mro__
    ):
        return None
    library = transformers()
    if isinstance(thing, type):
        if issubclass(thing, library.PreTrainedModel):
            return subject_of_class(thing)
        if issubclass(thing, library.PreTrainedConfig):
            return SHIPPED[str(getattr(thing, "model_type", ""))]
        return None
    if isinstance(thing, library.PreTrainedConfig):
        return SHIPPED[thing.model_type]
    if not isinstance(thing, library.PreTrainedModel):
        return None
    facts = declared_facts(getattr(thing.config, "model_type", ""))
    chosen = kind or _kind_of(type(thing))
    return _described(type(thing), chosen, type(thing).__name__, facts, module=thing, config=_sizes_of(thing.config))


def _sizes_of(config: Any) -> DrawnConfig:
    """Read the sizes off a configuration; transformers maps its common names to those of the family."""
    text = config.get_text_config()
    common = {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers",
              "num_key_value_heads": "num_key_value_heads", "d_ff": "intermediate_size", "vocab_size": "vocab_size",
              "max_len": "max_position_embeddings", "num_classes": "num_labels"}  # fmt: skip
    found = {size: getattr(text, name, None) for size, name in common.items()}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_heads"]
    return DrawnConfig(**{size: value for size, value in found.items() if isinstance(value, int) and value > 0})
