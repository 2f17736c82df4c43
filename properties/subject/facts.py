"""Facts: what a subject may declare about itself. One table; a declared fact is verified, never believed.

To add a fact, add one row to `FACTS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One thing a subject may declare.

    Attributes:
        name: key in `Subject.declares`.
        values: what it may be, in words.
        accepts: whether a value is one of them.
        meaning: one sentence.
    """

    name: str
    values: str
    accepts: Callable[[Any], bool]
    meaning: str


def _one_of(name: str, options: tuple[str, ...], meaning: str) -> Fact:
    return Fact(name, "one of " + ", ".join(options), lambda v: v in options, meaning)


def _flag(name: str, meaning: str) -> Fact:
    return Fact(name, "True or False", lambda v: isinstance(v, bool), meaning)


def _size(name: str, meaning: str) -> Fact:
    return Fact(name, "an integer >= 1", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, meaning)


def _count(name: str, meaning: str) -> Fact:
    accepts = lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0  # noqa: E731
    return Fact(name, "an integer >= 0", accepts, meaning)


def _share(name: str, meaning: str) -> Fact:
    return Fact(name, "a number in [0, 1)", lambda v: isinstance(v, int | float) and 0 <= v < 1, meaning)


def _is_scale(value: Any) -> bool:
    return value in SCALES or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)


SCALES: Mapping[str, Callable[[int, int], float]] = {
    "1/sqrt(d_head)": lambda d_head, d_model: d_head**-0.5,
    "1/d_head": lambda d_head, d_model: 1.0 / d_head,
    "1/sqrt(d_model)": lambda d_head, d_model: d_model**-0.5,
    "1": lambda d_head, d_model: 1.0,
    "1/sqrt(d_head/2)": lambda d_head, d_model: (d_head / 2) ** -0.5,  # heads of two sequences side by side, as Zamba's
}
"""Named attention scales as functions of (d_head, d_model); a number may be declared instead."""

POSITIONS = ("none", "sinusoidal", "learned", "rotary", "alibi", "t5", "relative", "other")

