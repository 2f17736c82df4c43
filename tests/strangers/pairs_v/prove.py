"""For every pair, in plain torch: right agrees with an independent computation or identity, wrong does not.

Run: python prove.py
"""

import copy
import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
CASES = {}


def case(number):
    def keep(function):
        CASES[number] = function
        return function

    return keep


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(**sizes):
    return DrawnConfig(**sizes)


def twins(right, wrong, c):
    """Two double-precision models with the same weights."""
    torch.manual_seed(0)
    a = right.subject.build(c)
    torch.manual_seed(0)
    b = wrong.subject.build(c)
    if not isinstance(a, nn.Module):
        return a, b
    for model in (a, b):
        torch.manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    a, b = a.double(), b.double()
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    return a, b


def apart(x, y):
    return (x - y).abs().max().item()


def same(x, y):
    return apart(x, y) < 1e-9


def differ(x, y):
    return not apart(x, y) < 1e-4  # NaN differs


def tokens(batch, length, vocab=11):
    return torch.randint(vocab, (batch, length))


@case(1)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    first, second, beams = tokens(3, 4), tokens(3, 2), torch.tensor([1, 0, 1])
    whole = torch.cat([first[beams], second], 1)
    for model, module in ((a, right), (b, wrong)):
        plain = model(whole)
        assert same(model(first), module.cached(model, [first]))
        assert same(plain, module.cached(model, [first[beams], second]))  # without reordering both are right
        got = module.cached(model, [first, second], reorder=beams)[:, 4:]
        assert same(got, plain[:, 4:]) == (module is right)
        if module is wrong:
            assert differ(got, plain[:, 4:])
            assert same(module.cached(model, [first, second], reorder=torch.tensor([0, 0, 0]))[:, 4:], model(torch.cat([first[[0, 0, 0]], second], 1))[:, 4:])
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, :2] = False
    assert same(a(first, mask)[0, 2:], a(first[:1, 2:])[0])


@case(2)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x = tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    for model, module in ((a, right), (b, wrong)):
        alone = model(x[:1, 2:])[0]  # the sample without padding
        assert same(model(x, mask)[0][:1, 2:], alone)
        assert same(module.cached(model, [x[:, :3], x[:, 3:]]), model(x)[0])
        got = module.cached(model, [x[:, :3], x[:, 3:4], x[:, 4:]], mask)
        assert same(got[1], model(x)[0][1])
        assert same(got[:1, 2:], alone) == (module is right)
        if module is wrong:
            assert differ(got[:1, 3:], alone[:, 1:])
        assert torch.equal(module.generate(model, x, 4, True), module.generate(model, x, 4, False))


def naive_attention(q, k, v, allowed=None):
    k, v = k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    return torch.einsum("bhts,bhse->bhte", scores.softmax(-1), v)


@case(3)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    for length, causal in ((16, False), (32, True), (5, False), (21, True), (70, False)):
        q, k, v = torch.randn(2, 4, length, 6).double(), torch.randn(2, 2, length, 6).double(), torch.randn(2, 2, length, 3).double()
        mask = torch.rand(2, 1, length, length) < 0.7
        mask = mask | torch.eye(length, dtype=torch.bool)
        low = torch.ones(length, length).tril().bool()
        for m in (None, mask):
            allowed = (torch.ones_like(low) if m is None else m) & (low if causal else torch.ones_like(low))
            expected = naive_attention(q, k, v, allowed)
            assert same(a(q, k, v, m, causal), expected)
            assert same(b(q, k, v, m, causal), expected) == (length % 16 == 0)
            assert length % 16 == 0 or differ(b(q, k, v, m, causal), expected)
    assert same(a(q, k, v, torch.zeros(70, 70, dtype=torch.bool)), torch.zeros(2, 4, 70, 3))


@case(4)
def _(right, wrong):
    for heads, groups in ((4, 4), (4, 1), (4, 2)):
        a, b = twins(right, wrong, config(d_model=16, num_heads=heads, num_key_value_heads=groups))
        x = torch.randn(2, 5, 16).double()
        p = right.projections(a)
        cut = lambda w, n: (x @ w.T).view(2, 5, n, 4).transpose(1, 2)
        y = naive_attention(cut(p["q"], heads), cut(p["k"], groups), cut(p["v"], groups))
        expected = y.transpose(1, 2).reshape(2, 5, 16) @ p["o"].T
        assert same(a(x), expected)
        assert same(b(x), expected) == (groups != 2)
        assert groups != 2 or differ(b(x), expected)


