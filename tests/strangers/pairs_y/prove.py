"""Every pair, in plain torch: right and wrong part in the way that is meant, and the right one agrees with something independent."""

import copy
import importlib.util
import inspect
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig

HERE = Path(__file__).resolve().parent
C = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=3, d_ff=24, vocab_size=13, max_len=32, num_classes=3)
SMALL = DrawnConfig()
PROOFS = {}


def load(stem, which):
    path = next(HERE.glob(f"{stem}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module, c=C, seed=0, double=True):
    torch.manual_seed(seed)
    model = module.subject.build(c)
    if isinstance(model, nn.Module):
        model = model.eval()
        if double:
            model = model.double()
    return model


def far(a, b):
    return (a - b).abs().max().item()


def same(a, b):
    assert a.shape == b.shape and far(a, b) < 1e-9, far(a, b)


def other(a, b, least=1e-4):
    assert not (far(a, b) < least), far(a, b)  # NaN counts as another


def tokens(*shape, seed=1, low=0, high=13):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def proof(stem):
    def keep(function):
        PROOFS[stem] = function
        return function

    return keep


def chunks(x, *sizes):
    return list(x.split(list(sizes), dim=1))


@proof("01")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(2, 9)
    whole = R.subject.forward(right, x)
    same(whole, W.subject.forward(wrong, x))
    for t in range(1, 10):  # a prefix of the whole, alone
        same(R.subject.forward(right, x[:, :t]), whole[:, :t])
    for sizes in ((9,), (4, 5), (2, 3, 4), (1,) * 9, (5, 1, 1, 1, 1)):
        same(R.subject.cache(right, chunks(x, *sizes)), whole)
    for sizes in ((9,), (1,) * 9, (5, 1, 1, 1, 1)):
        same(W.subject.cache(wrong, chunks(x, *sizes)), whole)
    bad = W.subject.cache(wrong, chunks(x, 4, 5))
    same(bad[:, :4], whole[:, :4])
    other(bad[:, 4:], whole[:, 4:])


@proof("02")
def _(R, W):
    right, wrong = make(R), make(W)
    long, short = tokens(1, 8), tokens(1, 5, seed=2)
    alone = R.subject.forward(right, short)
    x = torch.cat((long, torch.cat((tokens(1, 3, seed=3), short), 1)))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :3] = False
    for module, model in ((R, right), (W, wrong)):
        same(module.subject.forward(model, x, mask)[1:, 3:], alone)
        same(module.subject.forward(model, x, mask)[:1], module.subject.forward(model, long))
        same(module.subject.cache(model, chunks(long, 4, 1, 3)), R.subject.forward(right, long))
    for sizes in ((5, 1, 1, 1), (5, 3), (2, 2, 4), (1,) * 8):
        same(R.subject.cache(right, chunks(x, *sizes), mask)[1:, 3:], alone)
    bad = W.subject.cache(wrong, chunks(x, 5, 1, 1, 1), mask)
    same(bad[1:, 3:5], alone[:, :2])
    other(bad[1:, 5:], alone[:, 2:])


@proof("03")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(2, 7)
    whole = R.subject.forward(right, x)
    same(whole, W.subject.forward(wrong, x))
    same(R.subject.cache(right, chunks(x, 3, 1, 3)), whole)
    other(W.subject.cache(wrong, chunks(x, 3, 1, 3)), whole)
    # the same model with every head its own key and value, each weight written out head by head
    full = make(R, DrawnConfig(**{**vars_of(C), "num_key_value_heads": 4}))
    state = dict(right.state_dict())
    for name, weight in right.state_dict().items():
        if name.endswith("to_kv.weight"):
            k = C.d_model // C.num_heads
            rows = [weight[s * 2 * k + (h // 2) * k :][:k] for s in (0, 1) for h in range(4)]
            state[name] = torch.cat(rows)
    full.load_state_dict(state)
    same(R.subject.forward(full, x), whole)
    for g in (1, 4):  # no mistake is seen there
        c = DrawnConfig(**{**vars_of(C), "num_key_value_heads": g})
        model = make(W, c)
        same(W.subject.cache(model, chunks(x, 3, 1, 3)), W.subject.forward(model, x))


def vars_of(c):
    names = ("d_model", "num_heads", "num_key_value_heads", "num_layers", "d_ff", "vocab_size", "max_len", "num_classes")
    return {name: getattr(c, name) for name in names}


@proof("04")
def _(R, W):
    x = tokens(2, 28)
    right, wrong = make(R), make(W)
    same(R.subject.forward(right, x[:, :16]), W.subject.forward(wrong, x[:, :16]))
    good, bad = R.subject.forward(right, x), W.subject.forward(wrong, x)
    same(good[:, :16], bad[:, :16])
    other(good[:, 16:], bad[:, 16:])

    class Naive:  # multiplication of complex pairs by exp(i m theta), position by position
        def __call__(self, z):
            pairs = torch.view_as_complex(z.reshape(*z.shape[:-1], -1, 2).contiguous())
            n = pairs.shape[-1]
            out = [
                [pairs[..., m, i] * torch.polar(torch.tensor(1.0).double(), torch.tensor(m * 10000 ** (-i / n)).double()) for i in range(n)]
                for m in range(z.shape[-2])
            ]
            return torch.view_as_real(torch.stack([torch.stack(row, -1) for row in out], -2)).flatten(-2)

    naive = make(R)
    for layer in naive.layers:
        layer.attention.table = Naive()
    same(R.subject.forward(naive, x), good)


@proof("05")
def _(R, W):
    right, wrong = make(R), make(W)
    logits = torch.randn(2, 6, 11, dtype=torch.float64)
    labels = tokens(2, 6, high=11)
    same(R.subject.forward(right, logits, labels), W.subject.forward(wrong, logits, labels))
    labels[0, 2:] = -100
    nll = z = n = 0
    for b in range(2):
        for t in range(6):
            if labels[b, t] != -100:
                log_z = math.log(sum(math.exp(v) for v in logits[b, t].tolist()))
                nll, z, n = nll + log_z - logits[b, t, labels[b, t]].item(), z + log_z**2, n + 1
    naive = torch.tensor((nll + 0.01 * z) / n, dtype=torch.float64)
    same(R.subject.forward(right, logits, labels), naive)
    other(W.subject.forward(wrong, logits, labels), naive)


@proof("06")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(3, 7)
    labels = x.clone()
    labels[1, 4:] = -100
    labels[2, :3] = -100
    p = R.subject.forward(right, x).log_softmax(-1)
    same(R.subject.forward(right, x), W.subject.forward(wrong, x))
    terms = [-p[b, t, labels[b, t + 1]] for b in range(3) for t in range(6) if labels[b, t + 1] != -100]
    naive = sum(terms) / len(terms)
    same(R.subject.loss(right, x, labels), naive)
    other(W.subject.loss(wrong, x, labels), naive)
    first = (labels[:, 0] != -100).sum().item()
    same(W.subject.loss(wrong, x, labels), sum(terms) / (len(terms) + first))


@proof("07")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    same(R.subject.forward(right, x, mask), W.subject.forward(wrong, x, mask))
    g = torch.randn(2, 6, 16, dtype=torch.float64)

    def gradients(model, forward):
        model.zero_grad()
        (forward() * g).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def plain():
        h = right.embedding_norm(right.word_embeddings(x) + right.position_embeddings.weight[:6])
        for layer in right.layers:
            h = layer(h, mask[:, None, None, :])
        return h

    naive = gradients(right, plain)
    good = gradients(right, lambda: R.subject.forward(right, x, mask))
    bad = gradients(wrong, lambda: W.subject.forward(wrong, x, mask))
    for name in naive:
        same(good[name], naive[name])
        if name.startswith("layers.2."):
            same(bad[name], naive[name])
    other(bad["layers.0.intermediate.weight"], naive["layers.0.intermediate.weight"])
    # and the derivative by a difference
    p = right.layers[0].intermediate.weight
    direction = torch.randn_like(p)
    with torch.no_grad():
        ends = []
        for step in (1e-5, -2e-5):
            p += step * direction
            ends.append((plain() * g).sum())
        p += 1e-5 * direction
    quotient = (ends[0] - ends[1]) / 2e-5
    assert abs(quotient - (good["layers.0.intermediate.weight"] * direction).sum()) < 1e-5
    assert abs(quotient - (bad["layers.0.intermediate.weight"] * direction).sum()) > 1e-3


@proof("08")
def _(R, W):
    c = DrawnConfig(**vars_of(C), dropout=0.3)
    right, wrong, x = make(R, c), make(W, c), tokens(2, 6)
    calm = make(R)  # no dropout at all, the same weights
    same(R.subject.forward(right, x), R.subject.forward(calm, x))
    same(R.subject.forward(right, x), R.subject.forward(right, x))
    other(W.subject.forward(wrong, x), W.subject.forward(wrong, x))
    same(W.subject.forward(make(W), x), R.subject.forward(calm, x))
    right.train()
    other(R.subject.forward(right, x), R.subject.forward(right, x))


@proof("09")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(1, 4)
    logits = R.subject.forward(right, x)[0, -1] / 3.0
    order = logits.argsort(descending=True)[:3].tolist()
    weights = [math.exp(logits[i].item()) for i in order]
    naive = torch.zeros(13, dtype=torch.float64)
    for i, w in zip(order, weights):
        naive[i] = w / sum(weights)
    torch.manual_seed(0)
    many = x.expand(20000, -1)
    good, drawn_from = R.subject.sampling(right, many, 1, temperature=3.0, top_k=3)
    same(drawn_from[0, 0], naive)
    share = torch.bincount(good[:, -1], minlength=13).double() / 20000
    assert far(share, naive) < 0.02 and set(good[:, -1].tolist()) == set(order)
    bad, told = W.subject.sampling(wrong, many, 1, temperature=3.0, top_k=3)
    same(told[0, 0], naive)
    share = torch.bincount(bad[:, -1], minlength=13).double() / 20000
    assert far(share, naive) > 0.05 and not set(bad[:, -1].tolist()) <= set(order)
    assert far(share, logits.softmax(-1)) < 0.02
    # the forward: a naive attention, one query at a time
    layer, h = right.layers[0], right.embedder(x)[0] * 4.0
    z = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v = R.rope(layer.q(z).view(4, 4, 4).transpose(0, 1)), R.rope(layer.k(z).view(4, 2, 4).transpose(0, 1)), layer.v(z).view(4, 2, 4)
    rows = []
    for t in range(4):
        heads = []
        for a in range(4):
            s = torch.stack([(q[a, t] * k[a // 2, j]).sum() / 2 for j in range(t + 1)]).softmax(0)
            heads.append(sum(s[j] * v[j, a // 2] for j in range(t + 1)))
        rows.append(torch.cat(heads))
    y = h + layer.o(torch.stack(rows))
    z = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    y = y + layer.down(F.gelu(layer.gate(z), approximate="tanh") * layer.up(z))
    same(layer(right.embedder(x) * 4.0)[0], y)


@proof("10")
def _(R, W):
    right, wrong = make(R), make(W)
    short = tokens(1, 5)
    alone = R.subject.forward(right, short)
    same(alone, W.subject.forward(wrong, short))
    for left in range(4):
        filler = tokens(1, 3, seed=5)
        x = torch.cat((filler[:, :left], short, filler[:, left:]), 1)
        mask = torch.zeros(1, 8, dtype=torch.bool)
        mask[:, left : left + 5] = True
        same(R.subject.forward(right, x, mask), alone)
        if left:
            other(W.subject.forward(wrong, x, mask), alone)
        else:
            same(W.subject.forward(wrong, x, mask), alone)


@proof("11")
def _(R, W):
    right, wrong = make(R), make(W)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)

    def naive(image):
        rows = []
        for r in range(2):
            for s in range(3):
                rows.append(torch.stack([image[c, 4 * r + i, 4 * s + j] for c in range(3) for i in range(4) for j in range(4)]))
        return right.patch_embed(torch.stack(rows)) + right.pos_embed

    expected = torch.stack([naive(image) for image in images])
    same(R.subject.patches(right, images), expected)
    weight = right.patch_embed.weight.view(-1, 3, 4, 4)  # and as a convolution
    convolved = F.conv2d(images, weight, right.patch_embed.bias, stride=4).flatten(2).transpose(1, 2) + right.pos_embed
    same(R.subject.patches(right, images), convolved)
    other(W.subject.patches(wrong, images), expected)
    changed = images.clone()
    changed[:, :, :4, :4] += 1  # one patch
    moved = lambda m, model: (m.subject.patches(model, changed) - m.subject.patches(model, images)).abs().amax((0, 2)) > 1e-9
    assert moved(R, right).tolist() == [True] + [False] * 5
    assert moved(W, wrong).sum() > 1
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    same(R.subject.forward(right, x), W.subject.forward(wrong, x))


@proof("12")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(4, 9)
    good, bad = R.subject.forward(right, x), W.subject.forward(wrong, x)
    for b in range(4):
        same(R.subject.forward(right, x[b : b + 1]), good[b : b + 1])
    for t in range(1, 10):
        same(R.subject.forward(right, x[:, :t]), good[:, :t])
    other(torch.cat([W.subject.forward(wrong, x[b : b + 1]) for b in range(4)]), bad)
    moe, z = right.layers[0].moe, torch.randn(2, 5, 16, dtype=torch.float64)
    expected = torch.zeros_like(z)
    for b in range(2):
        for t in range(5):
            scores = moe.gate(z[b, t]).tolist()
            best = sorted(range(4), key=lambda e: -scores[e])[:2]
            total = sum(math.exp(scores[e]) for e in best)
            for e in best:
                expected[b, t] += math.exp(scores[e]) / total * moe.experts[e](z[b, t])
    same(moe(z), expected)


@proof("13")
def _(R, W):
    right, wrong, x = make(R), make(W), tokens(3, 8)
    same(R.subject.cache(right, chunks(x, 3, 1, 4)), R.subject.forward(right, x))
    same(W.subject.cache(wrong, chunks(x, 3, 1, 4)), R.subject.forward(right, x))
    for beams in ([1, 0, 2], [2, 2, 0], [1, 2, 0], [0, 0, 1]):
        order = torch.tensor(beams)
        written = torch.cat((x[order, :3], x[:, 3:]), 1)
        expected = R.subject.forward(right, written)[:, 3:]
        same(R.subject.cache(right, chunks(x, 3, 2, 3), reorder=order)[:, 3:], expected)
        bad = W.subject.cache(wrong, chunks(x, 3, 2, 3), reorder=order)[:, 3:]
        other(bad, expected)
    order = torch.tensor([1, 2, 2])  # only forwards: no mistake is seen
    same(W.subject.cache(wrong, chunks(x, 3, 5), reorder=order), R.subject.cache(right, chunks(x, 3, 5), reorder=order))


@proof("14")
def _(R, W):
    def decaying(module, model):
        groups = module.subject.forward(model)
        assert len({id(p) for g in groups for p in g["params"]}) == sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        decayed = {id(p) for g in groups if g["weight_decay"] > 0 for p in g["params"]}
        return {name for name, p in model.named_parameters() if id(p) in decayed}

    right, wrong = make(R), make(W)
    expected = set()
    for name, part in right.named_modules():
        if isinstance(part, nn.Linear):
            expected.add(f"{name}.weight")
        if isinstance(part, nn.MultiheadAttention):
            expected.add(f"{name}.in_proj_weight")
    assert decaying(R, right) == expected
    assert decaying(W, wrong) == expected | {"norm_f.weight"}
    x = tokens(2, 5)
    assert right(x).shape == (2, 5, 13)


@proof("15")
def _(R, W):
    right, wrong = make(R), make(W)
    for step in range(0, 260):
        if step < 40:
            expected = 3e-4 * step / 40
        else:
            t = min((step - 40) / 160, 1.0)
            expected = 3e-5 + (3e-4 - 3e-5) * math.cos(math.pi * t / 2) ** 2  # the half angle
        assert abs(R.subject.forward(right, step) - expected) < 1e-15
        if step <= 40:
            assert W.subject.forward(wrong, step) == R.subject.forward(right, step)
    assert abs(R.subject.forward(right, 200) - 3e-5) < 1e-15
    assert W.subject.forward(wrong, 200) > 5e-5


@proof("16")
def _(R, W):
    right, wrong = make(R), make(W)
    for text in ("the cat", "a  b\n\tc ", "naïve, 12²!", "日本 🙂", "", " ", "x=1;y=2"):
        assert R.subject.decode(right, R.subject.forward(right, text)) == text
        assert R.subject.forward(right, text) == W.subject.forward(wrong, text)
    for text in ("snake_case", "_", " __init__(self)", "a _ b"):
        assert R.subject.decode(right, R.subject.forward(right, text)) == text
        lost = W.subject.decode(wrong, W.subject.forward(wrong, text))
        assert lost.replace(" ", "") == text.replace("_", "").replace(" ", "")  # the underscores and nothing else
        assert lost != text

    def naive(word):  # merge by merge, in the order in which they were learnt
        symbols = [bytes([b]) for b in word.encode()]
        for a, b in sorted(right.ranks, key=right.ranks.get):
            i = 0
            while i + 1 < len(symbols):
                if (symbols[i], symbols[i + 1]) == (a, b):
                    symbols[i : i + 2] = [a + b]
                i += 1
        return symbols

    for word in ("the", " the", " mat", "nights", " theatre", "aaaa"):
        assert right.segment(word) == naive(word), word
    every = "".join(chr(i) for i in range(0x3000) if not 0xD800 <= i < 0xE000)
    assert R.subject.decode(right, R.subject.forward(right, every)) == every


@proof("17")
def _(R, W):
    x = tokens(400, 500, high=1000)
    c = DrawnConfig(**{**vars_of(C), "vocab_size": 1000})

    def shares(module):
        inputs, labels = module.subject.forward(make(module, c), x, 7)
        chosen = labels != -100
        assert not chosen[x < 4].any() and torch.equal(labels[chosen], x[chosen]) and torch.equal(inputs[~chosen], x[~chosen])
        was, now = x[chosen], inputs[chosen]
        return [chosen[x >= 4].double().mean().item(), *((r.double().mean().item()) for r in (now == 3, (now != 3) & (now != was), now == was))]

    for got, expected in ((shares(R), (0.15, 0.8, 0.1, 0.1)), (shares(W), (0.15, 0.8, 0.02, 0.18))):
        assert all(abs(a - b) < 0.01 for a, b in zip(got, expected)), got


@proof("18")
def _(R, W):
    x = tokens(2, 6)
    for module, holds in ((R, True), (W, False)):
        one, two = make(module), make(module, seed=1)
        other(module.subject.forward(one, x), module.subject.forward(two, x))
        two.load_state_dict(one.state_dict())
        assert (far(module.subject.forward(one, x), module.subject.forward(two, x)) < 1e-9) == holds
    right, wrong = make(R), make(W)
    assert sum(n.startswith("gains") for n in right.state_dict()) == 6
    assert not any("gain" in n for n in wrong.state_dict())
    assert far(R.subject.forward(right, x), W.subject.forward(wrong, x)) < 1e-6  # but for float32 gains
    # the first layer, naively
    h = right.embedding(x)[0] + right.position[:6]
    z, part = right.norms[0](h), right.sublayers[0]
    q, (k, v) = part.q(z).view(6, 4, 4), part.kv(z).view(6, 2, 4, 4).unbind(1)
    rows = []
    for t in range(6):
        weights = [torch.stack([(q[t, a] * k[j, a]).sum() / 2 for j in range(6)]).softmax(0) for a in range(4)]
        rows.append(torch.cat([sum(weights[a][j] * v[j, a] for j in range(6)) for a in range(4)]))
    same(part(right.norms[0](right.embedding(x) + right.position[:6]))[0], part.out(torch.stack(rows)))


@proof("19")
def _(R, W):
    c = DrawnConfig(**{**vars_of(C), "num_layers": 1})
    for module, sees in ((R, 4), (W, 5)):
        model = make(module, c)
        x = tokens(1, 12)
        whole = module.subject.forward(model, x)
        for s in range(12):
            changed = x.clone()
            changed[0, s] = (x[0, s] + 1) % 13
            moved = (module.subject.forward(model, changed) - whole).abs().amax(-1)[0] > 1e-9
            assert moved.tolist() == [s <= t < s + sees for t in range(12)], (s, moved)
    right, wrong, x = make(R), make(W), tokens(2, 12)
    whole = R.subject.forward(right, x)
    for sizes in ((12,), (5, 7), (1,) * 12, (6, 1, 1, 4), (2, 10)):
        same(R.subject.cache(right, chunks(x, *sizes)), whole)
    same(W.subject.cache(wrong, chunks(x, *(1,) * 12)), whole)  # steps are right
    other(W.subject.forward(wrong, x), whole)
    other(W.subject.cache(wrong, chunks(x, 6, 1, 1, 4)), W.subject.forward(wrong, x))


@proof("20")
def _(R, W):
    s1, s2, t = tokens(2, 6), tokens(2, 6, seed=8), tokens(2, 4, seed=9)
    expected = R.subject.forward(make(R), s2, t).detach()  # with gradients nothing is kept
    for module, holds in ((R, True), (W, False)):
        model = make(module)
        with torch.no_grad():
            first, second = module.subject.forward(model, s1, t), module.subject.forward(model, s2, t)
            same(module.subject.forward(make(module), s1, t), first)
        assert (far(second, expected) < 1e-9) == holds
        if not holds:
            same(second, first)
        same(module.subject.forward(model, s2, t).detach(), expected)
    right, mask = make(R), torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    with torch.no_grad():
        same(R.subject.forward(right, s1, t, mask), R.subject.forward(right, s1[:, :4], t))


def inputs_of(kind, c):
    x = tokens(2, 5, high=c.vocab_size)
    return {
        "decoder": (x,),
        "encoder": (x,),
        "classifier": (x,),
        "layer": (torch.randn(2, 5, c.d_model),),
        "encoder_decoder": (x, x[:, :4]),
        "loss": (torch.randn(2, 5, c.vocab_size), x),
        "masking": (x, 0),
        "schedule": (3,),
        "parameter_groups": (),
        "tokenizer": ("a text",),
    }[kind]


def main():
    for number in range(1, 21):
        stem = f"{number:02d}"
        right, wrong = load(stem, "right"), load(stem, "wrong")
        assert isinstance(wrong.WHAT, str) and not hasattr(right, "WHAT")
        for module in (right, wrong):
            torch.manual_seed(0)
            built = module.subject.build(SMALL)
            module.subject.forward(built, *inputs_of(module.subject.kind, SMALL))
            if "attention_mask" in inspect.signature(module.subject.forward).parameters:
                module.subject.forward(built, *inputs_of(module.subject.kind, SMALL), attention_mask=torch.ones(2, 5, dtype=torch.bool))
            copy.deepcopy(built)
        PROOFS[stem](right, wrong)
        print(stem, "proved:", wrong.WHAT, flush=True)


if __name__ == "__main__":
    main()
