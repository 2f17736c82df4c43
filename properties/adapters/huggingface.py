"""Hugging Face transformers: any model type, model class, configuration or instance; random weights, no download.

`hf:bert` is the type's encoder, causal language model or encoder-decoder, whichever its family is made for;
`hf:BertForSequenceClassification` any class by its name. Sizes are made small by `small_configuration`. `hf:PATH` is
the checkpoint in a local folder, as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from veriformer.properties.adapters.huggingface_backends import attention_through
from veriformer.properties.adapters.huggingface_building import build, build_vision, vision_stack
from veriformer.properties.adapters.huggingface_calls import (
    arguments_of,
    cache_of,
    cached,
    cached_at_fixed_size,
    cached_in_order,
    classify,
    embed,
    encode_embeddings,
    forward,
    forward_causally,
    forward_pair,
    generate,
    transformers,
)
from veriformer.properties.adapters.huggingface_checkpoints import is_folder, load, released_class
from veriformer.properties.adapters.huggingface_facts import (
    ENCODERS,
    IN_ORDER,
    NOT_BY_EMBEDDINGS,
    OTHER_INPUTS,
    SIZES,
    WITHOUT_MASK,
    declared_facts,
    window_of,
)
from veriformer.properties.adapters.huggingface_variants import VARIANTS, Variant
from veriformer.properties.adapters.shared.small_configuration import small_configuration
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

_VISION = ("vit", "deit", "beit", "dinov2", "ijepa", "vit_mae", "vit_msn", "clip_vision_model", "siglip_vision_model")


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

    @functools.cached_property
    def _variants(self) -> dict[str, Variant]:
        return {name: variant for name, variant in VARIANTS.items() if variant.model_type in self._tasks}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._tasks, *self._variants]))

    def __len__(self) -> int:
        return len(self._tasks) + len(self._variants)

    def __getitem__(self, name: str) -> Subject:
        library = transformers()
        if is_folder(name):
            return _subject_of_folder(library, name, self._tasks)
        if name in self._variants:
            variant = self._variants[name]
            return _subject_of_type(library, name, variant.task or self._tasks[variant.model_type], variant)
        if name not in self._tasks:
            model_class = getattr(library, name, None)
            if not isinstance(model_class, type) or getattr(model_class, "config_class", None) is None:
                raise KeyError(name)
            return subject_of_class(model_class)
        return _subject_of_type(library, name, self._tasks[name], Variant(name))


SHIPPED = _Types()


def _reads_text_alone(config_class: Any) -> bool:
    """Whether a family has no part that sees or hears, nor is put together from models of other families."""
    parts = set(getattr(config_class, "sub_configs", {}) or {})
    return parts <= {"text_config", "esmfold_config"} and not getattr(config_class, "has_no_defaults_at_init", False)


def _subject_of_type(library: ModuleType, name: str, task: str, variant: Variant) -> Subject:
    model_type = variant.model_type
    config_class = library.CONFIG_MAPPING[model_type]
    if task == "vision":
        return Subject(
            kind="encoder", name=f"hf:{name}", inputs="embeddings", mask_forms=(), domain=DOMAIN,
            build=functools.partial(build_vision, library.AutoModel, config_class), forward=encode_embeddings,
            declares={"causal": False, "positions": "none", **declared_facts(model_type)},
        )  # fmt: skip
    _, model_class = _class_for(library, model_type, task)
    decides = dict(variant.options)
    if task == "decoder" and hasattr(config_class, "is_decoder"):
        decides["is_decoder"] = True
    domain = {**DOMAIN, **SIZES.get(model_type, {}), **variant.sizes}
    facts = {**declared_facts(model_type), **variant.facts}
    if task == "decoder" and facts.get("causal", True):
        smallest = DrawnConfig(**{size: values[0] for size, values in domain.items()})
        facts |= window_of(small_configuration(config_class, smallest, **decides))
    described = _described(
        model_class, task, f"hf:{name}", facts, domain=domain,
        build=functools.partial(build, model_class, config_class, **decides),
    )  # fmt: skip
    if facts.get("causal") is False:
        return replace(described, cache=None, generate=None)
    if variant.cache == "static":
        return replace(described, cache=cached_at_fixed_size)
    return described


def _class_for(library: ModuleType, name: str, task: str) -> tuple[Any, Any]:
    """Return the automatic class for what a model type is made for, and the class that this one chooses."""
    auto = {
        "encoder": library.AutoModel, "vision": library.AutoModel, "decoder": library.AutoModelForCausalLM,
        "encoder_decoder": library.AutoModelForSeq2SeqLM,
    }[task]  # fmt: skip
    model_class = auto._model_mapping[library.CONFIG_MAPPING[name]]
    return auto, model_class[0] if isinstance(model_class, list | tuple) else model_class


def _subject_of_folder(library: ModuleType, folder: str, tasks: Mapping[str, str]) -> Subject:
    """Return the subject of a local checkpoint: the instance that it holds, described as any instance is."""
    model_class = released_class(Path(folder), tasks, lambda name: _class_for(library, name, tasks[name])[1])
    model, notes = load(model_class, folder)
    if tasks[model.config.model_type] != "vision":
        return replace(_subject_of_instance(model), name=f"hf:{folder}", notes=tuple(notes))
    return Subject(
        kind="encoder", name=f"hf:{folder}", inputs="embeddings", mask_forms=(), module=vision_stack(model),
        config=_sizes_of(model.config), forward=encode_embeddings,
        declares={"causal": False, "positions": "none", **declared_facts(model.config.model_type)}, notes=tuple(notes),
    )  # fmt: skip


def subject_of_class(model_class: Any, kind: str | None = None) -> Subject:
    """Return the subject of a model class: built from small configurations of its own `config_class`."""
    facts = declared_facts(_family(model_class))
    return _described(
        model_class, kind or _kind_of(model_class), f"hf:{model_class.__name__}", facts,
        build=functools.partial(build, model_class, model_class.config_class), domain=DOMAIN,
    )  # fmt: skip


def _kind_of(model_class: type) -> str:
    for name in (cls.__name__ for cls in model_class.__mro__):  # one's own class is what the library's is
        for suffix, kind in _KIND_OF_SUFFIX:
            if name.endswith(suffix):
                return kind
    return "encoder_decoder" if "decoder_input_ids" in arguments_of(model_class) else "encoder"


def _described(model_class: Any, kind: str, name: str, facts: dict[str, Any], **given: Any) -> Subject:
    takes = arguments_of(model_class)
    calls: dict[str, Callable[..., Any]] = {
        "encoder": forward, "decoder": forward_causally, "encoder_decoder": forward_pair, "classifier": classify,
    }  # fmt: skip
    decodes = kind == "decoder" and cache_of(model_class) is not None
    declares = dict(facts)
    if kind == "encoder_decoder":
        declares = {"causal": True, **declares}
    if kind in ("classifier", "encoder"):
        declares = {"padding_side": "right", **declares}  # as the tokenizers pad, and as most of their pages advise
    return Subject(
        kind=kind, name=name, forward=calls[kind], declares=declares,
        mask_forms=("padding",) if "attention_mask" in takes and _family(model_class) not in WITHOUT_MASK else (),
        embed=embed if _enters_by_embeddings(model_class, kind) else None,
        cache=(cached_in_order if _family(model_class) in IN_ORDER else cached) if decodes else None,
        generate=generate if decodes and hasattr(model_class, "generate") else None,
        backends=_backends(model_class), **given,
    )  # fmt: skip


def _enters_by_embeddings(model_class: Any, kind: str) -> bool:
    """Whether embeddings are another entry to the same model, and not one that is documented to differ."""
    takes = "inputs_embeds" in arguments_of(model_class) and kind in ("encoder", "decoder")
    return takes and _family(model_class) not in NOT_BY_EMBEDDINGS


def _family(model_class: Any) -> str:
    return getattr(model_class.config_class, "model_type", "")


def _backends(model_class: Any) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Offer the eager implementation beside the one that the library chooses by itself."""
    if not getattr(model_class, "_supports_sdpa", False) or not model_class._can_set_attn_implementation():
        return {}  # of a model that is built for one of them the others are variants
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
            return subject_of_class(thing, kind)
        if issubclass(thing, library.PreTrainedConfig):
            return SHIPPED[str(getattr(thing, "model_type", ""))]
        return None
    if isinstance(thing, library.PreTrainedConfig):
        return SHIPPED[thing.model_type]
    if not isinstance(thing, library.PreTrainedModel):
        return None
    return _subject_of_instance(thing, kind)


def _subject_of_instance(thing: Any, kind: str | None = None) -> Subject:
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
