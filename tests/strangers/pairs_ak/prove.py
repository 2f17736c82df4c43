"""Shows of each pair, in plain torch, that the wrong file is wrong and the right one right. Prints `NN ok`."""
import copy
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

HERE = Path(__file__).parent
torch.set_num_threads(1)


def load(number, which):
    (path,) = HERE.glob(f"{number:02d}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def config(**over):
    sizes = dict(
        d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32, num_classes=3,
        dropout=0.0, d_head=8,
    )
    return SimpleNamespace(**{**sizes, **over})


def model(file, redraw=True, **over):
    torch.manual_seed(0)
    m = file.subject.build(config(**over)).double().eval()
    if redraw:
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return m


def tokens(*shape):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1))


def apart(a, b):
    return float((a - b).detach().abs().max())


# Each of these returns how far a file is from its reference: about 0 is right.


def p01(file):
    m, t = model(file, num_key_value_heads=1), tokens(2, 9)
    one_by_one = apart(file.subject.cache(m, [t[:, :4], *t[:, 4:].split(1, 1)]), m(t))
    assert one_by_one < 1e-9  # the common case is right in both
    return apart(file.subject.cache(m, list(t.split(3, 1))), m(t))


def p02(file):
    m, t = model(file), tokens(3, 7)
    assert apart(file.subject.cache(m, [t[:, :4], t[:, 4:]]), m(t)) < 1e-9
    assert apart(file.subject.cache(m, [t[:, :4], t[:, 4:]], reorder=[0, 1, 2]), m(t)) < 1e-9
    order = torch.tensor([1, 0, 0])
    got = file.subject.cache(m, [t[:, :4], t[:, 4:]], reorder=order)
    return apart(got[:, 4:], m(torch.cat((t[order, :4], t[:, 4:]), 1))[:, 4:])


def p03(file):
    torch.manual_seed(0)
    layer = file.BitLinear(6, 5).double()
    x, g = torch.randn(4, 6, dtype=torch.double), torch.randn(4, 5, dtype=torch.double)
    w = layer.weight.detach()
    s = w.abs().mean()
    level = torch.where(w / s > 0.5, 1.0, torch.where(w / s < -0.5, -1.0, 0.0)).double()
    y = layer(x)
    (y * g).sum().backward()
    return apart(y, x @ (level * s).T + layer.bias) + apart(layer.weight.grad, g.T @ x)


def p04(file):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, dtype=torch.double, requires_grad=True)
    y = torch.randint(0, 7, (2, 5))
    y[0, :2] = -100
    ours, theirs = file.subject.forward(None, x, y), F.cross_entropy(x.flatten(0, 1), y.flatten())
    assert apart(ours, theirs) < 1e-12
    (plain,) = torch.autograd.grad(ours, x, retain_graph=True)
    assert apart(plain, torch.autograd.grad(theirs, x, retain_graph=True)[0]) < 1e-12
    return apart(torch.autograd.grad(ours / 4, x)[0], torch.autograd.grad(theirs / 4, x)[0])


def p05(file):
    m, t = model(file), tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[2, 3, 4, 5, 6, 7], [1, 1, 2, 3, 4, 5]])
    e = m.embeddings
    reference = e.LayerNorm(e.word_embeddings.weight[t] + e.position_embeddings.weight[expected])
    fresh = model(file, redraw=False).embeddings
    at_first = fresh.position_embeddings.weight[fresh.create_position_ids(torch.ones(1, 3))[0, 0]]
    return apart(e(t, mask), reference) + float(at_first.abs().max() == 0)


def p06(file):
    m = model(file)
    x = torch.randn(2, 3, 16, dtype=torch.double)
    up = torch.cat([s.weight for s in m.dense_h_to_4h.shards])
    up_bias = torch.cat([s.bias for s in m.dense_h_to_4h.shards])
    down = torch.cat(list(m.dense_4h_to_h.weights), 1)
    return apart(m(x), F.linear(F.gelu(F.linear(x, up, up_bias)), down, m.dense_4h_to_h.bias))


def p07(file):
    s = file.subject.build(config())

    def reference(t):
        if t < 40:
            return 6e-4 * t / 40
        t = min(t, 400)
        return 6e-5 + (6e-4 - 6e-5) * 0.5 * (1 + math.cos(math.pi * (t - 40) / 360))

    return 1e4 * max(abs(file.subject.forward(s, t) - reference(t)) for t in range(600))


def p08(file):
    m = model(file)
    groups = file.subject.forward(m)
    placed = [id(p) for g in groups for p in g["params"]]
    assert len(placed) == len(set(placed))
    for g in groups:
        assert all((p.dim() > 1) == (g["weight_decay"] > 0) for p in g["params"])
    return len(set(map(id, m.parameters())) ^ set(placed))


def p09(file):
    m, t = model(file, dropout=0.3), tokens(2, 6)
    m.train()

    def gradients(net):
        torch.manual_seed(5)
        net(t).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    plain = copy.deepcopy(m)
    plain.__class__ = type("Plain", (type(m),), {"forward": plain_forward})
    return apart(gradients(m), gradients(plain))


def plain_forward(self, idx):
    x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
    for block in self.h:
        x = block(x)
    return self.lm_head(self.ln_f(x))