@case(5)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x = torch.randn(2, 5, 8).double()
    rows = []
    for row in x.view(-1, 8):
        p = (a.router.weight @ row).softmax(0)
        best = sorted(range(4), key=lambda e: -p[e])[:2]
        rows.append(sum(p[e] / sum(p[i] for i in best) * a.experts[e](row) for e in best))
    expected = torch.stack(rows).view(2, 5, 8)
    assert same(a(x), expected) and differ(b(x), expected)
    weights = right.router(a, x)
    assert same(sum(weights[..., e, None] * a.experts[e](x) for e in range(4)), expected)


@case(6)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    for length in (2, 4, 5, 7, 9):
        logits, labels = torch.randn(3, length, 11).double(), tokens(3, length)
        labels[0, -1] = -100
        labels[1, :2] = -100
        picked = [-logits[i, t].log_softmax(0)[labels[i, t + 1]] for i in range(3) for t in range(length - 1) if labels[i, t + 1] >= 0]
        expected = sum(picked) / len(picked)
        assert same(a(logits, labels), expected)
        assert same(b(logits, labels), expected) == (length <= 4)
        assert length <= 4 or differ(b(logits, labels), expected)
    assert a(logits, torch.full_like(labels, -100)) == 0


@case(7)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    for width in (4, 8, 16):
        x, positions = torch.randn(1, 2, 6, width).double(), torch.arange(6) + 3
        expected = x.clone()
        for t, p in enumerate(positions.tolist()):
            for pair in range(2):  # channels (pair, pair + 2) as a complex number
                z = torch.complex(x[..., t, pair], x[..., t, pair + 2])
                z = z * complex(math.cos(p * 10000 ** (-pair / 2)), math.sin(p * 10000 ** (-pair / 2)))
                expected[..., t, pair], expected[..., t, pair + 2] = z.real, z.imag
        assert same(a(x, positions), expected)
        assert same(b(x, positions), expected) == (width == 4)
        assert width == 4 or differ(b(x, positions), expected)


def reaches(model, length, position):
    """Which inputs the logits at `position` depend on."""
    x = tokens(1, length)
    base = model(x)[0, position]
    found = []
    for s in range(length):
        y = x.clone()
        y[0, s] = (y[0, s] + 1) % 11
        found.append(apart(model(y)[0, position], base) > 1e-9)
    return found


@case(8)
def _(right, wrong):
    a, b = twins(right, wrong, config(num_layers=2))
    assert reaches(a, 9, 8) == [True] * 9
    assert reaches(b, 9, 8) == [False] * 4 + [True] * 5  # two windows of three
    x = tokens(2, 9)
    h = a.tokens(x) + a.positions(torch.arange(9))
    for index, block in enumerate(a.blocks):
        q, k, v = block.qkv(block.norm_1(h)).chunk(3, -1)
        q, k, v = (z.view(2, 9, 2, 4).transpose(1, 2) for z in (q, k, v))
        back = torch.arange(9)[:, None] - torch.arange(9)
        y = naive_attention(q, k, v, (back >= 0) & (back < (3 if index == 0 else 99)))
        h = h + block.out(y.transpose(1, 2).reshape(2, 9, 8))
        h = h + block.down(F.gelu(block.up(block.norm_2(h))))
    expected = a.head(a.norm(h))
    assert same(a(x), expected) and differ(b(x), expected) and same(a(x[:, :3]), b(x[:, :3]))


@case(9)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    def bucket(n):  # T5, as published
        return n if n < 4 else min(4 + int(math.log(n / 4) / math.log(16 / 4) * 4 + 1e-9), 7)
    n = torch.arange(40)
    published = torch.tensor([bucket(i) for i in range(40)])
    assert torch.equal(a.bucket(n), published)
    assert (b.bucket(n) != published).nonzero().flatten().tolist() == [6, 8, 12]
    expected = torch.stack([torch.stack([a.table.weight[bucket(max(t - s, 0))] for s in range(20)]) for t in range(20)]).permute(2, 0, 1)
    assert same(a(20, 20), expected) and differ(b(20, 20), expected) and same(b(6, 6), expected[:, :6, :6])


