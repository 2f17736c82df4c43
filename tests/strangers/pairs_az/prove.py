"""Shows in plain torch, for each pair, that the wrong file is wrong and the right one right."""

import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(path):
    spec = importlib.util.spec_from_file_location("m" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made(mod, **sizes):
    torch.manual_seed(0)
    return mod.subject.build(DrawnConfig(**sizes)), mod.subject


def close(a, b, tol=1e-4):
    return bool(torch.allclose(a, b, atol=tol, rtol=tol))


def ids(*shape, seed=1, low=0, vocab=11):
    return torch.randint(low, vocab, shape, generator=torch.Generator().manual_seed(seed))


def stir(model, seed=3):
    """Away from initial gains and biases."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g).to(p.dtype))
    return model


def p01(mod):
    m, s = made(mod, num_heads=2, num_key_value_heads=1)
    x = ids(2, 11)
    full = s.forward(m, x)
    # the window by definition: one layer's output depends on the last 4 inputs alone, two layers' on 7
    y = x.clone()
    y[:, 0] = (y[:, 0] + 1) % 11
    assert close(s.forward(m, y)[:, 7:], full[:, 7:]) and not close(s.forward(m, y)[:, :7], full[:, :7])
    single = s.cache(m, list(x.split(1, 1)))
    assert close(single, full)
    return close(s.cache(m, [x[:, :5], x[:, 5:8], x[:, 8:]]), full)


def p02(mod):
    m, s = made(mod)
    stir(m)
    x, mask = ids(3, 8), torch.ones(3, 8, dtype=torch.bool)
    mask[0, :3] = False
    mask[2, :1] = False
    order = torch.tensor([1, 0, 0])
    assert close(s.cache(m, [x[:, :5], x[:, 5:]], mask)[mask], s.forward(m, x, mask)[mask])
    got = s.cache(m, [x[:, :5], x[:, 5:7], x[:, 7:]], mask, order)
    joined, joined_mask = torch.cat([x[order, :5], x[:, 5:]], 1), torch.cat([mask[order, :5], mask[:, 5:]], 1)
    return close(got[:, 5:], s.forward(m, joined, joined_mask)[:, 5:])


def p03(mod):
    m, s = made(mod)
    stir(m)
    x = ids(3, 4)
    out, drawn = s.sampling(m, x, 3, temperature=0.4, top_k=5)
    good = True
    for i in range(3):
        logits = m(out[:, : 4 + i])[:, -1].detach()
        keep = logits.argsort(-1, descending=True)[:, :5]
        want = torch.zeros_like(logits).scatter(1, keep, (logits.gather(1, keep) / 0.4).softmax(-1))
        good &= close(drawn[:, i] / drawn[:, i].sum(-1, keepdim=True), want)
    return good


def p04(mod):
    m, s = made(mod, num_layers=1)
    x = ids(2, 9)
    full = s.forward(m, x)
    seen = torch.zeros(9, 9, dtype=torch.bool)
    for j in range(9):
        y = x.clone()
        y[:, j] = (y[:, j] + 1) % 11
        seen[:, j] = (s.forward(m, y) - full).abs().amax((0, 2)) > 1e-6
    want = torch.tensor([[j <= i and (i - j < 3 or j < 2) for j in range(9)] for i in range(9)])
    return bool((seen == want).all())


def p05(mod):
    m, _ = made(mod, d_model=64, d_ff=200, num_layers=8)
    small, plain = 0.02 / math.sqrt(16), 0.02
    good = True
    for name, module in m.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            residual = name.endswith("attn.c_proj") or name.endswith("mlp.fc2")
            good &= abs(module.weight.std().item() / (small if residual else plain) - 1) < 0.15
    return good


def p06(mod):
    m, s = made(mod)
    x, mask = ids(2, 6), torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    y = x.clone()
    y[0, 4:] = (y[0, 4:] + 1) % 11
    m.eval()
    assert close(s.forward(m, x, mask)[mask], s.forward(m, y, mask)[mask], 1e-5)
    evaluated = s.forward(m, x, mask)[mask]
    m.train()
    trained, other = s.forward(m, x, mask)[mask], s.forward(m, y, mask)[mask]
    return close(trained, other, 1e-5) and close(trained, evaluated, 1e-5)


def p07(mod):
    m, s = made(mod)
    x, labels = ids(3, 6), ids(3, 6, seed=2)
    labels[0, 1:] = -100
    labels[1, 4:] = -100
    want = F.cross_entropy(s.forward(m, x).flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert s.loss(m, x, torch.full_like(labels, -100)).item() == 0
    return close(s.loss(m, x, labels), want, 1e-5)


def p08(mod):
    m, s = made(mod)
    stir(m)
    source, target = ids(2, 5), ids(2, 4, seed=2)

    def by_hand():
        def attend(a, q, kv, mask):
            h = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (a.w_q(q), a.w_k(kv), a.w_v(kv))]
            return a.w_o(F.scaled_dot_product_attention(*h, is_causal=mask).transpose(1, 2).flatten(2))

        def run(layer, x, memory):
            sub = [(layer.norm_1, lambda h: attend(layer.attn_1, h, h, True))]
            sub += [(layer.norm_2, lambda h: attend(layer.attn_2, h, memory, False)), (layer.norm_3, layer.ff)]
            for norm, f in sub:
                x = x + f(norm(x))
            return x

        e = m.src_embed(source) + m.src_pos.weight[:5]
        for layer in m.encoder:
            h = layer.norm_1(e)
            e = e + attend(layer.attn, h, h, False)
            e = e + layer.ff(layer.norm_2(e))
        memory = m.encoder_norm(e)
        x = m.trg_embed(target) + m.trg_pos.weight[:4]
        for layer in m.decoder:
            x = run(layer, x, memory)
        return m.out(m.decoder_norm(x))

    return close(s.forward(m, source, target), by_hand())


def p09(mod):
    m, s = made(mod)
    source, target = ids(2, 5), ids(2, 4, seed=2)
    one = m.output_projection.weight is m.embed_tokens.weight
    m = m.double()
    optimizer = torch.optim.Adam(m.parameters(), lr=1e-2)
    s.forward(m, source, target).logsumexp(-1).sum().backward()
    optimizer.step()
    return one and torch.equal(m.output_projection.weight, m.embed_tokens.weight)


def p10(mod):
    m, s = made(mod)
    a, b, target = ids(2, 5), ids(2, 5, seed=5), ids(2, 6, seed=2)
    chunks = [target[:, :2], target[:, 2:3], target[:, 3:]]
    assert close(s.cache(m, a, chunks), s.forward(m, a, target))
    return close(s.cache(m, b, chunks), s.forward(m, b, target))


def p11(mod):
    m, s = made(mod)
    x = ids(2, 5)
    want = s.forward(m, x)
    mask = torch.tensor([[False] * 3 + [True] * 5] * 2)
    right = s.forward(m, torch.cat([x, ids(2, 3, seed=4)], 1), mask.flip(1))
    assert close(right, want)
    return close(s.forward(m, torch.cat([ids(2, 3, seed=4), x], 1), mask), want)


def p12(mod):
    m, s = made(mod, dropout=0.3)
    m.eval()
    x = ids(2, 6)
    torch.manual_seed(1)
    first = s.forward(m, x)
    plain, _ = made(mod, dropout=0.0)
    plain.load_state_dict(m.state_dict())
    return close(first, s.forward(m, x), 1e-6) and close(first, s.forward(plain.eval(), x), 1e-6)


def p13(mod):
    m, s = made(mod)
    text = "the cat sat on the newest mat, é!"
    first = list(s.forward(m, text))
    return s.forward(m, text) == first and s.decode(m, s.forward(m, text)) == text == s.decode(m, first)


def p14(mod):
    m, s = made(mod, vocab_size=50)
    x = ids(64, 64, vocab=50)
    inputs, labels = s.forward(m, x, 0)
    special = x < 4
    hidden = labels != -100
    assert abs(hidden[~special].float().mean().item() - 0.15) < 0.02 and torch.equal(labels[hidden], x[hidden])
    return torch.equal(inputs[~hidden], x[~hidden]) and torch.equal(inputs[special], x[special])


def p15(mod):
    m, s = made(mod)
    d = s.declares
    good = True
    for step in range(260):
        w, t = d["warmup_steps"], d["total_steps"]
        if step < w:
            want = d["peak"] * step / w
        else:
            share = min(1.0, (step - w) / (t - w))
            want = d["floor"] + (d["peak"] - d["floor"]) * (1 + math.cos(math.pi * share)) / 2
        good &= abs(s.forward(m, step) - want) < 1e-12
    return good


def p16(mod):
    m, s = made(mod)
    groups = s.forward(m)
    times = Counter(id(p) for g in groups for p in g["params"])
    decayed = {id(p) for g in groups for p in g["params"] if g["weight_decay"] > 0}
    assert all(dict(m.named_parameters())[n].dim() == 2 for n, p in m.named_parameters() if id(p) in decayed)
    return all(times[id(p)] == 1 for p in m.parameters())


def p17(mod):
    m, s = made(mod)
    m = m.double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    reference = lambda: F.layer_norm(x, (8,), m.weight, m.bias, m.eps)  # noqa: E731
    up = torch.randn(2, 3, 8, dtype=torch.float64)

    def same():
        wrt = [x, m.weight, m.bias]
        a, b = torch.autograd.grad(s.forward(m, x), wrt, up), torch.autograd.grad(reference(), wrt, up)
        return close(s.forward(m, x), reference(), 1e-10) and all(close(p, q, 1e-8) for p, q in zip(a, b))

    assert same()  # gains of one
    stir(m)
    return same()


def p18(mod):
    s, good = mod.subject, True
    for T, S in ((5, 5), (40, 40), (20, 57), (33, 18)):
        q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (T, S, S))
        mask = torch.rand(2, 1, T, S) < 0.8
        seen = mask & torch.ones(T, S, dtype=torch.bool).tril(S - T)
        w = (q @ k.transpose(-1, -2) / 2).masked_fill(~seen, -1e30).softmax(-1) * seen
        assert close(s.forward(None, q, k, v), (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v, 1e-9)
        good &= close(s.forward(None, q, k, v, attention_mask=mask, causal=True), w @ v, 1e-9)
    return good


def p19(mod):
    m, s = made(mod)
    x = torch.randn(2, 5, 8)
    weights = s.router(m, x)
    assert close(weights.sum(-1), torch.ones(2, 5)) and bool(((weights > 0).sum(-1) == 2).all())
    want = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(m.experts))
    return close(s.forward(m, x), want, 1e-5)


def p20(mod):
    m, s = made(mod)

    def bucket(relative):  # key minus query, as in T5's own code
        n, base = 4, 4 if relative > 0 else 0
        d = abs(relative)
        if d < 2:
            return base + d
        return base + min(2 + int(math.log(d / 2) / math.log(10 / 2) * 2), n - 1)

    table = m.relative_attention_bias.weight
    want = torch.stack([torch.stack([table[bucket(j - i)] for j in range(26)]) for i in range(26)]).permute(2, 0, 1)
    return close(s.forward(m, 26, 26), want, 1e-6)


if __name__ == "__main__":
    bad = 0
    for path in sorted(HERE.glob("*_right.py")):
        number = path.name[:2]
        test = globals()[f"p{number}"]
        right = test(load(path))
        other = load(path.with_name(path.name.replace("_right", "_wrong")))
        wrong = test(other)
        ok = right and not wrong and other.WHAT
        bad += not ok
        print(number, "ok" if ok else f"NOT OK: right {right}, wrong {wrong}", flush=True)
    sys.exit(bad > 0)