FACTS: Mapping[str, Fact] = {
    fact.name: fact
    for fact in (
        _flag("causal", "output t depends on inputs 0..t alone"),
        _one_of("positions", POSITIONS, "how order enters; 'other' for a kind that has no name here"),
        _size(
            "window",
            "sliding window of each layer: its output t sees its inputs t - window + 1 .. t",
        ),
        _flag("sparse", "not all that could be seen is, by design: blocks, dilated or shifted windows, documents"),
        _count("sink_tokens", "first tokens that every query of a sliding window sees besides"),
        _size("prefix", "prefix-LM: the first `prefix` positions see one another both ways"),
        Fact(
            "attention_scale",
            f"a positive number or one of {', '.join(SCALES)}",
            _is_scale,
            "factor on q k^T before the softmax (default 1/sqrt(d_head))",
        ),
        Fact(
            "soft_cap",
            "a number > 0",
            lambda v: isinstance(v, int | float) and v > 0,
            "scores are c * tanh(scores / c)",
        ),
        _flag("observed_scale", "the scale can be read off while the model runs (found by the probe, not declared)"),
        _flag("query_key_norm", "queries and keys are normalised before the scores"),
        _flag("grouped_queries", "takes fewer key-value heads than query heads"),
        _flag("sink", "softmax has an extra sink: rows of weights sum to at most 1"),
        _one_of("empty_row", ("zeros", "mean", "nan", "error"), "output of a query that may attend to no key"),
        _one_of(
            "causal_alignment", ("bottom-right", "top-left"), "causal mask where queries and keys differ in number"
        ),
        _one_of("norm", ("layer", "rms", "none", "other"), "kind of normalization"),
        _one_of("norm_placement", ("pre", "post", "other"), "where the normalization stands"),
        _flag("final_norm", "a normalization follows the last layer"),
        _flag("residual", "sublayers are wrapped in residual connections"),
        _one_of("activation", ("relu", "gelu", "gelu_tanh", "swiglu", "other"), "feed-forward activation"),
        _flag("bias", "linear maps have biases"),
        _flag("norm_bias", "the normalization has a bias beside its gain (default: LayerNorm yes, RMSNorm no)"),
        _flag("output_bias", "the projection to the vocabulary, or to the classes, has a bias"),
        _one_of("init", ("xavier", "gpt2", "default", "other"), "scheme of the initial weights"),
        _one_of("memory", ("linear", "quadratic"), "how the largest intermediate tensor grows with T"),
        _flag("drop_path_scaled", "stochastic depth divides what it keeps by the share kept (default)"),
        _flag("tied", "output projection and token embedding are one parameter"),
        _flag("cross_attention", "the layer attends to a memory"),
        _flag("encodes_source", "an encoder-decoder encodes its source (default) rather than taking a memory"),
        _flag("stacked", "has num_layers layers (default) rather than one"),
        _flag("shared_layers", "layers share parameters on purpose"),
        _flag("batch_coupled", "samples of a batch influence one another by design (expert capacity)"),
        _one_of(
            "structure",
            ("textbook", "other"),
            "the blocks are those of the textbook: counts and FLOPs follow from the sizes",
        ),
        _flag("once_differentiable", "its backward is written by hand, for first derivatives alone"),
        _flag("half_precision", "it is meant for half precision (False: its sums and squares may overflow there)"),
        _flag("inference_only", "its forward computes no gradients on purpose (inference_mode, no_grad)"),
        _flag("frozen", "weights that ask for no gradient are kept from training on purpose"),
        _flag("master_weights", "what trains it keeps float32 copies of parameters of fewer bits"),
        _flag("norm_topk_prob", "the weights of the experts that were chosen are divided by their sum"),
        _flag("quantised", "values are rounded to few bits on purpose, their gradients passed through"),
        _flag("embedding_scale", "token embeddings are multiplied by sqrt(d_model)"),
        _one_of("pooling", ("cls", "mean", "max", "weighted", "last", "none", "other"), "how a sequence is pooled"),
        _flag("reorders_mask", "with its samples a cache reorders the padding mask (default); else the caller does"),
        _one_of("padding_side", ("right", "left", "both"), "sides on which padding is supported"),
        _one_of("layout", ("interleaved", "halves"), "channel order of sines and cosines or of rotary pairs"),
        Fact(
            "base",
            "a number > 1",
            lambda v: isinstance(v, int | float) and v > 1,
            "wavelength base of sinusoidal or rotary positions (default 10000)",
        ),
        _size("rotary_dim", "channels that are rotated (partial rotary); the rest pass through"),
        _size("min_length", "shortest supported sequence, of every sequence that it takes"),
        _size("max_len", "longest supported sequence"),
        _one_of("beyond_max_len", ("works", "error"), "what happens past max_len"),
        _one_of(
            "slopes",
            ("interleaved", "geometric"),
            "ALiBi's of heads that are no power of two: of two powers (the authors' code, default), or 2^(-8i/h)",
        ),
        _flag("bidirectional", "a relative bias tells the past from the future"),
        _flag("equal_lengths", "a relative bias is made for as many queries as keys alone"),
        _size("num_buckets", "number of T5 buckets"),
        _size("max_distance", "distance from which T5 buckets saturate"),
        _count("padding_idx", "token id whose embedding stays zero and is not trained"),
        _count("position_offset", "index of the first position in the table"),
        _count("extra_tokens", "class and register tokens that the subject puts before its input"),
        Fact("ignore_index", "an integer", lambda v: isinstance(v, int), "label that is not counted (default -100)"),
        _share("label_smoothing", "share eps of the target that is spread evenly over the vocabulary"),
        Fact(
            "z_loss",
            "a number >= 0",
            lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v >= 0,
            "c: the mean of c times the square of the log of the softmax's sum is added (default 0)",
        ),
        _flag("shifts_labels", "the loss itself moves the labels by one, so that t predicts t + 1"),
        _flag("plain_loss", "a model's own loss is the mean over the labels that count (default); False: it has more"),
        _flag("cached_chunks", "a cache takes several tokens at once behind others (default); False: one at a time"),
        _one_of("empty_loss", ("zero", "nan", "error"), "loss of a batch in which nothing is to be predicted"),
        _count("mask_id", "id of the token that hides another"),
        Fact(
            "special_ids",
            "a sequence of integers",
            lambda v: isinstance(v, Sequence) and not isinstance(v, str),
            "ids that are never hidden",
        ),
        _share("mask_probability", "share of the tokens that are to be predicted (default 0.15)"),
        _one_of("schedule", ("noam", "linear", "cosine", "other"), "formula of the learning rate"),
        _count("warmup_steps", "steps over which the learning rate rises"),
        _count("first_step", "number of the first step that the rate is asked for (default 0)"),
        _size("total_steps", "step at which the learning rate has fallen to its floor"),
        Fact(
            "peak",
            "a number > 0",
            lambda v: isinstance(v, int | float) and v > 0,
            "highest learning rate; for Noam the factor before the formula (default 1)",
        ),
        Fact("floor", "a number >= 0", lambda v: isinstance(v, int | float) and v >= 0, "learning rate at the end"),
        _one_of("algorithm", ("bpe", "wordpiece", "unigram", "other"), "how text is cut into pieces"),
        _flag("byte_level", "every byte is a piece, so that nothing is unknown"),
        _flag("reversible", "decoding gives back the text, to the letter"),
        _count("unknown_id", "id of what no piece covers"),
        Fact("specials", "a mapping of text to id", lambda v: isinstance(v, Mapping), "special tokens, never cut"),
    )
}
"""Every fact a subject may declare."""


def validated(declares: Mapping[str, Any]) -> dict[str, Any]:
    """Check declared facts against `FACTS`.

    Args:
        declares: fact name to value.

    Returns:
        A copy.

    Raises:
        ValueError: a fact does not exist or its value is none of the allowed ones.
    """
    for name, value in declares.items():
        if name not in FACTS:
            close = difflib.get_close_matches(name, FACTS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"there is no fact {name!r} to declare; {hint}the facts are: {', '.join(sorted(FACTS))}")
        if not FACTS[name].accepts(value):
            raise ValueError(f"the fact {name!r} was declared as {value!r}; it must be {FACTS[name].values}")
    return dict(declares)


def attention_scale(declared: Any, d_head: int, d_model: int) -> float:
    """Return the declared factor on `q k^T` as a number; `None` means 1/sqrt(d_head).

    >>> attention_scale(None, 16, 64)
    0.25
    """
    if declared is None:
        return float(d_head) ** -0.5
    return float(SCALES[declared](d_head, d_model)) if isinstance(declared, str) else float(declared)
