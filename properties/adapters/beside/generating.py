"""How a model generates: which of its methods, or of the functions beside it, goes on from a prompt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.beside.offers import Offer, tried
from veriformer.properties.adapters.constructing.size_names import size_of_name

_NAMES = r"(greedy_)?(generate|sample|complete|greedy|infer|inference)(_\w+)?|greedy_(search|decode|decoding)"
_MODELS = r"model|net|network|m|gpt|lm|transformer|decoder|self"
_TOKENS = r"\w*(idx|ids?|tokens?|prompts?|x|input|inputs|context|seq|sequence|start|starts?)\w*"
_NEW = (
    r"(max_|num_|n_)?(new_?)?(tokens?|steps?|gen_len|generate_len|length|len|seq_len|iters?|n)(_to_generate)?|n|max_new"
)
_TOTAL = r"(max|total)_?(seq_|target_)?(len|length)|max_seq_len"
_GREEDY: tuple[tuple[str, str], ...] = (
    (r"do_sample|sample|sampling|stochastic|use_sampling|random", "False"),
    (r"greedy|is_greedy|deterministic|argmax", "True"),
    (r"strategy|method|mode|decoding", "'greedy'"),
    (r"temperature|temp|t", "0.0"),
    (r"top_?k|topk|k", "1"),
)
_STOPS = r"(eos|end|stop)(_?(id|token|token_id|idx|index|ids|tokens|symbol))*"
_CACHES = r"(use_)?(kv_)?cach(e|ed|ing)"
_FORMS = (
    ("{call}", "tokens"),
    ("torch.cat([{call} for row in tokens])", "row[None]"),
    ("torch.stack([torch.as_tensor({call}) for row in tokens])", "row"),
    ("torch.stack([torch.as_tensor({call}) for row in tokens])", "row.tolist()"),
)
_ARGMAX = """def likeliest(probabilities, num_samples, replacement=False, *, generator=None, out=None):
    return probabilities.topk(num_samples, dim=-1).indices  # instead of what would be drawn


"""
_T, _STEPS = 4, 3


def generate_beside(sample: nn.Module, module: ModuleType | None, size: int, *, turned: bool) -> list[Offer]:
    """Return a model's generation as `generate(model, tokens, steps, use_cache)`, and what it draws from as `sampling`.

    Args:
        sample: in eval mode.
        module: the user's.
        size: of the vocabulary.
        turned: whether the model takes `[T, B]`.
    """
    refused = ""
    names = {} if module is None else {"user": module}
    for called, function, skip in candidates(sample, module, _NAMES):
        ways = _ways(function, skip)
        if isinstance(ways, str):
            refused = refused or f"its {called} is not judged: nothing is known of its argument {ways!r}"
            continue
        found, why = _working(sample, called, ways, names, size, turned=turned)
        if found is not None:
            drawn = _draws(sample, called, function, names, size) if not turned else None
            return [found, drawn] if drawn is not None else [found]
        refused = refused or f"its {called} is not judged: {why}"
    return [Offer("generate", "", (refused,))] if refused else []


def candidates(sample: nn.Module, module: ModuleType | None, names: str) -> Iterator[tuple[str, Any, int]]:
    """Yield what generates by its name: the expression, the function, how many arguments come before the tokens.

    Args:
        sample: whose methods are looked at.
        module: that holds it, whose functions of a model are looked at too.
        names: pattern of what they are called.
    """
    for cls in type(sample).__mro__[: type(sample).__mro__.index(nn.Module)]:
        for name, function in vars(cls).items():
            if inspect.isfunction(function) and re.fullmatch(names, name):
                yield f"model.{name}", function, 1
    for name, function in vars(module).items() if module is not None else ():
        function = inspect.unwrap(function) if inspect.isfunction(function) else None
        if function is None or function.__module__ != getattr(module, "__name__", "") or not re.fullmatch(names, name):
            continue
        first = next(iter(inspect.signature(function).parameters), "")
        if re.fullmatch(_MODELS, first.lower()):
            yield f"user.{name}", function, 1


def _ways(function: Any, skip: int) -> tuple[str, list[dict[str, str]], bool] | str:
    """Return the name of the tokens, the arguments to try in turn, and whether a length counts the prompt as well.

    Or the name of an argument that nothing is known for.
    """
    parameters = [p for p in inspect.signature(function).parameters.values()
                  if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][skip:]  # fmt: skip
    if not parameters:
        return "of tokens"
    tokens, *others = parameters
    if not re.fullmatch(_TOKENS, tokens.name.lower()):
        return tokens.name
    given: dict[str, str] = {}
    greedy: list[dict[str, str]] = []
    is_total = False
    for p in others:
        name, is_required = p.name.lower(), p.default is p.empty
        hit = next((value for pattern, value in _GREEDY if re.fullmatch(pattern, name)), None)
        if not {"steps", "total"} & set(given) and re.fullmatch(_TOTAL, name):
            given["total"], is_total = p.name, True
        elif "steps" not in given and re.fullmatch(_NEW, name) and (is_required or isinstance(p.default, int)):
            given.pop("total", None)
            given["steps"], is_total = p.name, False
        elif re.fullmatch(_STOPS, name):
            given[p.name] = "None" if p.default is None else "-1"
        elif re.fullmatch(_CACHES, name):
            given[p.name] = "use_cache"
        elif hit is not None:
            greedy.append({p.name: hit})
            if is_required:
                given[p.name] = {"0.0": "1.0", "1": "None"}.get(hit, hit)
        elif is_required and size_of_name(name) == "max_len":
            given[p.name] = "tokens.shape[1] + steps"
        elif (is_required and size_of_name(name) == "vocab_size") or is_required:
            return p.name
    counted = given.pop("steps", "") or given.pop("total", "")
    if not counted:
        return "how many tokens it is to give"
    given = {counted: "tokens.shape[1] + steps" if is_total else "steps", **given}
    # a word that says so first; by what it does without one, before numbers that some models divide by
    said, measured = ([{**given, **one} for one in greedy if is_one(one)] for is_one in (_is_word, _is_number))
    return tokens.name, [*said, given, *measured], is_total


def _is_word(given: Mapping[str, str]) -> bool:
    return not _is_number(given)


def _is_number(given: Mapping[str, str]) -> bool:
    return all(value in ("0.0", "1") for value in given.values())


def _plain(ways: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the way that gives the fewest arguments: nothing is said of how a token is chosen."""
    return [min(ways, key=len)]


