"""Shows, in plain torch, that each wrong file is wrong and each right one right."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
torch.set_num_threads(1)


def load(number, which):
    (path,) = HERE.glob(f"{number:02d}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(m, seed=0, **sizes):
    torch.manual_seed(seed)
    return m.subject.build(DrawnConfig(**sizes)) if m.subject.build else None


def loud(model):
    """Larger weights than at the start, so that differences show."""
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model.eval()


def close(a, b):
    return bool(torch.allclose(a, b, atol=1e-9, rtol=1e-7))


def tokens(*shape, high=11, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def p01(m):
    logits = torch.randn(3, 5, 7, dtype=torch.double, requires_grad=True)
    labels = tokens(3, 5, high=7)
    labels[0, 3:], labels[1, 0] = -100, -100
    got = m.subject.forward(build(m), logits, labels)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    a, b = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, want))
    return close(got, want) and close(a, b)


def p02(m):
    pairs = []
    for i, (b, t) in enumerate([(2, 5), (3, 7), (1, 4)]):
        labels = tokens(b, t, high=7, seed=i)
        labels[0, t - i :] = -100
        pairs.append((torch.randn(b, t, 7, dtype=torch.double), labels))
    want = F.cross_entropy(
        torch.cat([x[:, :-1].flatten(0, 1) for x, _ in pairs]), torch.cat([y[:, 1:].flatten() for _, y in pairs])
    )
    return close(torch.as_tensor(m.subject.accumulate(build(m), pairs)), want)


def p03(m):
    d = m.subject.declares
    w, n, peak, floor = d["warmup_steps"], d["total_steps"], d["peak"], d["floor"]

    def formula(s):
        if s < w:
            return peak * s / w
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (s - w) / (n - w))))

    schedule = build(m)
    return all(abs(m.subject.forward(schedule, s) - formula(s)) < 1e-12 for s in range(n + 50))


def p04(m):
    model = build(m)
    groups = m.subject.forward(model)
    ids = [id(p) for g in groups for p in g["params"]]
    once = sorted(ids) == sorted(id(p) for p in model.parameters())
    rule = all((p.dim() >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])
    return once and rule


def p05(m):
    model = loud(build(m, num_layers=1, dropout=0.5))
    layer = model.layers[0].train()
    x = torch.randn(4, 16, 8, dtype=torch.double)  # time, batch, channels
    got = layer(x)
    possible = []
    for a, b in itertools.product((0.0, 2.0), repeat=2):
        y = x + a * layer.attend(x, None)
        possible.append(y + b * layer.feed(y))
    kinds = [[i for i, p in enumerate(possible) if close(got[:, s], p[:, s])] for s in range(16)]
    return all(kinds) and len({k[0] for k in kinds}) > 1


def p06(m):
    model = loud(build(m, dropout=0.3)).train()
    x = tokens(2, 6)
    found = []
    for checkpointing in (True, False):
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(5)
        loss = model(x).square().sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    assert close(found[0][0], found[1][0])
    return all(close(a, b) for a, b in zip(*found))


def p07(m):
    model = loud(build(m))
    x = torch.randn(3, 4, 8, dtype=torch.double, requires_grad=True)
    want = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.eps) * model.weight
    got = model(x)
    up = torch.randn_like(x)
    assert close(got, want)
    a, b = (torch.autograd.grad(y, (x, model.weight), up, retain_graph=True) for y in (got, want))
    return all(map(close, a, b))


def p08(m):
    model = loud(build(m))
    x = torch.randn(3, 5, 8, dtype=torch.double)
    weights = m.subject.router(model, x)
    probs = model.gate(x).softmax(-1)
    keep = probs >= probs.topk(2, -1).values[..., -1:]
    assert close(weights, probs * keep / (probs * keep).sum(-1, keepdim=True))
    want = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(model.experts))
    return close(m.subject.forward(model, x), want)


def p09(m):
    q = torch.randn(2, 4, 5, 6, dtype=torch.double, requires_grad=True)
    k = torch.randn(2, 2, 5, 6, dtype=torch.double, requires_grad=True)
    v = torch.randn(2, 2, 5, 3, dtype=torch.double, requires_grad=True)
    got = m.subject.forward(None, q, k, v, causal=True)
    want = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    assert close(got, want)
    up = torch.randn_like(got)
    a, b = (torch.autograd.grad(y, (q, k, v), up) for y in (got, want))
    return all(map(close, a, b))


def p10(m):
    model, texts = build(m), ["the cat", "the sea shells", "the cat", "the", "the sea shells", "the  lowest, über\n"]
    fresh = [m.subject.forward(build(m), text) for text in texts]
    again = [m.subject.forward(model, text) for text in texts]
    return fresh == again and [m.subject.decode(model, ids) for ids in again] == texts


def p11(m):
    model = build(m)
    for word in ("▁then", "▁with", "▁selling", "▁shell", "▁nation", "▁lowest", "▁othersq"):
        inner = range(1, len(word))

        def score(pieces):
            return sum(model.logp.get(p, model.penalty if len(p) == 1 else -math.inf) for p in pieces)

        def cut(at):
            at = (0, *at, len(word))
            return [word[i:j] for i, j in zip(at, at[1:])]

        best = max((cut(at) for n in range(len(word)) for at in itertools.combinations(inner, n)), key=score)
        if abs(score(best) - score(model.segment(word))) > 1e-9:
            return False
    return True


def p12(m):
    model = loud(build(m))
    x = tokens(6, 4)
    torch.manual_seed(3)
    out, probs = m.subject.sampling(model, x, 3, temperature=0.8, top_k=3)
    for i in range(3):
        want = torch.zeros_like(probs[:, i])
        top = (model(out[:, : 4 + i])[:, -1] / 0.8).topk(3)
        want.scatter_(1, top.indices, top.values.softmax(-1))
        if not close(probs[:, i], want):
            return False
    return True


def p13(m):
    model = loud(build(m))
    first, rest = tokens(3, 5), [tokens(3, 1, seed=2), tokens(3, 2, seed=3)]
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, :3], mask[1, :1] = False, False
    order = torch.tensor([2, 0, 0])
    got = m.subject.cache(model, [first, *rest], mask, order)[:, 5:]
    for b in range(3):
        real = torch.cat([first[order[b]][mask[order[b], :5]], *(r[b] for r in rest)])
        if not close(got[b], model(real[None])[0, -3:]):
            return False
    x = tokens(2, 6)
    assert close(m.subject.cache(model, x.split([3, 1, 2], 1)), model(x))
    return True


def p14(m):
    model = loud(build(m))
    x = tokens(2, 11)
    want = model(x)
    far = x.clone()  # a layer sees 4 tokens, two layers 7
    far[:, 0] = (far[:, 0] + 1) % 11
    moved = (model(far) - want).abs().amax((0, 2)) > 1e-12
    assert moved[:7].all() and not moved[7:].any()
    assert close(m.subject.cache(model, x.split(1, 1)), want)
    return all(close(m.subject.cache(model, x.split(s, 1)), want) for s in ([3, 5, 3], [2, 2, 4, 3], [11]))


def p15(m):
    model = loud(build(m, num_layers=3))
    source, target = tokens(2, 5), tokens(2, 6, seed=2)
    want = m.subject.forward(model, source, target)
    padded = F.pad(source, (0, 2), value=4)
    mask = F.pad(torch.ones(2, 5, dtype=torch.bool), (0, 2), value=False)
    assert close(m.subject.forward(model, padded, target, mask), want)
    return all(close(m.subject.cache(model, source, target.split(s, 1)), want) for s in ([1] * 6, [3, 1, 2], [6]))


def p16(m):
    model = loud(build(m))
    images = torch.randn(2, 3, 8, 12, dtype=torch.double)
    base = m.subject.patches(model, images)
    for i, j in itertools.product(range(2), range(3)):
        other = images.clone()
        other[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4] += 1.0
        moved = (m.subject.patches(model, other) - base).abs().amax((0, 2)) > 1e-12
        if moved.nonzero().flatten().tolist() != [3 * i + j]:
            return False
    return True


def p17(m):
    model = build(m, vocab_size=1000)
    x = tokens(200, 500, high=1000)
    out, labels = m.subject.forward(model, x, 0)
    chosen = labels != -100
    assert torch.equal(labels[chosen], x[chosen]) and torch.equal(out[~chosen], x[~chosen])
    assert not chosen[x < 3].any() and abs(chosen[x >= 3].double().mean() - 0.15) < 0.005
    again = m.subject.forward(model, x, 0)
    assert torch.equal(again[0], out)
    hidden = (out[chosen] == 3).double().mean()
    kept = (out[chosen] == x[chosen]).double().mean()
    return bool(abs(hidden - 0.8) < 0.02 and abs(kept - 0.1) < 0.02)


def p18(m):
    model = loud(build(m))
    x = tokens(4, 6)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[0, 4:], mask[1, 2:], mask[3, :1] = False, False, False
    got = m.subject.forward(model, x, mask)
    alone = all(close(got[b][mask[b]], model(x[b][mask[b]][None])[0]) for b in range(4))
    assert close(model(x), torch.cat([model(row[None]) for row in x]))
    return alone


def p19(m):
    model = loud(build(m))
    x = torch.randn(2, 4, 8, dtype=torch.double)
    want = m.subject.forward(model, x)
    noise = torch.randn(2, 3, 8, dtype=torch.double)
    yes, no = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    right = m.subject.forward(model, torch.cat([x, noise], 1), torch.cat([yes, no], 1))[:, :4]
    left = m.subject.forward(model, torch.cat([noise, x], 1), torch.cat([no, yes], 1))[:, 3:]
    return close(right, want) and close(left, want)


def p20(m):
    model = build(m, d_model=128, d_ff=512, num_layers=4, num_heads=4, vocab_size=500)
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, p in model.named_parameters():
        if p.dim() == 2:
            want = 0.02 / math.sqrt(8) if name.endswith("c_proj.weight") else 0.02
            if abs(p.std().item() / want - 1) > 0.06:
                return False
        elif name.endswith("bias") and p.abs().max() > 0:
            return False
    return True


if __name__ == "__main__":
    for i in range(1, 21):
        prove = globals()[f"p{i:02d}"]
        torch.manual_seed(0)
        right = prove(load(i, "right"))
        torch.manual_seed(0)
        wrong = prove(load(i, "wrong"))
        print(f"{i:02d}", "ok" if right and not wrong else f"NOT OK right={right} wrong={wrong}", flush=True)
