"""Recognisers: from somebody's class, instance or function to a subject. One file a library.

To add a library, add a file and its row to `LIBRARIES`. The file has `SHIPPED`, the subjects that the command line knows
by the library's name, and imports the library only when a subject is built (or asked for by name). Where types can be
recognised it also has `recognise(thing, kind) -> Subject | None`; name it in `ADAPTERS` then.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from veriformer.properties.adapters.torchvision_stand_in import name_operators
from veriformer.properties.subject import KINDS, Subject

ADAPTERS = ("torch_attention", "torch_layers", "torch_parts", "reference_models", "huggingface", "x_transformers", "timm_blocks", "plain")
"""Files of this package in the order in which they are asked; `plain` takes what no library claims."""


@dataclass(frozen=True)
class Library:
    """One library whose subjects are known by name.

    Attributes:
        files: of this package, each with `SHIPPED`.
        packages: distributions that it needs, for versions and for what to install.
        imports: modules that must be there; the library's own first.
    """

    files: tuple[str, ...]
    packages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the modules that are not installed."""
        return [name for name in self.imports if importlib.util.find_spec(name) is None]

    def versions(self) -> dict[str, str]:
        """Return the installed releases of its packages."""
        return {name: metadata.version(name) for name in self.packages if not self.missing()}


LIBRARIES: Mapping[str, Library] = {
    "reference": Library(("reference_parts", "reference_models", "reference_objectives", "reference_tokenizers")),
    "torch": Library(("torch_attention", "torch_layers", "torch_parts"), ("torch",), ("torch",)),
    "hf": Library(("huggingface",), ("transformers",), ("transformers",)),
    "x-transformers": Library(("x_transformers",), ("x-transformers",), ("x_transformers",)),
    "timm": Library(("timm_blocks",), ("timm",), ("timm", "torchvision")),
    "open_clip": Library(("open_clip_models",), ("open_clip_torch",), ("open_clip", "torchvision", "ftfy")),
    "torchtune": Library(("torchtune_models",), ("torchtune", "torchao"), ("torchtune", "torchao", "datasets")),
    "litgpt": Library(("litgpt_models",), ("litgpt",), ("litgpt", "lightning")),
    "torchscale": Library(("torchscale_models",), ("torchscale",), ("torchscale", "fairscale", "timm")),
    "labml-nn": Library(("labml_models",), ("labml-nn",), ("labml_nn", "labml")),
    "esm": Library(("esm_models",), ("fair-esm",), ("esm",)),
    "vit-pytorch": Library(("vit_pytorch_models",), ("vit-pytorch",), ("vit_pytorch",)),
    "local-attention": Library(("local_attention_models",), ("local-attention",), ("local_attention",)),
    "linear-attention-transformer": Library(
        ("linear_attention_models",), ("linear-attention-transformer",), ("linear_attention_transformer",)
    ),
    "performer-pytorch": Library(("performer_models",), ("performer-pytorch",), ("performer_pytorch",)),
    "reformer-pytorch": Library(("reformer_models",), ("reformer-pytorch",), ("reformer_pytorch",)),
    "nystrom-attention": Library(("nystrom_models",), ("nystrom-attention",), ("nystrom_attention",)),
    "memory-efficient-attention": Library(
        ("memory_efficient_models",), ("memory-efficient-attention-pytorch",), ("memory_efficient_attention_pytorch",)
    ),
    "diffusers": Library(("diffusers_models",), ("diffusers",), ("diffusers",)),
    "transformer-lens": Library(
        ("transformer_lens_models",), ("transformer-lens",), ("transformer_lens", "datasets", "fancy_einsum")
    ),
    "keras": Library(("keras_layers",), ("keras",), ("keras",)),
    "keras-hub": Library(("keras_hub_layers",), ("keras-hub", "keras"), ("keras_hub", "keras")),
    "rotary-embedding-torch": Library(
        ("rotary_embedding_packages",), ("rotary-embedding-torch",), ("rotary_embedding_torch",)
    ),
    "positional-encodings": Library(
        ("positional_encodings_tables",), ("positional-encodings",), ("positional_encodings",)
    ),
    "tokenizers": Library(("huggingface_tokenizers",), ("tokenizers",), ("tokenizers",)),
    "sentencepiece": Library(("sentencepiece_models",), ("sentencepiece",), ("sentencepiece",)),
    "tiktoken": Library(("tiktoken_encodings",), ("tiktoken",), ("tiktoken",)),
    "flax": Library(("flax_modules",), ("flax", "jax"), ("flax", "jax")),
    "equinox": Library(("equinox_modules",), ("equinox", "jax"), ("equinox", "jax")),
}
"""Every library whose subjects are shipped, by the name that the command line knows."""


def as_subject(thing: Any, *, kind: str | None = None, **declares: Any) -> Subject:
    """Make a subject of a Subject, a factory returning one, a module class or instance, or a function.

    Args:
        thing: what is to be checked.
        kind: needed where it cannot be told from the thing; a key of `KINDS`.
        declares: facts to declare beside those that the adapter knows.

    Raises:
        TypeError: nothing recognises the thing; the message says what to write instead.
    """
    if isinstance(thing, Subject):
        return thing.with_facts(**declares) if declares else thing
    if kind is not None and kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; the kinds are: {', '.join(KINDS)}")
    for name in ADAPTERS:
        recognise: Callable[..., Subject | None] = importlib.import_module(f"{__name__}.{name}").recognise
        subject = recognise(thing, kind)
        if subject is not None:
            return subject.with_facts(**declares) if declares else subject
    label = getattr(thing, "__name__", type(thing).__name__)
    raise TypeError(
        f"{label!r} is not recognised; say what it is: "
        "Subject(kind=..., build=lambda c: YourModel(c.d_model, ...), forward=lambda m, x: m(x)), "
        f"or pass kind=...; the kinds are: {', '.join(KINDS)}"
    )


def shipped(library: str) -> Mapping[str, Subject]:
    """Return the subjects that are shipped for a library, by name; some are made when they are asked for.

    Raises:
        KeyError: there is no such library.
        MissingLibraryError: it is not installed.
    """
    entry = LIBRARIES[library]
    if missing := entry.missing():
        raise MissingLibraryError(
            f"{library} needs {', '.join(missing)}, which is not installed; install {' '.join(entry.packages)}, "
            "or all libraries that veriformer knows as CONTRIBUTING.md says"
        )
    name_operators()
    found = [importlib.import_module(f"{__name__}.{name}").SHIPPED for name in entry.files]
    return found[0] if len(found) == 1 else {name: subject for part in found for name, subject in part.items()}


class MissingLibraryError(ImportError):
    """A library that is to be checked is not installed; says what to install."""
