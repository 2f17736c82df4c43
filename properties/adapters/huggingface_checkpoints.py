"""Local checkpoint folders of Hugging Face transformers: `hf:PATH`, judged with the weights that they hold.

A folder holds config.json and model.safetensors (or its shards with an index, or pytorch_model.bin). It is loaded into
the released class that its configuration names. Nothing is fetched from anywhere, and no code in the folder is run:
weights are safetensors, or read by torch's weights_only.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from veriformer.properties.adapters.huggingface_calls import transformers
from veriformer.properties.adapters.target import TargetError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files that hold the weights, the preferred one first; each may be cut into shards that `<name>.index.json` lists."""

_SHOWN = 3  # names in a message


def is_folder(name: str) -> bool:
    """Whether a name is that of a checkpoint folder rather than of a model type or class."""
    separated = any(sign in name for sign in (os.sep, os.altsep or os.sep)) or name in (".", "..")
    return separated or Path(name, "config.json").is_file()


def released_class(folder: Path, known: Collection[str], fallback: Any) -> Any:
    """Return the class that the configuration of a folder names, after looking whether all that it needs is there.

    Args:
        folder: of the checkpoint.
        known: model types that can be judged.
        fallback: gives, for a model type, the class that is taken where the configuration names none of the library's.

    Raises:
        TargetError: nothing can be loaded from there; says what is missing or refused.
    """
    config = _read_object(folder / "config.json", folder)
    model_type = config.get("model_type")
    if "auto_map" in config:
        raise TargetError(
            f"{folder} needs code of its own: auto_map in config.json names {_listed(_own_code(config))}; that is not "
            "run here; import the class yourself and check an instance: path/file.py:model"
        )
    if not isinstance(model_type, str) or model_type not in known:
        close = difflib.get_close_matches(str(model_type), list(known), n=1)
        raise TargetError(
            f"{folder / 'config.json'} has model_type {model_type!r}, which is no type of transformers "
            f"{transformers().__version__} that reads text or is known here"
            + (f"; the nearest one is {close[0]!r}" if close else "")
        )
    _insist_on_weights(folder)
    named = config.get("architectures") or []
    found = (getattr(transformers(), name, None) for name in named if isinstance(name, str))
    released = next((cls for cls in found if isinstance(cls, type) and hasattr(cls, "from_pretrained")), None)
    return released or fallback(model_type)


def load(model_class: Any, folder: str) -> tuple[Any, list[str]]:
    """Return the model of a checkpoint folder, offline, in the dtype of its weights; and what of the folder it lacks.

    Args:
        model_class: a released class.
        folder: of the checkpoint.

    Raises:
        TargetError: the weights cannot be read, or are not those of the class.
    """
    is_safe = any(Path(folder, f"{WEIGHTS[0]}{end}").is_file() for end in ("", ".index.json"))
    library, shows_bars = transformers(), transformers().utils.logging.is_progress_bar_enabled()
    library.utils.logging.disable_progress_bar()  # ours stands in its place
    try:
        model, told = model_class.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=is_safe, weights_only=True,
            dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as problem:
        first = (str(problem).strip() or "no message").splitlines()[0][:300]
        raise TargetError(
            f"{folder} cannot be loaded into {model_class.__name__}: {type(problem).__name__}: {first}"
        ) from problem
    finally:
        if shows_bars:
            library.utils.logging.enable_progress_bar()
    _insist_on_a_fit(model_class, folder, told)
    return model, _left_out(model_class, folder, told)


def _left_out(model_class: Any, folder: str, told: Mapping[str, Any]) -> list[str]:
    """Return, in a sentence, which weights of a folder belong to no part of what is judged."""
    unused = sorted(map(str, told.get("unexpected_keys", ())))
    named = _read_object(Path(folder, "config.json"), Path(folder)).get("architectures") or ()
    others = [str(n) for n in named if n != model_class.__name__]
    if not unused and not others:
        return []
    weights = f"no part of it takes {_listed(unused)} of its weights" if unused else ""
    saved = f"it was saved as {_listed(others)}, which is no class of transformers" if others else ""
    return [
        f"judged as {model_class.__name__} alone: {' and '.join(filter(None, (saved, weights)))}; for all of it check "
        "an instance, path/file.py:model"
    ]


def _insist_on_a_fit(model_class: Any, folder: str, told: Mapping[str, Any]) -> None:
    """Refuse weights that leave some of a model as it was initialised: it would be judged in their place."""
    mismatched = sorted(
        str(one[0] if isinstance(one, tuple | list) else one) for one in told.get("mismatched_keys", ())
    )
    if mismatched:
        raise TargetError(
            f"the weights in {folder} do not fit its config.json: {_listed(mismatched)} of {model_class.__name__} "
            "have another shape there; give the configuration that they were saved with"
        )
    if missing := sorted(map(str, told.get("missing_keys", ()))):
        raise TargetError(
            f"the weights in {folder} are not all of {model_class.__name__}, which config.json names: "
            f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing; name the class that was saved in "
            "architectures"
        )


def _insist_on_weights(folder: Path) -> None:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = _read_object(index, folder).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise TargetError(f"{index} lists no shards: weight_map is missing or empty")
            if away := sorted(s for s in map(str, shards.values()) if not s or s != Path(s).name):
                raise TargetError(f"{index} lists {_listed(away[:1])}; a shard must lie in the folder itself")
            if missing := sorted(s for s in set(map(str, shards.values())) if not (folder / s).is_file()):
                raise TargetError(
                    f"{folder} lacks {len(missing)} of the {len(set(shards.values()))} shards that {index.name} lists: "
                    f"{_listed(missing)}; put them there"
                )
            return
    raise TargetError(
        f"{folder} holds no weights; one of {', '.join(WEIGHTS)} is required, or its shards with an index "
        "(model.safetensors.index.json)"
    )


def _read_object(path: Path, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "does not exist"
        raise TargetError(f"{str(folder)!r} {wrong}; hf:PATH takes the folder of a checkpoint", is_usage=True)
    _insist_on_files(folder)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TargetError(
            f"{folder} has no {path.name}; hf:PATH takes a folder with config.json and {WEIGHTS[0]}, as "
            "save_pretrained writes it",
            is_usage=True,
        ) from None
    except RecursionError:
        raise TargetError(f"{path} cannot be read: it nests its data too deeply") from None
    except (OSError, ValueError) as problem:
        raise TargetError(f"{path} cannot be read: {type(problem).__name__}: {problem}") from None
    if not isinstance(found, dict):
        raise TargetError(f"{path} holds a {type(found).__name__}, where a JSON object is required")
    return found


def _insist_on_files(folder: Path) -> None:
    """Refuse a folder with a FIFO or a device in it: the library opens files of many names, and would wait for one."""
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise TargetError(f"{path} is neither a file nor a folder; take it away")


def _own_code(config: Mapping[str, Any]) -> list[str]:
    named = config["auto_map"]
    return sorted(map(str, named.values())) if isinstance(named, dict) else [str(named)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
