"""The Subject that was understood of somebody's code, as the source of a file that declares it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from veriformer.properties.adapters.target import FILE, Target
from veriformer.properties.adapters.unknown.written import source_of
from veriformer.properties.subject.kinds import KINDS
from veriformer.properties.subject.subject import Subject


def as_source(subject: Subject) -> str:
    """Return source that declares a subject; empty where it was not made of a class, function or instance of a user.

    It is what was judged: the same functions, with what was guessed as comments.
    """
    forward = source_of(subject.forward)
    if forward is None:
        return ""
    word = Target.parse(subject.target)
    name = Path(word.place).stem if word.kind == FILE else word.place
    build = source_of(subject.build) if subject.build is not None else None
    texts = [text for text in (build, forward, *_beside(subject).values()) if text]
    parts = [part.strip("\n") for text in texts for part in text.split("\n\n\n")]
    heads = [part for part in parts if part.startswith(("import ", "from "))]
    functions = list(dict.fromkeys(part for part in parts if part and part not in heads))
    lines = {line for head in heads for line in head.splitlines()}
    if subject.module is not None:
        lines |= {"from veriformer.properties import DrawnConfig"}
    imports = sorted({"from veriformer.properties import Subject", *lines}, key=lambda x: (x.startswith("from"), x))
    return (
        "\n".join(
            [
                f'"""What was understood of {word.attribute} in {Path(word.place).name}: change what is not so."""',
                "",
                *([line for line in imports if not line.startswith("from veriformer")] or [""])[:1],
                f"import {name} as user  # found beside this file, or installed",
                *_together([line for line in imports if line.startswith("from veriformer")]),
                *(f"\n\n{text}" for text in functions),
                "",
                "",
                *_declaration(subject, word.attribute),
            ]
        ).replace("\n\n\n\n", "\n\n\n")
        + "\n"
    )


def _beside(subject: Subject) -> dict[str, str]:
    """Return the source of every other callable of a subject that was found by trying: its loss, cache, generation."""
    known = {f.name: getattr(subject, f.name) for f in fields(Subject) if f.name not in ("build", "forward")}
    found = {name: source_of(value) for name, value in known.items() if callable(value)}
    return {name: text for name, text in found.items() if text}


def _together(lines: list[str]) -> list[str]:
    names = sorted(line.rpartition(" ")[2] for line in lines)
    return [f"from veriformer.properties import {', '.join(names)}"] if names else []


def _declaration(subject: Subject, attribute: str) -> list[str]:
    kind = KINDS[subject.kind]
    rows = [f"kind={subject.kind!r},  # forward(model, {kind.signature.strip('()')}) -> {kind.returns}",
            f"name={subject.name!r},"]  # fmt: skip
    if subject.build is not None:
        rows.append("build=build,  # c has the drawn sizes: " + ", ".join(_sizes()))
    else:
        config = subject.config
        sizes = ", ".join(f"{n}={getattr(config, n)}" for n in _sizes()) if config else ""
        rows += [f"module=user.{attribute},", f"config=DrawnConfig({sizes}),"]
    rows.append("forward=forward,")
    rows += [f"{name}={name}," for name in _beside(subject)]
    if subject.image is not None:
        rows.append(f"image={subject.image!r},")
    if subject.domain:
        rows.append(f"domain={dict(subject.domain)!r},  # the sizes that it has")
    if subject.inputs is not None:
        rows.append(f"inputs={subject.inputs!r},")
    rows.append(f"mask_forms={subject.mask_forms!r},")
    facts = dict(subject.declares)
    inner = ", ".join(f"{n!r}: {v!r}" for n, v in facts.items())
    rows.append(f"declares={{{inner}}},  # facts, verified and never believed: `veriformer facts` lists them")
    if subject.guesses:
        rows.append(f"guesses={dict(subject.guesses)!r},  # facts that names suggest: declare those that are so")
    notes = [f"# {note}" for note in subject.notes]
    return [*notes, "mine = Subject(", *(f"    {row}" for row in rows), ")"]


def _sizes() -> list[str]:
    from veriformer.properties.subject.sizes import DrawnConfig

    return [f.name for f in fields(DrawnConfig)]
