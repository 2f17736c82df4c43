"""What an argument of a constructor means: names of sizes, as houses write them, and values for what is no size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_SIZES: Mapping[str, str] = {
    "num_key_value_heads": r"(n|num)_?(kv|key_value|query_groups?)_?(heads?|groups?)?|kv_heads|num_query_groups",
    "num_heads": r"(n|num)?_?((attn|attention|self_attn|transformer|encoder|decoder|enc|dec)_)*heads?|h|nhead"
    r"|heads?_(n|num|count)",
    "d_head": r"(head|heads)_(dim|size)|(d|dim)_?(head|k|v|kv|qkv?|key|value)|(key|value)_(dim|size)",
    "num_layers": r"(n|num)?_?((encoder|decoder|enc|dec|hidden|transformer|attn|attention)_?)?"
    r"(layers?|blocks?)|depth|n|(enc|dec|encoder|decoder)_depth|(layers?|blocks?)_(n|num|count)|nlayers",
    "d_ff": r"d_?(ff|ffn|inner|mlp|feed_?forward)|((encoder|decoder|enc|dec)_)?"
    r"(ff|ffn|mlp|feed_?forward|intermediate|inner|filter|pf|pwff?|fc)_?"
    r"((hidden|embed)_?)?(dim|dims|size|width|d|units|channels)|(ff|ffn|mlp|feed_?forward)_hidden|dim_?(ff|feed_?forward|mlp)"
    r"|n_inner|ff|hidden_ff|(moe|experts?)_(hidden|intermediate|inner|ff|ffn)?_?(dim|size)",
    "vocab_size": r"((src|tgt|trg|source|target|input|output|enc|dec|encoder|decoder|token|text)_)?"
    r"(vocab|voc|vocabulary)(_?(size|sz|len|length|dim))?|(n|num|size|len)_?((src|tgt|trg|word)_)?(vocab|tokens?|words|vocabulary)"
    r"|ntoken|n?vocab|tokens|v|((src|tgt|trg|source|target|enc|dec|encoder|decoder)_)?v_?size",
    "max_len": r"(max|maximum)_?((src|tgt|trg|source|target|input|output|enc|dec)_)?"
    r"((seq|seqs|sequence|context|ctx|text|token|tokens|position|positions|pos|src|tgt|sentence|captions?|words?|frames?)_?)?"
    r"(len|length|lens|size|embeddings|emb|embed|positions?|tokens)?"
    r"|block_?size|(context|ctx|seq|sequence|sentence)_?(len|length|size|window)|context|n_?(ctx|positions|seq)"
    r"|num_positions|n_position|len_max(_seq\w*)?|max_t|t_max|maxlen|max_?\w*_(len|length)|\w+_(context|ctx|seq|sequence)_?(len|length)"
    r"|(src|tgt|trg|source|target|input|output|enc|dec|encoder|decoder)_(max|context|ctx|seq|sequence|sentence)?_?"
    r"((seq|sequence)_?)?(len|length)",
    "num_classes": r"(n|num)_?(class|classes|labels?|outputs?|targets|categories)|(out|output)_(classes|size)"
    r"|nclass|classes|c_out|out(put)?_dim",
    "dropout": r"(\w+_)?(drop|dropout|pdrop)(_?(rate|p|prob|probability|ratio))?|p_?(drop|dropout)",
    "d_model": r"(d|dim)_?(model|embed|emb|hidden|embedding)?|dims?|(n|num)_?(embd?|embed|embedding|hidden|state)"
    r"|((src|tgt|trg|enc|dec|encoder|decoder)_)?(embed|emb|embeddings?|model|token|input|hidden|encoder|decoder|enc|dec|residual|transformer|word|query|context)_?(embed(ding)?_?)?"
    r"(dim|dims|size|width|d)|(h|hid)_(dim|size)|(d|dim|n)_(word|token|emb|model)?_?(vec|vector)|(embed|emb|embd)|width|channels?_dim|d_(in|out)|hidden|features|(in|out)_features|nhid|d_hid"
    r"|(n|num)_?(features?|feats|variables|vars|series)|(enc|dec|c)_in|feature_(dim|size)|(input|in)_feats",
}  # fmt: skip
"""Patterns of whole names in lower case; the first size whose pattern fits is meant."""

_BARE = re.compile(r"size|dim|width")
"""Names that mean d_model in a constructor where nothing else does."""

_WEAK = re.compile(r"(d|n|num)?_?(hidden|hid)(_?(dim|dims|size|width|units|features))?|hidden_?(dim|size)|d_hid|nhid")
"""Names that mean d_model where nothing else does, and d_ff beside one that does."""

_SIDE = re.compile(r"^(enc|dec|encoder|decoder|src|tgt|trg|source|target|self|text)_")
_OTHER_SIDE = re.compile(r"_(enc|dec|encoder|decoder|src|tgt|trg|source|target)$")
_NUMBER = re.compile(r"^(\w+)_(n|num|nums|count|number)$")
_HEIGHT = re.compile(r"height")
_ENTERS, _LEAVES = re.compile(r"in(put)?_dim"), re.compile(r"out(put)?_dim")

_PADS = re.compile(r"(\w+_)?pad(ding)?_?(idx|index|id|token|token_id|token_idx)")
_TURNED = re.compile(r"(n|num|dim|d)_?(rot|rotary|rope)|(rot|rotary|rope)_?(emb_?)?(ndims?|dims?|size|channels)")
_STARTS = re.compile(r"(\w+_)?(batch_size|bsz)")

_OTHERS: tuple[tuple[str, str], ...] = (
    (r"(\w+_)?window(_size|_len|_length)?", "c.max_len"),
    (r"(\w+_)?(im|img|image)_?(size|h|w|height|width|dim)?|height|width|h|w", "8"),
    (r"(\w+_)?patch(_?(size|dim|h|w|height|width))?|p_size", "4"),
    (r"(\w+_)?(in_?)?(channels?|chans|chan)|in_c|c_dim", "3"),
    (r"(\w+_)?eps(ilon)?", "1e-05"),
    (r"(\w+_)?(theta|rope_base|base)", "10000.0"),
    (r"(\w+_)?bias", "True"),
    (r"(\w+_)?device", "'cpu'"),
    (r"(\w+_)?(act|activation)(_fn|_function|_typ|_type)?", "'gelu'"),
    (r"(\w+_)?(expansion|mult|multiplier|ratio|expand|expansion_factor|mlp_ratio)", "4"),
    (r"(\w+_)?(ff|ffn|mlp|feed_?forward)_(scaling|factor|scale)|(ff|ffn|mlp)_(mult|multiplier)", "4"),
    (r"(\w+_)?scaling_factor", "1.0"),
    (r"(\w+_)?beta_fast", "32"),
    (r"(\w+_)?beta_slow", "1"),
    (r"multiple_of", "4"),
    (r"(\w+_)?(bos|sos|start|eos|end|cls|sep|unk|mask)_?(idx|index|id|token|token_id|token_idx)", "0"),
    (r"(\w+_)?(smoothing|decay|coef|coefficient|fraction|(path|depth|layer)_?(rate|prob|drop))", "0.0"),
    (r"(is_)?causal", "True"),
    (
        r"(use|is|has|with|enable|do|tie|share|apply|add)_\w+|tied|mask(ing|ed)|\w+_enabled|norm_topk\w*|\w+_norm_topk\w*",
        "False",
    ),
    (r"(n|num)_?(routed_)?experts", "4"),
    (r"top_?k|(n|num)_(active|activated|selected)_?\w*|(n|num)_experts_per_tok(en)?|experts_per_tok(en)?", "2"),
    (r"(layer|block)_(id|idx|index|number)|layer", "0"),
)
"""What is no size and has no default: the first pattern that fits says what it becomes."""


def size_of_name(name: str) -> str | None:
    """Return the size of a `DrawnConfig` that a name means, or "d_head", or None.

    >>> size_of_name("n_embd"), size_of_name("nhead"), size_of_name("block_size"), size_of_name("theta")
    ('d_model', 'num_heads', 'max_len', None)
    """
    plain = re.sub(r"_+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)).lower().strip("_")
    for known in (plain, _SIDE.sub("", plain), _OTHER_SIDE.sub("", plain), _NUMBER.sub(r"n_\1", plain)):
        if size := next((size for size, pattern in _SIZES.items() if re.fullmatch(pattern, known)), None):
            return size
    return None


def meanings(names: Iterable[str]) -> dict[str, str]:
    """Return the size that each of the names of one constructor means; those of none are left out.

    >>> meanings(["embed_dim", "hidden_dim"]), meanings(["hidden_dim"])
    ({'embed_dim': 'd_model', 'hidden_dim': 'd_ff'}, {'hidden_dim': 'd_model'})
    """
    names = list(names)
    found = {name: size for name in names if (size := size_of_name(name)) is not None}
    if any(_HEIGHT.fullmatch(name.lower()) for name in names):
        found = {name: size for name, size in found.items() if name.lower() not in ("width", "w", "height", "h")}
    if any(_ENTERS.fullmatch(name.lower()) for name in names):  # what enters has a width, and so has what leaves
        found |= {name: "d_model" for name in found if _LEAVES.fullmatch(name.lower())}
    if "d_model" not in found.values():
        found |= dict.fromkeys([name for name in names if _BARE.fullmatch(name.lower())][:1], "d_model")
    weak = [name for name, size in found.items() if size == "d_model" and _WEAK.fullmatch(name.lower())]
    strong = any(size == "d_model" and name not in weak for name, size in found.items())
    has_inner = "d_ff" in found.values()
    return {name: "d_ff" if name in weak and strong and not has_inner else size for name, size in found.items()}


def is_padding_id(name: str) -> bool:
    """Whether a name is that of the token that pads."""
    return _PADS.fullmatch(name.lower()) is not None


def expression_for(name: str, size: str | None, default: Any, *, pads: bool, is_required: bool) -> str | None:
    """Return the source of what an argument becomes, with the drawn sizes as `c`; None: it keeps its default.

    Args:
        name: of the argument.
        size: that it means, see `meanings`.
        default: that it has.
        pads: whether the constructor takes the id of a token that pads: the vocabulary has a row more then, for it.
        is_required: whether it has no default.
    """
    if is_padding_id(name):
        return "c.vocab_size" if is_required or isinstance(default, int) else None
    if size is not None and (is_required or default is None or _is_number(default)):
        return "c.vocab_size + 1" if size == "vocab_size" and pads else f"c.{size}"
    if _STARTS.fullmatch(name.lower()):
        return "1024"  # more samples than any property gives at once
    if _TURNED.fullmatch(name.lower()) and type(default) is int:
        return "max(2, c.d_head // 4 * 2)"  # a part of the channels of a head, in pairs
    if name.lower() == "device" and not is_required and default is not None:
        return "'cpu'"
    is_picture = re.fullmatch(r"(\w+_)?(im|img|image|patch)_?(size|h|w|height|width)?", name.lower()) is not None
    if not is_required and not (is_picture and isinstance(default, int) and not isinstance(default, bool)):
        return None
    return next((value for pattern, value in _OTHERS if re.fullmatch(pattern, name.lower())), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
