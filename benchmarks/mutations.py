"""What is said of mechanical changes of right models: mutation testing, with mistakes that nobody chose.

python benchmarks/mutations.py SET ... [--seed 1] [--each 2] [--store FILE] > mutations.md

The right models of strangers (`tests/strangers/SET`) are changed in one place each, by the operators of `mutating.py`,
chosen by the seed. A change counts where the model still runs everywhere it ran, and does something else: outputs,
gradients, masked or longer calls, a cache, training or its initial weights differ. It is told where a check of it fails
or asks something that a check of the right model does not. What a reader found in those that are not told stands in
`reports/gallery/mutations/read.tsv`: "design" where no declaration of that model speaks of it, "missed" elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mutating import Mutant, mutants

ROOT = Path(__file__).parent.parent
SETS, READ = ROOT / "tests" / "strangers", ROOT / "reports" / "gallery" / "mutations" / "read.tsv"
SILENT = ("PASS", "NOT_APPLICABLE", "BLOCKED")
_MOST = 60  # changes of one file that are tried
_SECONDS = 60
Seen = list[tuple[str, list[Any]]]
Row = dict[str, Any]


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def loaded(text: str, name: str, folder: Path) -> Any:
    """Return the right subject of a file, None if it has none."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return next((found for which in ("declared", "right", "subject") if (found := getattr(module, which, None))), None)


def flat(value: Any) -> list[Any]:
    """Return the tensors and numbers of a value."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, list | tuple):
        return [one for part in value for one in flat(part)]
    if isinstance(value, dict):
        return [one for key in sorted(value, key=str) for one in flat(value[key])]
    return [value] if isinstance(value, int | float | str) else []


def behaviour(subject: Any) -> Seen:
    """Return what a subject does at two sizes, under names; what it raises in a call beside the first is told, too."""
    import torch

    from veriformer.properties.bench.pool import ModelPool, callable_subject

    pool = ModelPool(subject, torch.device("cpu"), _SECONDS)
    subject = callable_subject(subject, pool)
    return [one for config in pool.configs[:2] for one in _of_sizes(subject, config)]


def _of_sizes(subject: Any, config: Any) -> Iterator[tuple[str, list[Any]]]:
    import torch
    from torch import nn

    from veriformer.properties.subject.inputs import ordinary

    torch.manual_seed(0)
    model = subject.build(config) if subject.build is not None else subject.module
    is_module = isinstance(model, nn.Module)
    if is_module:
        yield "initial weights", flat(dict(model.state_dict()))
        own = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.double().parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=own, dtype=torch.float64) + 0.5 * (p.ndim == 1))
        model.eval()
    drawn = ordinary(subject, config, torch.Generator().manual_seed(3), torch.float64)

    def call(*inputs: Any, **words: Any) -> Any:
        given = inputs or (*drawn.tensors, *drawn.extras)
        return subject.forward(model, *given, **words) if subject.forward is not None else model(*given, **words)

    output = call()
    yield "outputs", flat(output)
    graph = [t for t in _tensors(output) if t.requires_grad]
    if is_module and graph:
        torch.stack([t.double().square().sum() for t in graph]).sum().backward()
        yield "gradients", [p.grad.clone() if p.grad is not None else torch.zeros(1) for p in model.parameters()]
        model.zero_grad()
    for name, run in _beside(subject, config, model, drawn.tensors, call):
        try:
            yield name, flat(run())
        except Exception as problem:
            yield name, [type(problem).__name__]


def _tensors(value: Any) -> list[Any]:
    return [t for t in flat(value) if hasattr(t, "requires_grad")] if not hasattr(value, "requires_grad") else [value]


def _beside(subject: Any, config: Any, model: Any, tensors: list[Any], call: Any) -> Iterator[tuple[str, Any]]:
    import torch

    first = tensors[0]
    for name in ("attention_mask", "source_mask"):
        if subject.accepts(name) and first.ndim in (2, 3) and subject.kind != "attention":
            for cut in (slice(None, 2), slice(-2, None)):
                mask = torch.ones(first.shape[:2], dtype=torch.bool)
                mask[0, cut] = False
                yield "a mask", lambda name=name, mask=mask: call(**{name: mask})
    if subject.accepts("causal"):
        yield "a causal call", lambda: call(causal=True)
    if hasattr(model, "train"):
        yield "training", lambda: (torch.manual_seed(5), model.train(), call(), model.eval())[2]
    if subject.kind == "decoder" and subject.takes_tokens and subject.cache is not None:
        yield "a cache", lambda: subject.cache(model, [first[:, :2], first[:, 2:3], first[:, 3:]])
    if subject.kind == "decoder" and subject.takes_tokens and subject.generate is not None:
        for use in (False, True):
            yield "generation", lambda use=use: subject.generate(model, first, 3, use)
    if subject.kind in ("decoder", "encoder", "classifier") and subject.takes_tokens:
        own = torch.Generator().manual_seed(1)
        longer = torch.randint(0, config.vocab_size, (1, min(40, config.max_len)), generator=own)
        yield "a longer sequence", lambda: call(longer)


def differences(one: Seen, other: Seen) -> list[str]:
    """Return the names of what two subjects do differently; "raises" where the second alone does."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return ["raises"]
    found = []
    for (name, left), (_, right) in zip(one, other, strict=True):
        if any(isinstance(y, str) for y in right) and not any(isinstance(x, str) for x in left):
            return ["raises"]
        if (len(left) != len(right) or not all(map(_alike, left, right))) and name not in found:
            found.append(name)
    return found


