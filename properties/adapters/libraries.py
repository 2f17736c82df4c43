"""Every library whose subjects are known by name: one table. Imports none of them, nor torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Library:
    """One library whose subjects are known by name.

    Attributes:
        files: of `adapters`, each with `SHIPPED`.
        packages: distributions that it needs, for versions and for what to install.
        imports: modules that must be there; the library's own first.
        plugin: the module with `SHIPPED` where a plug-in ships the subjects; "" for ours.
    """

    files: tuple[str, ...]
    packages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    plugin: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules with its subjects."""
        return (self.plugin,) if self.plugin else tuple(f"veriformer.properties.adapters.{file}" for file in self.files)

    def missing(self) -> list[str]:
        """Return the modules that are not installed."""
        return [name for name in self.imports if importlib.util.find_spec(name) is None]

    def versions(self) -> dict[str, str]:
        """Return the installed releases of its packages."""
        return {name: metadata.version(name) for name in self.packages if not self.missing()}


LIBRARIES: dict[str, Library] = {
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
    "linformer": Library(("linformer_models",), ("linformer",), ("linformer",)),
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
"""Every library whose subjects are shipped, by the name that the command line knows; plug-ins add theirs."""
