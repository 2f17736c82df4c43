"""The subject: how an implementation plugs in. A small dataclass and a table of kinds; no inheritance."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from veriformer.properties.subject import asking
from veriformer.properties.subject.facts import validated
from veriformer.properties.subject.kinds import KINDS, SEQUENCE_KINDS
from veriformer.properties.subject.sizes import DrawnConfig

_MASK_ARGUMENTS = {"encoder_decoder": ("source_mask", "target_mask"), "cross_attention": ("memory_mask",)}

INPUTS = ("tokens", "embeddings")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One implementation under test.

    Attributes:
        kind: a key of `KINDS`.
        build: gives a fresh model for drawn sizes; None for a ready-made `module` or a plain function.
        forward: `forward(model, *inputs)` as `KINDS[kind].signature` says; None: the model itself is called.
        module: a ready-made instance, never re-initialised; its sizes stand in `config`.
        name: how reports call it.
        declares: facts, verified (see `veriformer.properties.subject.facts.FACTS`).
        domain: sizes that `build` supports, e.g. `{"num_heads": [4, 8]}`; other sizes are drawn freely.
        config: sizes of `module`.
        inputs: "tokens" or "embeddings" where that differs from the kind's usual input.
        mask_forms: kinds of `attention_mask` it takes: "padding" `[B, T]` (`[B, S]` of the attention kind), "pairwise"
            `[T, S]` and `[B, T, S]`, "additive" (attention kind: a float mask). Found from the signature of `forward`
            if None.
        embed: `embed(model, embeddings [B,T,D], attention_mask=None)`: the forward from embeddings on.
        weights: as `forward`, but returns attention weights `[B, H, T, S]`.
        cache: `cache(model, chunks, attention_mask=None, reorder=None)`: outputs `[B, T, *]`, or a list of one
            `[B, t_i, *]` a chunk, of chunks of tokens `[B, t_i]`, computed one after another; `attention_mask` `[B, T]`
            of them all. After the first chunk, whose outputs stay as they are, sample b goes on as sample `reorder[b]`
            (beam search; any index may come twice). Both may be left out. An encoder-decoder's is
            `cache(model, source, chunks)`, chunks of the target.
        generate: `generate(model, tokens, steps, use_cache)`: tokens `[B, T + steps]`, greedily chosen; an
            encoder-decoder's, given a source, `[B, 1 + steps]` or fewer: a start token and the target, padded behind.
        sampling: `sampling(model, tokens, steps)`, with `temperature=1.0` and `top_k=None` where it takes them:
            the tokens `[B, T + steps]` and what each was drawn from `[B, steps, V]`, normalised or not.
        projections: `projections(model)`: writable views `q, k, v, o` `[out, in]` (and `q_bias` ... where present).
        backends: name to a factory of context managers; each selects one implementation while it is open.
        patches: `patches(model, images [B,C,H,W])`: the tokens `[B, N, D]` that patches of an image become, others
            (class tokens, registers) among them; the images have the shape `image`.
        image: `(C, H, W)`.
        router: `router(model, x [B,T,D])`: the weights `[B, T, E]` by which experts are mixed; 0: not chosen.
        loss: `loss(model, *inputs, labels)`: the loss that a model gives itself, a scalar; labels `[B, T]`, and `[B]`
            of a classifier.
        accumulate: `accumulate(model, pairs)`: one loss of several (logits, labels), as gradient accumulation has it.
        decode: `decode(model, ids)`: the text of token ids.
        train: `train(texts, vocab_size)`: a tokenizer trained on texts.
        words: `words(model, text)`: the words that are segmented each for itself, as lists of symbols.
        vocabulary: `vocabulary(model)`: piece to id.
        merges: `merges(model)`: pairs of pieces in the order in which they were learnt.
        scores: `scores(model)`: piece to log probability.
        notes: what was guessed or found out by whoever made the subject, one sentence each; stands in every report.
        guesses: facts that names suggest; used like those that are seen, so that what breaks them is asked, not failed.
        target: how the command line names this subject; filled in by it.
    """

    kind: str
    build: Callable[[DrawnConfig], Any] | None = None
    forward: Callable[..., Any] | None = None
    module: Any = None
    name: str = ""
    declares: Mapping[str, Any] = field(default_factory=dict)
    domain: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    config: DrawnConfig | None = None
    inputs: str | None = None
    mask_forms: tuple[str, ...] | None = None
    embed: Callable[..., Any] | None = None
    weights: Callable[..., Any] | None = None
    cache: Callable[..., Any] | None = None
    generate: Callable[..., Any] | None = None
    sampling: Callable[..., Any] | None = None
    projections: Callable[[Any], Mapping[str, Any]] | None = None
    backends: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    patches: Callable[..., Any] | None = None
    image: tuple[int, int, int] | None = None
    router: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    accumulate: Callable[..., Any] | None = None
    decode: Callable[..., Any] | None = None
    train: Callable[..., Any] | None = None
    words: Callable[..., Any] | None = None
    vocabulary: Callable[..., Any] | None = None
    merges: Callable[..., Any] | None = None
    scores: Callable[..., Any] | None = None
    notes: tuple[str, ...] = ()
    guesses: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            close = difflib.get_close_matches(str(self.kind), KINDS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"there is no kind {self.kind!r}; {hint}the kinds are: {', '.join(KINDS)}")
        object.__setattr__(self, "declares", validated(self.declares))
        if self.build is None and self.module is None and self.forward is None:
            raise ValueError("the subject has neither build, module nor forward; give one of them")
        if self.build is not None and self.module is not None:
            raise ValueError("the subject has both build and module; give the one that is to be checked")
        if self.inputs is not None and self.inputs not in INPUTS:
            raise ValueError(f"inputs was {self.inputs!r}; it must be one of {', '.join(INPUTS)}")
        unknown = set(self.domain) - {f.name for f in fields(DrawnConfig)}
        if unknown:
            names = ", ".join(f.name for f in fields(DrawnConfig))
            raise ValueError(f"domain names no such size: {', '.join(sorted(unknown))}; the sizes are: {names}")
        for size, values in self.domain.items():
            if not values:
                raise ValueError(f"domain[{size!r}] is empty; list the sizes that build supports")
        if not isinstance(self.name, str):
            raise ValueError(f"name was {self.name!r}; it must be a string")
        if not self.name:
            object.__setattr__(self, "name", self._guess_name())

    def _guess_name(self) -> str:
        part = self.module if self.module is not None else (self.build or self.forward)
        if self.module is not None:
            return type(part).__name__
        label = str(getattr(part, "__name__", type(part).__name__))
        return self.kind if label == "<lambda>" else label

    @property
    def takes_tokens(self) -> bool:
        """Whether its sequences are token ids rather than embeddings."""
        return (self.inputs or KINDS[self.kind].inputs) == "tokens"

    @property
    def device(self) -> str:
        """Where a ready-made model lies; else the CPU."""
        parameters = getattr(self.module, "parameters", None)
        first = next(iter(parameters()), None) if callable(parameters) else None
        return str(getattr(first, "device", "cpu")).replace("meta", "cpu")

    @property
    def is_functional(self) -> bool:
        """Whether there is no model: a plain function of its inputs."""
        return self.build is None and self.module is None

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a declared fact, else what the kind implies, else `default`."""
        asking.note(name)
        if name in self.declares:
            return self.declares[name]
        return KINDS[self.kind].implied.get(name, default)

    @property
    def shortest(self) -> int:
        """Length of the shortest sequence that it takes; 1 where its kind takes none."""
        return int(self.fact("min_length", 1)) if self.kind in SEQUENCE_KINDS else 1

    @property
    def longest(self) -> int | None:
        """Length of the longest sequence that it is declared to take; None where that is left open."""
        return self.fact("max_len") if self.kind in SEQUENCE_KINDS else None

    def with_facts(self, **facts: Any) -> Subject:
        """Return a copy that declares `facts` too, and says no more that they were guessed."""
        notes = tuple(note for note in self.notes if note.partition(" = ")[0] not in facts)
        return replace(self, declares={**self.declares, **facts}, notes=notes)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names that `forward` takes; contains "**" if it takes any keyword."""
        called = self.forward
        if called is None:
            called = self.module.forward if hasattr(self.module, "forward") else self.module
        if called is None:
            return frozenset({"attention_mask", "**"})
        if (schema := getattr(called, "schema", None)) is not None:  # of TorchScript, which has no signature
            return frozenset(argument.name for argument in schema.arguments)
        try:
            parameters = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):
            return frozenset({"**"})
        names = {p.name for p in parameters}
        return frozenset(names | ({"**"} if any(p.kind is p.VAR_KEYWORD for p in parameters) else set()))

    def accepts(self, argument: str) -> bool:
        """Whether `forward` takes the keyword `argument`."""
        return argument in self.parameter_names or "**" in self.parameter_names

    def takes_mask(self, form: str) -> bool:
        """Whether it takes masks of a form: "padding", "pairwise" or "additive"."""
        if self.mask_forms is not None:
            return form in self.mask_forms
        arguments = _MASK_ARGUMENTS.get(self.kind, ("attention_mask",))
        usual = ("pairwise",) if self.kind == "attention" else ("padding",)
        return form in usual and any(self.accepts(argument) for argument in arguments)