@case(10)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x = tokens(3, 6)
    mask = torch.arange(6)[None] < torch.tensor([3, 6, 4])[:, None]
    mask[2] = mask[2].flip(0)
    for model, module in ((a, right), (b, wrong)):
        got = [model(x, mask)[i][mask[i]] for i in range(3)]
        alone = [model(x[i : i + 1][mask[i : i + 1]][None])[0] for i in range(3)]
        assert same(got[0], alone[0])
        assert [same(g, y) for g, y in zip(got[1:], alone[1:])] == [module is right] * 2
        assert same(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]))
        if module is wrong:
            assert differ(got[1], alone[1])
    h = a.tokens(x[:1]) + a.places(torch.arange(6))
    for block in a.blocks:
        q, k, v = (z.view(1, 6, 2, 4).transpose(1, 2) for z in block.qkv(block.norm_1(h)).chunk(3, -1))
        h = h + block.out(naive_attention(q, k, v).transpose(1, 2).reshape(1, 6, 8))
        h = h + block.down(F.gelu(block.up(block.norm_2(h))))
    assert same(a(x[:1]), a.norm(h))


@case(11)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    p = torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0]).double()
    number = 40000
    off = {}
    for module in (right, wrong):
        torch.manual_seed(3)
        drawn = module.race(p.expand(number, -1)).flatten().bincount(minlength=5) / number
        off[module] = ((drawn - p).abs() / (p * (1 - p) / number).sqrt().clamp(min=1e-9)).max().item()
    assert off[right] < 5 and off[wrong] > 30, off
    torch.manual_seed(0)
    x, chosen = tokens(1, 3).expand(20000, -1), None
    for model, module in ((a, right), (b, wrong)):
        out, source = module.sampling(model, x, 1, 0.3, 4)
        expected = model(x[:1])[:, -1].detach() / 0.3
        best = expected.topk(4).indices[0]
        reference = torch.zeros(11).double().index_put((best,), expected[0, best].softmax(0))
        assert same(source[0, 0], reference)
        drawn = out[:, 3].bincount(minlength=11) / len(out)
        z = ((drawn - reference).abs() / (reference * (1 - reference) / len(out)).sqrt().clamp(min=1e-9)).max()
        assert (z < 4.5) if module is right else (z > 10), (module.__name__, z, reference)


@case(12)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    one, two, target = tokens(2, 5), tokens(2, 5), tokens(2, 4)
    chunks = [target[:, :1], target[:, 1:3], target[:, 3:]]
    for model, module in ((a, right), (b, wrong)):
        assert same(module.cached(model, one, chunks), model(one, target))
        second = module.cached(model, two, chunks)
        assert same(second, model(two, target)) == (module is right)
        if module is wrong:
            assert differ(second, model(two, target))
        assert same(module.cached(model, two[:, :3], chunks), model(two[:, :3], target))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 3:] = False
    assert same(a(one, target, mask), a(one[:, :3], target))
    assert same(a(one, target)[:, :2], a(one, target[:, :2]))


@case(13)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x = torch.randn(4, 6, 8).double()
    expected = F.layer_norm(x, (8,), a.weight, a.bias, 1e-5)
    assert same(a(x), expected) and same(b(x), expected)
    a, b = a.float(), b.float()
    shifted = (x.float() + 3000.0)
    exact = F.layer_norm(shifted.double(), (8,), a.weight.double(), a.bias.double(), 1e-5)
    assert apart(a(shifted).double(), exact) < 1e-2 and apart(b(shifted).double(), exact) > 0.3
    y, total = a(x.float(), x.float())
    assert torch.equal(total, 2 * x.float()) and torch.equal(y, a(total))


