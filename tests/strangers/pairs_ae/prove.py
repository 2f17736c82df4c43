"""Shows in plain torch that each wrong file is wrong and each right one right. `python prove.py`"""

import importlib.util
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig  # only to build; nothing of it judges

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(path):
    spec = importlib.util.spec_from_file_location("m" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(m, c=C, seed=0, bold=True):
    torch.manual_seed(seed)
    model = m.subject.build(c).double().eval()
    if bold:
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def tokens(b, t, seed=1, v=11):
    return torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(seed))


def same(a, b, tol=1e-9):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and float((a - b).detach().abs().max()) < tol


def cache_equals_forward(m, cuts=(2, 3, 1, 3), tol=1e-9):
    model, x = make(m), tokens(2, sum(cuts))
    return same(m.subject.cache(model, list(x.split(cuts, 1))), m.subject.forward(model, x), tol)


def p01(m):
    one = DrawnConfig(d_model=8, num_heads=2, num_layers=1, d_ff=20, vocab_size=11, max_len=32)
    model, x = make(m, one), tokens(1, 9)
    e = model.embed(x).detach().requires_grad_()
    hook = model.embed.register_forward_hook(lambda *_: e)
    seen = torch.stack([torch.autograd.grad(model(x)[0, t].pow(2).sum(), e)[0][0].abs().sum(-1) > 0 for t in range(9)])
    hook.remove()
    window = torch.equal(seen, torch.ones(9, 9).tril().triu(1 - m.WINDOW).bool())
    model, x = make(m), tokens(2, 9)
    return window and same(m.subject.cache(model, list(x.split(1, 1))), model(x)) and cache_equals_forward(m)


def p02(m):
    good, order = cache_equals_forward(m), torch.tensor([1, 1, 2])
    for seed in range(6):
        model, x = make(m), tokens(3, 6, seed)
        got = m.subject.cache(model, [x[:, :3], x[:, 3:4], x[:, 4:]], reorder=order)
        want = model(torch.cat((x[order, :3], x[:, 3:]), 1))[:, 3:]
        good &= same(got[:, :3], model(x[:, :3])) and same(got[:, 3:], want)
    return good


def p03(m):
    model, x = make(m), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    got = m.subject.cache(model, [x[:, :4], x[:, 4:5], x[:, 5:]], attention_mask=mask)
    alone = m.subject.forward(model, x[:1, 2:])
    return same(got[:1, 2:], alone) and same(got[1:], m.subject.forward(model, x[1:])) and cache_equals_forward(m)


def p04(m):
    return cache_equals_forward(m, (4, 1, 2))


def p05(m):
    model, x = make(m), tokens(2, 6)
    padded = torch.cat((tokens(2, 3, 5), x), 1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, :3] = False
    return same(model(x), model(x, first=7), 1e-8) and same(model(x), model(padded, mask)[:, 3:], 1e-8)


def p06(m):
    good = True
    for seed in range(30):
        model, x = make(m, seed=seed), tokens(1 + seed % 2, 3, seed)
        want = x
        for _ in range(8):
            want = torch.cat((want, model(want)[:, -1:].argmax(-1)), 1)
        good &= torch.equal(m.subject.generate(model, x, 8, True), want)
    return good


def p07(m):
    model, x = make(m), tokens(4, 3)
    out, probs = m.subject.sampling(model, x, 4, temperature=0.7, top_k=3)
    good = True
    for t in range(4):
        logits = model(out[:, : 3 + t])[:, -1] / 0.7
        best = logits.topk(3).indices
        want = torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(-1))
        good &= same(probs[:, t], want)
    return good