def _working(
    sample: nn.Module, called: str, ways: tuple[str, list[dict[str, str]], bool], names: Mapping[str, Any], size: int,
    *, turned: bool,
) -> tuple[Offer | None, str]:  # fmt: skip
    """Return the first way that gives the same tokens whatever is drawn; or why none does."""
    tokens = torch.randint(1, max(size, 2), (2, _T), generator=torch.Generator().manual_seed(3))
    why = ""
    first = "model, " * called.startswith("user.")
    for is_drawn in (False, True):
        for given in ways[1] if not is_drawn else _plain(ways[1]):
            for form, fed in _FORMS if not turned else (("{call}.transpose(0, 1)", "tokens.transpose(0, 1)"),):
                words = ", ".join([first + fed, *(f"{n}={v}" for n, v in given.items())])
                source = _source(form.format(call=f"{called}({words})"), is_drawn=is_drawn)
                try:
                    found = [tried(source, "generate", names, sample, tokens, _STEPS, False, seed=s) for s in (1, 2, 3)]
                except Exception as problem:
                    why = (
                        why
                        or f"it raised {type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
                    )
                    continue
                if not all(isinstance(got, Tensor) and got.ndim == 2 and not got.is_floating_point() for got in found):
                    why = why or "it gave no tokens [B, T]"
                    continue
                if found[0].shape[1] == _STEPS and not torch.equal(found[0], tokens[:, :_STEPS]):
                    source = _source(
                        f"torch.cat([tokens, {form.format(call=f'{called}({words})')}], dim=1)", is_drawn=is_drawn
                    )
                    found = [torch.cat([tokens, got], dim=1) for got in found]
                if found[0].shape[0] != 2 or not torch.equal(found[0][:, :_T], tokens):
                    why = why or f"for tokens [2, {_T}] and {_STEPS} more it gave {list(found[0].shape)}"
                    continue
                if all(torch.equal(found[0], got) for got in found[1:]):
                    return Offer("generate", source, (_told(called, given, form, is_drawn=is_drawn),)), ""
                why = "what it gives differs from call to call, also where the likeliest token is taken for each draw"
    return None, why