def _alike(x: Any, y: Any) -> bool:
    import torch

    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and bool(x == y)
    if x.shape != y.shape or not x.is_floating_point() or not x.numel():
        return torch.equal(x, y)
    both = x.isfinite() & y.isfinite()
    if bool((x.isfinite() != y.isfinite()).any()) or not bool(both.any()):
        return bool((x.isfinite() == y.isfinite()).all())
    return float((x - y).double()[both].abs().max()) <= 1e-7 * (1e-3 + float(x.double()[both].abs().max()))


def _told(subject: Any) -> dict[str, list[str]]:
    from veriformer.properties import check

    rows = check(subject, profile="quick", seed=0).results
    causes = {r.id: r.counterexample.cause if r.counterexample else "" for r in rows}
    return {r.id: [r.outcome, r.reason[:400], causes[r.id][:400]] for r in rows if r.outcome not in SILENT}


def judged(file: str, seed: int, each: int) -> list[Row]:
    """Judge so many changes of one file."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = Path(file)
    text, key, rows = path.read_text(encoding="utf-8"), f"{path.parent.name}/{path.stem}", list[Row]()
    with tempfile.TemporaryDirectory() as place:
        folder, name = Path(place), f"mutated_{path.parent.name}_{path.stem}"
        try:
            with _limited(2 * _SECONDS):
                right = loaded(text, name, folder)
                before = behaviour(right)
                if differences(before, behaviour(right)):
                    return [{"file": key, "lost": "it does not repeat itself"}]
        except Exception as problem:
            return [{"file": key, "lost": f"{type(problem).__name__}: {problem}"[:200]}]
        usual = _told(right)
        for one in _in_turns(list(mutants(text)), random.Random(f"{seed} {key}")):
            if len(rows) == each:
                break
            if any(row["line"] == one.line for row in rows):
                continue
            sign = hashlib.sha1(one.text.encode(), usedforsecurity=False).hexdigest()[:8]
            try:
                with _limited(_SECONDS):
                    subject = loaded(one.text, f"{name}_{sign}", folder)
                    differs = differences(before, behaviour(subject))
            except Exception:
                continue
            if not differs or differs == ["raises"]:
                continue
            told = {i: t for i, t in _told(subject).items() if i not in usual or t[0] != usual[i][0]}
            rows.append({
                "file": key, "id": sign, "seed": seed, "line": one.line, "operator": one.operator, "old": one.old,
                "new": one.new, "differs": differs, "told": told,
            })  # fmt: skip
    return rows or [{"file": key, "lost": "no change of it runs"}]


def _in_turns(every: list[Mutant], chance: random.Random) -> list[Mutant]:
    """Return changes by chance, one of each operator first: most would else exchange two variables."""
    chance.shuffle(every)
    first = {m.operator: m for m in reversed(every)}
    once = [m for m in every if first[m.operator] is m]
    return [*once, *(m for m in every if first[m.operator] is not m)][:_MOST]


def _files(sets: list[str]) -> list[Path]:
    found = [p for name in sets for p in sorted((SETS / name).glob("*.py"))]
    return [p for p in found if p.name != "prove.py" and not p.stem.endswith("_wrong")]


def page(rows: list[Row], read: dict[str, tuple[str, str]]) -> str:
    """Return the table of what was told, by seed, and the changes that were not."""
    changes = [r for r in rows if "told" in r]
    lines = ["| seed | changes | told | of these failing | not told: by design | missed | not read |", "|" + "---|" * 7]
    for seed in sorted({r["seed"] for r in changes}):
        own = [r for r in changes if r["seed"] == seed]
        told = [r for r in own if r["told"]]
        failing = sum(any(t[0] != "OPEN" for t in r["told"].values()) for r in told)
        kinds = Counter(read.get(r["id"], ("", ""))[0] for r in own if not r["told"])
        lines.append(
            f"| {seed} | {len(own)} | {len(told)} | {failing} | {kinds['design']} | {kinds['missed']} | {kinds['']} |"
        )
    lines += ["", "| not told | change | a reader |", "|---|---|---|"]
    for r in (r for r in changes if not r["told"]):
        kind, words = read.get(r["id"], ("", ""))
        cells = (f"{r['file']}, line {r['line']}", f"`{r['old'][:60]}` -> `{r['new'][:60]}`", f"{kind}: {words}")
        lines.append("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in cells) + " |")
    lost = [r for r in rows if r.get("lost")]
    lines += ["", f"{len(lost)} files gave none: " + "; ".join(sorted(f"{r['file']} ({r['lost'][:60]})" for r in lost))]
    return "\n".join(lines)


def main() -> None:
    """Judge, and print the table."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("sets", nargs="+", help="folders of tests/strangers")
    ask.add_argument("--seed", type=int, default=1, help="which changes are chosen")
    ask.add_argument("--each", type=int, default=2, help="changes of a file")
    ask.add_argument("--jobs", type=int, default=2, help="processes")
    ask.add_argument("--store", type=Path, help="what was judged is kept here; a second call goes on from there")
    given = ask.parse_args()
    rows: list[Row] = []
    if given.store and given.store.exists():
        rows = [json.loads(line) for line in given.store.read_text(encoding="utf-8").splitlines()]
    done = {r["file"] for r in rows if r.get("seed", given.seed) == given.seed}
    files = [p for p in _files(given.sets) if f"{p.parent.name}/{p.stem}" not in done]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        asked = [pool.submit(judged, str(p), given.seed, given.each) for p in files]
        for number, answer in enumerate(as_completed(asked), 1):
            own = [{"commit": commit.stdout.strip(), "seed": given.seed, **row} for row in answer.result()]
            rows += own
            print(f"{number} of {len(files)}: {own[0]['file']}", file=sys.stderr)
            if given.store:
                with given.store.open("a", encoding="utf-8") as out:
                    out.writelines(json.dumps(row) + "\n" for row in own)
    known = [line.split("\t") for line in READ.read_text(encoding="utf-8").splitlines()] if READ.exists() else []
    print(page(rows, {sign: (kind, words) for sign, kind, words in known}))


if __name__ == "__main__":
    main()