@case(14)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    for height, width in ((8, 8), (8, 12), (12, 4)):
        images = torch.randn(2, 3, height, width).double()
        cells = [images[:, :, r : r + 4, s : s + 4].flatten(1) for r in range(0, height, 4) for s in range(0, width, 4)]
        grid = F.interpolate(a.patches.places, size=(height // 4, width // 4), mode="bilinear", align_corners=False)
        places = torch.stack([grid[0, :, r, s] for r in range(height // 4) for s in range(width // 4)])
        expected = torch.stack([a.patches.project(cell) for cell in cells], 1) + places
        assert same(a.patches(images), expected)
        unfolded = F.unfold(images, 4, stride=4).transpose(1, 2)
        assert same(a.patches.project(unfolded) + places, expected)
        square = height == width
        assert same(b.patches(images), expected) == square or width == 4
        assert square or width == 4 or differ(b.patches(images), expected)


@case(15)
def _(right, wrong):
    a, b = twins(right, wrong, config(num_layers=3))
    x = tokens(2, 5)
    probe = torch.randn(2, 5, 8).double()
    with torch.no_grad():
        assert same(a(x), b(x))
    assert same(a(x), b(x))

    def plain(model):  # the same layers without checkpoints
        h = model.norm(model.tokens(x) + model.places(torch.arange(5)))
        for layer in model.layers:
            h = layer(h, None)
        return h

    def gradients(model, out):
        return torch.autograd.grad((out * probe).sum(), list(model.layers.parameters()) + [model.tokens.weight])

    expected = gradients(a, plain(a))
    assert all(same(g, e) for g, e in zip(gradients(a, a(x)), expected))
    got = gradients(b, b(x))
    per = len(list(b.layers[0].parameters()))
    assert all(same(g, e) for g, e in zip(got[2 * per : 3 * per], expected[2 * per : 3 * per]))
    assert any(differ(g, e) for g, e in zip(got[: 2 * per], expected[: 2 * per]))
    weight, step = a.layers[0].up.weight, 1e-5
    with torch.no_grad():  # and a difference quotient
        values = []
        for sign in (1, -1):
            weight[0, 0] += sign * step
            values.append((a(x) * probe).sum())
            weight[0, 0] -= sign * step
    quotient = (values[0] - values[1]) / (2 * step)
    index = [id(p) for p in a.layers.parameters()].index(id(weight))
    assert abs(quotient - expected[index][0, 0]) < 1e-6 and abs(quotient - got[index][0, 0]) > 1e-3


@case(16)
def _(right, wrong):
    c = config()
    a, b = right.build(c), wrong.build(c)
    assert a.head.weight is a.tokens.weight and b.head.weight is not b.tokens.weight
    assert b.head.weight.data_ptr() == b.tokens.weight.data_ptr()
    assert sum(p.numel() for p in b.parameters()) - sum(p.numel() for p in a.parameters()) == 11 * 8
    b.load_state_dict(a.state_dict())
    x = tokens(2, 5)
    goal = tokens(2, 5)
    assert apart(a(x), b(x)) < 1e-5
    loss = lambda model: F.cross_entropy(model(x).flatten(0, 1), goal.flatten())
    whole = torch.autograd.grad(loss(a), a.tokens.weight)[0]
    parts = torch.autograd.grad(loss(b), [b.tokens.weight, b.head.weight])
    assert apart(whole, parts[0] + parts[1]) < 1e-5 and differ(whole, parts[0])
    a, b = a.double(), b.double()
    with torch.no_grad():
        a.tokens.weight[0] += 1
        b.tokens.weight[0] += 1
    assert torch.equal(a.head.weight, a.tokens.weight) and not torch.equal(b.head.weight, b.tokens.weight)


@case(17)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x, memory = torch.randn(2, 4, 8).double(), torch.randn(2, 5, 8).double()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    cut = lambda z: z.view(2, -1, 2, 4).transpose(1, 2)
    for m in (None, mask, mask[[1, 1]]):
        y = naive_attention(cut(a.q(x)), cut(a.k(memory)), cut(a.v(memory)), None if m is None else m[:, None, None].expand(2, 2, 4, 5))
        expected = a.out(y.transpose(1, 2).reshape(2, 4, 8))
        assert same(a(x, memory, m), expected)
        assert same(b(x, memory, m), expected) == (m is not mask)
    assert differ(b(x, memory, mask), a(x, memory, mask))
    assert same(a(x[:1], memory[:1], mask[:1]), a(x[:1], memory[:1, :3]))


@case(18)
def _(right, wrong):
    a, b = right.subject.build(config(vocab_size=50)), wrong.subject.build(config(vocab_size=50))
    x = torch.randint(50, (300, 400))
    normal = x > 1
    for model, module in ((a, right), (b, wrong)):
        out, labels = model(x, 7)
        chosen = labels != -100
        assert torch.equal(labels[chosen], x[chosen]) and torch.equal(out[~chosen], x[~chosen]) and not (chosen & ~normal).any()
        share = chosen.sum() / normal.sum()
        assert abs(share - 0.15) < 0.006
        hidden = ((out == 1) & chosen).sum() / chosen.sum()
        kept = ((out == x) & chosen).sum() / chosen.sum()
        if module is right:  # 10 % replaced by any of 50: one in fifty of them is the mask, one in fifty the token
            assert abs(hidden - 0.802) < 0.015 and abs(kept - 0.102) < 0.012
        else:
            assert hidden == 1 and kept == 0


@case(19)
def _(right, wrong):
    a, b = right.Tokenizer(), wrong.Tokenizer()
    texts = ["the cat sat", "the mat", "the", "naïve\n\tcafé — 東京!", "", "other hats"]

    def slow(text):  # every merge in the order in which it was learnt, all over
        ids = []
        for symbols in right.split(text):
            for pair in a.merges:
                symbols = right.join(symbols, pair)
            ids += [a.ids[s] for s in symbols]
        return ids

    for text in texts * 2:
        assert a.encode(text) == slow(text) and a.decode(a.encode(text)) == text
    assert b.encode(texts[0]) == slow(texts[0])
    assert b.encode(texts[1]) != slow(texts[1]) and b.encode("the") != slow("the")
    assert b.decode(b.encode("the")) != "the"
    assert Counter(map(len, a.merges)) == {2: 24} and sorted(a.ids.values()) == list(range(256 + 24))


@case(20)
def _(right, wrong):
    a, b = twins(right, wrong, config())
    x = tokens(3, 6)
    for side in ("right", "left"):
        mask = torch.arange(6)[None] < torch.tensor([3, 6, 4])[:, None]
        mask = mask if side == "right" else mask.flip(1)
        for model, module in ((a, right), (b, wrong)):
            alone = torch.cat([model(x[i : i + 1][mask[i : i + 1]][None]) for i in range(3)])
            assert same(model(x, mask), alone) == (module is right or side == "right")
            if module is wrong and side == "left":
                assert differ(model(x, mask), alone)
    h = a.tokens(x) + a.places(torch.arange(6))
    for block in a.blocks:
        q, k, v = (z.view(3, 6, 2, 4).transpose(1, 2) for z in block.qkv(block.norm_1(h)).chunk(3, -1))
        h = h + block.out(naive_attention(q, k, v, torch.ones(6, 6).tril().bool()).transpose(1, 2).reshape(3, 6, 8))
        h = h + block.down(F.gelu(block.up(block.norm_2(h))))
    assert same(a(x), a.head(a.norm(h))[:, -1])


def runs(module):
    """subject.build(DrawnConfig()), then one forward through the subject."""
    c, kind = DrawnConfig(), module.subject.kind
    model, x = module.subject.build(c), torch.randn(2, 5, c.d_model)
    ids, heads = tokens(2, 5, c.vocab_size), torch.randn(2, c.num_heads, 5, c.d_model // c.num_heads)
    inputs = {
        "attention": (heads, heads, heads), "cross_attention": (x, x), "position_bias": (5, 5), "rotary": (heads, torch.arange(5)),
        "encoder_decoder": (ids, ids), "loss": (torch.randn(2, 5, c.vocab_size), ids), "masking": (ids, 0), "tokenizer": ("the cat",),
    }.get(kind, (ids,) if kind in ("encoder", "decoder", "classifier") else (x,))
    out = module.subject.forward(model, *inputs)
    assert all(torch.isfinite(o.float()).all() for o in (out if isinstance(out, tuple) else [torch.as_tensor(out)]))


def main():
    bad = 0
    for number in (map(int, sys.argv[1:]) if sys.argv[1:] else range(1, 21)):
        torch.manual_seed(number)
        right, wrong = (load(next(HERE.glob(f"{number:02d}_*_{word}.py"))) for word in ("right", "wrong"))
        try:
            runs(right), runs(wrong)
            assert isinstance(wrong.WHAT, str) and not hasattr(right, "WHAT")
            CASES[number](right, wrong)
            print("ok  ", wrong.__name__)
        except Exception as error:
            bad += 1
            import traceback

            print("FAIL", wrong.__name__, repr(error))
            traceback.print_exc(limit=-1)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