def p10(file):
    torch.manual_seed(0)
    drop = file.DropPath(0.4).train()
    branch = torch.ones(6, 500, 2, dtype=torch.double)  # [T, B, D]
    y = drop(branch)
    assert set(y.unique().tolist()) <= {0.0, 1 / 0.6}
    return apart(y, y[:1, :, :1].expand_as(y))  # a sample is kept or dropped as a whole


def p11(file):
    torch.manual_seed(0)
    m = file.subject.build(config(d_model=128, num_layers=4, num_heads=4))
    worst = 0.0
    for name, p in m.named_parameters():
        if name.endswith("weight") and p.dim() == 2:
            std = 0.02 / math.sqrt(8) if "c_proj" in name else 0.02
            worst = max(worst, abs(p.std().item() / std - 1))
    return 0.0 if worst < 0.1 else worst


def p12(file):
    m, t = model(file, redraw=False), tokens(2, 6)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(m(t).flatten(0, 1), t.roll(1, 1).flatten()).backward()
        optimizer.step()
    extra = sum(p.numel() for p in m.parameters()) - sum(
        p.numel() for n, p in m.named_parameters() if n != "to_logits.weight"
    )
    return apart(m.to_logits.weight, m.token_emb.weight) + extra


def p13(file):
    torch.manual_seed(0)
    rope = file.subject.build(config())
    x = torch.randn(1, 2, 5, 8, dtype=torch.double)
    t = torch.tensor([0, 1, 5, 30, 700])
    z = torch.complex(x[..., :4], x[..., 4:])
    angle = t.double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return apart(file.subject.forward(rope, x, t), torch.cat((z.real, z.imag), -1))


def p14(file):
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 16, dtype=torch.double, requires_grad=True), torch.randn(2, 3, 16, dtype=torch.double)
    fresh, trained = model(file, redraw=False), model(file)

    def distance(m):
        ours, theirs = m(x), F.layer_norm(x, (16,), m.weight, m.bias)
        assert apart(ours, theirs) < 1e-12
        wrt = (x, m.weight, m.bias)
        pairs = zip(torch.autograd.grad(ours, wrt, g), torch.autograd.grad(theirs, wrt, g))
        return max(apart(a, b) for a, b in pairs)

    assert distance(fresh) < 1e-12  # with gain 1 nothing is to be seen
    return distance(trained)


def p15(file):
    m, t = model(file), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    assert apart(file.subject.cache(m, [t[:, :5], t[:, 5:6], t[:, 6:]], mask), m(t)[0]) < 1e-9
    mask[1, :3] = False
    alone = m(t[1:, 3:])[0]
    assert apart(m(t, mask)[0][1:, 3:], alone) < 1e-9
    return apart(file.subject.cache(m, [t[:, :5], t[:, 5:6], t[:, 6:]], mask)[1:, 3:], alone)


def p16(file):
    m, t = model(file), tokens(2, 9)
    assert apart(file.subject.cache(m, [t[:, :4], t[:, 4:6], t[:, 6:]]), m(t)) < 1e-9
    return apart(file.subject.cache(m, [t[:, :4], *t[:, 4:].split(1, 1)]), m(t))


def p17(file):
    m, t = model(file), tokens(4, 5)

    def distance(t):
        torch.manual_seed(0)
        out, drawn = file.subject.sampling(m, t, 3, temperature=0.7, top_k=3)
        worst = 0.0
        for i in range(3):
            logits = m(out[:, : t.shape[1] + i])[:, -1] / 0.7
            best = logits.topk(3).indices
            probs = torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(-1))
            worst = max(worst, apart(probs, drawn[:, i]))
        return worst

    assert distance(t[:1]) < 1e-9
    return distance(t)


def p18(file):
    m, y = model(file), tokens(2, 6)
    first, second = tokens(2, 5), (tokens(2, 5) + 3) % 11
    assert apart(file.subject.cache(m, first, list(y.split(2, 1))), m(first, y)) < 1e-9
    return apart(file.subject.cache(m, second, list(y.split(2, 1))), m(second, y))


def p19(file):
    m, t = model(file), tokens(3, 6)
    mask = torch.arange(6) < torch.tensor([4, 6, 2])[:, None]
    got = m(t, mask)
    assert apart(got[0, :4], m(t[:1, :4])[0]) < 1e-9
    return max(apart(got[b, :n], m(t[b : b + 1, :n])[0]) for b, n in enumerate([4, 6, 2]))


def p20(file):
    torch.manual_seed(0)
    worst = 0.0
    for S in (7, 16, 50):
        q, k = torch.randn(2, 4, 5, 8, dtype=torch.double), 2 * torch.randn(2, 2, S, 8, dtype=torch.double)
        v = torch.randn(2, 2, S, 8, dtype=torch.double)
        mask = torch.rand(2, 1, 5, S) > 0.3
        mask[..., 0] = True
        for causal in (False, True):
            allowed = mask & torch.ones(5, S, dtype=torch.bool).tril(S - 5) if causal else mask
            ours = file.subject.forward(None, q, k, v, attention_mask=mask, causal=causal)
            theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
            far = apart(ours, theirs)
            assert S > 16 or far < 1e-9
            worst = max(worst, far)
    return worst


for number in range(1, 21):
    prove = globals()[f"p{number:02d}"]
    wrong, right = prove(load(number, "wrong")), prove(load(number, "right"))
    good = right < 1e-9 and wrong > 1e-2
    print(f"{number:02d}", "ok" if good else "NOT PROVED", f"(right {right:.1e}, wrong {wrong:.1e})")