def p08(m):
    model, x = make(m), tokens(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    out = model(x, mask)
    return all(same(out[b : b + 1, :n], model(x[b : b + 1, :n])) for b, n in enumerate((3, 5, 2)))


def p09(m):
    c = DrawnConfig(**{**C.__dict__, "dropout": 0.4}) if hasattr(C, "__dict__") else C
    model, x = make(m, c).train(), tokens(2, 5)
    e = model.wte(x).detach().requires_grad_()
    torch.manual_seed(3)
    grad = torch.autograd.grad(model.from_embeddings(e).pow(2).sum(), e)[0]
    d, h = torch.randn(e.shape, dtype=e.dtype, generator=torch.Generator().manual_seed(9)), 1e-6

    def at(z):
        torch.manual_seed(3)
        return model.from_embeddings(z).pow(2).sum()

    with torch.no_grad():
        quotient = (at(e + h * d) - at(e - h * d)) / (2 * h)
    return bool(((grad * d).sum() - quotient).abs() < 1e-5 * quotient.abs().clamp(min=1))


def p10(m):
    c = DrawnConfig(d_model=8, num_heads=2, num_layers=1, d_ff=20, vocab_size=11, max_len=32, dropout=0.5)
    model, x = make(m, c), tokens(64, 4)
    block = model.blocks[0].train()
    z = torch.randn(1, 4, 8, dtype=torch.float64).repeat(400, 1, 1)
    a = block.attn(block.norm1(z[:1]), None)  # every sample: z + {0, 2} a, then + {0, 2} mlp of that
    possible = []
    for i in (0, 2):
        mid = z[:1] + i * a
        possible += [mid + j * block.mlp(block.norm2(mid)) for j in (0, 2)]
    out = block(z)
    distance = torch.stack([(out - p).abs().amax((1, 2)) for p in possible]).amin(0)
    return bool(distance.max() < 1e-9) and torch.isfinite(model(x)).all().item()


def p11(m):
    model, x = make(m), tokens(2, 7)
    one = same(m.subject.cache(model, [x[:, :4], x[:, 4:5], x[:, 5:6], x[:, 6:]]), model(x))
    return one and cache_equals_forward(m)


def p12(m):
    model, x = make(m, bold=False), tokens(2, 5)
    model(x).sum().backward()
    names = [n for n, _ in model.named_parameters()]
    before = [model.decode.weight is model.embed.weight, "decode.weight" not in names]
    model.embed.weight = torch.nn.Parameter(model.embed.weight.detach().clone()) if not before[0] else model.embed.weight
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    return all(before) and torch.equal(model.decode.weight, model.embed.weight)


def p13(m):
    c = DrawnConfig(d_model=64, num_heads=2, num_layers=8, d_ff=256, vocab_size=50, max_len=32)
    model = make(m, c, bold=False)
    std = torch.cat([p.flatten() for n, p in model.named_parameters() if n.endswith("c_proj.weight")]).std().item()
    rest = torch.cat([p.flatten() for n, p in model.named_parameters() if n.endswith("c_fc.weight")]).std().item()
    return abs(std / (0.02 / math.sqrt(16)) - 1) < 0.02 and abs(rest / 0.02 - 1) < 0.02


def p14(m):
    collator, x = m.subject.build(DrawnConfig(vocab_size=200)), tokens(200, 500, v=200).clamp(min=3)
    y, labels = m.subject.forward(collator, x, 0)
    hit = labels != -100
    share = hit.double().mean().item()
    masked, kept = (y[hit] == 1).double().mean().item(), (y[hit] == x[hit]).double().mean().item()
    honest = torch.equal(y[~hit], x[~hit]) and torch.equal(labels[hit], x[hit])
    return honest and abs(share - 0.15) < 0.01 and abs(masked - 0.8) < 0.02 and abs(kept - 0.1) < 0.02


def p15(m):
    model, x = make(m), tokens(1, 7)
    e = model.emb(x).detach().requires_grad_()
    hook = model.emb.register_forward_hook(lambda *_: e)
    seen = torch.stack([torch.autograd.grad(model(x)[0, t].pow(2).sum(), e)[0][0].abs().sum(-1) > 0 for t in range(7)])
    hook.remove()
    want = torch.ones(7, 7).tril().bool()
    want[:3, :3] = True
    return torch.equal(seen, want)


def p16(m):
    model, x = make(m), tokens(4, 5)
    padded = torch.cat((x, tokens(4, 2, 8)), 1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, 5:] = False
    return same(m.subject.forward(model, padded, mask), m.subject.forward(model, x))


def p17(m):
    return cache_equals_forward(m)


def p18(m):
    logits = torch.randn(2, 5, 7, dtype=torch.float64) * 2 + 3
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 1] = -100
    counts = labels != -100
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + m.Z * logits.logsumexp(-1)[counts].pow(2).mean()
    return same(m.subject.forward(None, logits, labels), want)


def p19(m):
    good = True
    for length in (3, 4, 7, 8):
        model, x, y = make(m), tokens(2, length), tokens(2, length, 4)
        y[0, 2] = -100
        want = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), ignore_index=-100)
        good &= same(m.subject.loss(model, x, y), want)
    return good


def p20(m):
    model, target = make(m), tokens(2, 5, 3)
    good = True
    for seed in (1, 2):
        source = tokens(2, 4, seed)
        got = m.subject.cache(model, source, list(target.split((1, 3, 1), 1)))
        good &= same(got, m.subject.forward(model, source, target))
    return good


if __name__ == "__main__":
    for n in range(1, 21):
        (right,), (wrong,) = HERE.glob(f"{n:02}_*_right.py"), HERE.glob(f"{n:02}_*_wrong.py")
        prove = globals()[f"p{n:02}"]
        found = []
        for path in (right, wrong):
            torch.manual_seed(n)
            found.append(bool(prove(load(path))))
        print(f"{n:02}", "ok" if found == [True, False] else f"NOT OK right {found[0]} wrong {found[1]}")