_SAMPLING = """def sampling(model, tokens, steps{heads}):
    drawn = []

    def draw(probabilities, num_samples, replacement=False, *, generator=None, out=None):
        drawn.append(probabilities)
        best = probabilities.topk(2, dim=-1)  # in turn, so that the text varies and no generator is asked
        second = len(drawn) % 2 == 0 and bool((best.values[..., 1] > 0).all())
        return best.indices[..., 1:] if second else best.indices[..., :1]

    kept = torch.multinomial, torch.Tensor.multinomial
    torch.multinomial = torch.Tensor.multinomial = draw
    try:
        text = {call}
    finally:
        torch.multinomial, torch.Tensor.multinomial = kept
    return text, torch.stack(drawn, dim=1)
"""
_ROWS = """

def sampling(model, tokens, steps{heads}):
    rows = [of_one(model, row[None], steps{given}) for row in tokens]
    return torch.cat([text for text, _ in rows]), torch.cat([drawn for _, drawn in rows])
"""
_DRAWN = ((r"temperature|temp", "temperature", "1.0"), (r"top_?k", "top_k", "None"))
_PLAIN = ((r"do_sample|sample|sampling", "True"), (r"greedy|is_greedy|deterministic", "False"),
          (r"top_?p|nucleus\w*", None), (r"repetition_penalty", "1.0"))  # fmt: skip


def _draws(sample: nn.Module, called: str, function: Any, names: Mapping[str, Any], size: int) -> Offer | None:
    """Return what a generation draws from, step by step; None where it draws nothing."""
    ways = _ways(function, 1)
    if isinstance(ways, str):
        return None
    given, heads = dict(_plain(ways[1])[0]), ""
    for p in inspect.signature(function).parameters.values():
        for pattern, word, value in _DRAWN:
            if re.fullmatch(pattern, p.name.lower()) and word not in heads:
                given[p.name] = word
                heads += f", {word}={value}"
        for pattern, plain in _PLAIN:
            if re.fullmatch(pattern, p.name.lower()):
                given[p.name] = plain or ("None" if p.default is None else "1.0")
    given = {n: "False" if v == "use_cache" else v for n, v in given.items()}
    first = "model, " * called.startswith("user.")
    words = ", ".join([first + "tokens", *(f"{n}={v}" for n, v in given.items())])
    at_once = f"import torch\n\n\n{_SAMPLING.format(heads=heads, call=f'{called}({words})')}"
    tokens = torch.randint(1, max(size, 2), (2, _T), generator=torch.Generator().manual_seed(4))
    for rows in ("", _ROWS.format(heads=heads, given=re.sub(r"(\w+)=\w[\w.]*", r"\1=\1", heads))):
        source = (at_once.replace("def sampling(", "def of_one(") if rows else at_once) + rows
        try:
            text, drawn = tried(source, "sampling", names, sample, tokens, _STEPS)
            if "top_k" in heads:
                tried(source, "sampling", names, sample, tokens, _STEPS, top_k=2)
        except Exception:
            continue
        if isinstance(text, Tensor) and text.shape == (2, _T + _STEPS) and drawn.shape[:2] == (2, _STEPS):
            told = "what it draws each token from is judged" + "; given one sample at a time" * bool(rows)
            return Offer("sampling", source, (told,)) if drawn.ndim == 3 else None
    return None


def _source(expression: str, *, is_drawn: bool) -> str:
    lines = [f"return {expression}"]
    if is_drawn:
        lines = ["drawn = torch.multinomial, torch.Tensor.multinomial",
                 "torch.multinomial = torch.Tensor.multinomial = likeliest", "try:", f"    return {expression}",
                 "finally:", "    torch.multinomial, torch.Tensor.multinomial = drawn"]  # fmt: skip
    body = "".join(f"    {line}\n" for line in lines)
    text = _ARGMAX * is_drawn + f"def generate(model, tokens, steps, use_cache):\n{body}"
    return f"import torch\n\n\n{text}" if "torch." in text else text


def _told(called: str, given: Mapping[str, str], form: str, *, is_drawn: bool) -> str:
    words = ", ".join(f"{n}={v}" for n, v in given.items())
    how = "the likeliest token is taken wherever one is drawn" if is_drawn else "the same tokens come out at every call"
    return f"its {called.removeprefix('model.').removeprefix('user.')}({words}) is judged: {how}" + (
        "; given one sample at a time" if "row" in form else ""
    )
