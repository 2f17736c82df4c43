"""For each pair: the right file agrees with an independent reference, the wrong one does not. No veriformer is asked."""

import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

sys.dont_write_bytecode = True
torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = SimpleNamespace(
    d_model=8, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=50, max_len=32, num_classes=3,
    dropout=0.3, d_head=4,
)  # fmt: skip


def load(number, which):
    path = next(HERE.glob(f"{number:02d}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def near(a, b):
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5))


def sdpa(q, k, v, mask=None):
    r = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(r, 1).mT / q.shape[-1] ** 0.5
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    return s.softmax(-1).nan_to_num() @ v.repeat_interleave(r, 1)


def draw(T=9, S=21, H=4, G=2):
    return torch.randn(2, H, T, 8), torch.randn(2, G, S, 8), torch.randn(2, G, S, 6)


def p01(m):
    f = m.subject.forward
    q, k, v = draw()
    mask = torch.rand(2, 1, 9, 21) < 0.6
    assert near(f(None, q, k, v, mask), sdpa(q, k, v, mask))
    assert near(f(None, q, k, v, causal=True), sdpa(q, k, v, torch.ones(9, 21).tril(12).bool()))
    whole = draw(5, 32)  # no tail: both are right
    assert near(f(None, *whole), sdpa(*whole))
    return near(f(None, q, k, v), sdpa(q, k, v))


def p02(m):
    f = m.subject.forward
    q, k, v = draw()
    mask = torch.rand(2, 1, 9, 21) < 0.6
    mask[0, :, 3] = False
    causal = torch.ones(9, 21).tril().bool()
    return all(
        near(f(None, q, k, v, a, c), sdpa(q, k, v, b))
        for a, c, b in ((None, False, None), (mask, False, mask), (mask, True, mask & causal))
    )


def p03(m):
    q, k, v = (t.double().requires_grad_() for t in draw())
    mask = torch.rand(2, 1, 9, 21) < 0.6
    out, ref = m.subject.forward(None, q, k, v, mask), sdpa(q, k, v, mask)
    assert near(out, ref)
    g = torch.randn_like(out)
    return all(near(a, b) for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(ref, (q, k, v), g)))


def p04(m):
    model = m.subject.build(SIZES)
    x = torch.randn(2, 11, 8)
    pad = torch.ones(2, 11).bool()
    pad[0, 8:] = False
    q, k, v = (w(x).view(2, 11, 2, 4).transpose(1, 2) for w in (model.q_proj, model.k_proj, model.v_proj))
    s = (q @ k.mT / 2).masked_fill(~(torch.ones(11, 11).tril().bool() & pad[:, None, None]), -math.inf)
    s = torch.cat([s, model.sinks.view(1, 2, 1, 1).expand(2, 2, 11, 1)], -1)
    ref = model.o_proj((s.softmax(-1)[..., :-1] @ v).transpose(1, 2).reshape(2, 11, 8))
    return near(m.subject.forward(model, x, pad), ref)


def p05(m):
    model = m.subject.build(SIZES)
    x = torch.randn(2, 5, 8)
    model.eval()
    a = model.self_attention
    # in evaluation: textbook
    h = model.input_layernorm(x)
    q, k, v = a.query_key_value(h).view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
    y = x + nn.functional.linear(sdpa(q, k, v).transpose(1, 2).reshape(2, 5, 8), a.dense.weight, a.dense.bias)
    z = F.gelu(F.linear(model.post_attention_layernorm(y), model.dense_h_to_4h.weight, model.dense_h_to_4h.bias))
    assert near(model(x), y + F.linear(z, model.dense_4h_to_h.weight, model.dense_4h_to_h.bias))
    # in training, sublayers that give nothing leave the stream alone, whatever is dropped
    for layer in (a.dense, model.dense_4h_to_h):
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    model.train()
    return near(model(x), x)


def p06(m):
    model = m.subject.build(SIZES)
    tokens = torch.randint(50, (3, 12))
    assert near(m.subject.cache(model, tokens.split([3, 1, 5, 3], 1)), model(tokens))
    order = [1, 1, 0]
    joined = torch.cat([tokens[order, :6], tokens[:, 6:]], 1)
    got = m.subject.cache(model, [tokens[:, :6], tokens[:, 6:7], tokens[:, 7:]], reorder=order)
    assert near(got[:, :6], model(tokens[:, :6]))
    return near(got[:, 6:], model(joined)[:, 6:])


def p07(m):
    model = m.subject.build(SimpleNamespace(d_model=16, num_heads=1))
    x, positions = torch.randn(1, 1, 7, 16), torch.arange(7)
    z = torch.complex(x[..., :2], x[..., 2:4]) * torch.exp(1j * positions[:, None] * torch.tensor([1.0, 10000**-0.5]))
    return near(m.subject.forward(model, x, positions), torch.cat([z.real, z.imag, x[..., 4:]], -1))


def p08(m):
    model = m.subject.build(SIZES)
    x = torch.randn(2, 7, 8)

    def turn(t):
        z = torch.view_as_complex(t.reshape(*t.shape[:-1], 2, 2))
        return torch.view_as_real(z * torch.exp(1j * torch.arange(7)[:, None] * torch.tensor([1.0, 0.01]))).flatten(-2)

    q, k, v = (w(x).view(2, 7, -1, 4).transpose(1, 2) for w in (model.wq, model.wk, model.wv))
    ref = model.wo(sdpa(turn(q), turn(k), v, torch.ones(7, 7).tril().bool()).transpose(1, 2).reshape(2, 7, 8))
    return near(m.subject.forward(model, x), ref)


def p09(m):
    """Buckets by the formula of T5's paper code, one number at a time."""
    model = m.subject.build(SIZES)

    def bucket(rel, half=8, exact=4, far=32):
        n = abs(rel)
        b = n if n < exact else min(half - 1, exact + math.floor(math.log(n / exact) / math.log(far / exact) * (half - exact) + 1e-12))
        return b + (half if rel > 0 else 0)

    table = model.relative_attention_bias.weight
    ref = torch.stack([torch.stack([table[bucket(j - i)] for j in range(45)]) for i in range(40)]).permute(2, 0, 1)
    out = m.subject.forward(model, 40, 45)
    saturates = min(d for d in range(1, 40) if torch.equal(out[:, 39, 39 - d], out[:, 39, 0]))
    return near(out, ref) and saturates < 32 and not torch.equal(out[:, 39, 39 - 16], out[:, 39, 0])


def p10(m):
    model = m.subject.build(SIZES)
    x = torch.randn(2, 6, 8)
    norm = lambda t, w: F.rms_norm(t, (8,), w, 1e-6)  # noqa: E731
    q, k, v = (t.view(2, 6, 2, 4).transpose(1, 2) for t in model.qkv(norm(x, model.norm1)).split(8, -1))
    y = x + model.proj(sdpa(q, k, v, torch.ones(6, 6).tril().bool()).transpose(1, 2).reshape(2, 6, 8))
    gate, up = model.gate_up(norm(y, model.norm2)).split(20, -1)
    return near(m.subject.forward(model, x), y + model.down(F.silu(gate) * up))


def p11(m):
    torch.manual_seed(1)
    model = m.subject.build(SIZES)
    tokens = torch.randint(50, (2, 8))
    pad = torch.ones(2, 8).bool()
    pad[0, 4:] = False
    first = m.subject.forward(model, tokens)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 50
    seen = (m.subject.forward(model, changed) - first).abs().amax(-1) > 1e-6
    assert seen[:, :5].all() and not seen[:, 5:].any()  # two layers of window 3
    assert near(m.subject.forward(model, tokens, pad)[0, :4], m.subject.forward(model, tokens[:1, :4])[0])
    return near(m.subject.forward(model, tokens), first)


def p12(m):
    model = m.subject.build(SIZES)
    x = torch.randn(2, 6, 8)
    top, chosen = model.wg(x).softmax(-1).topk(2, -1)
    top = top / top.sum(-1, keepdim=True)
    ref = torch.zeros_like(x)
    for b in range(2):
        for t in range(6):
            for w, e in zip(top[b, t], chosen[b, t]):
                ref[b, t] += w * (F.gelu(x[b, t] @ model.w1[e]) @ model.w2[e])
    assert near(m.subject.router(model, x), torch.zeros(2, 6, 4).scatter(-1, chosen, top))
    return near(m.subject.forward(model, x), ref)


def losses(m, reference, scale=1.0):
    logits = torch.randn(3, 7, 11, requires_grad=True)
    labels = torch.randint(1, 11, (3, 7))
    hidden = m.subject.declares.get("ignore_index", -100)
    labels[0, 3:] = hidden
    labels[2, 1] = hidden
    got, ref = m.subject.forward(m.subject.build(SIZES) if m.subject.build else None, logits, labels), reference(logits, labels)
    (a,), (b,) = torch.autograd.grad(got * scale, logits), torch.autograd.grad(ref * scale, logits)
    empty = m.subject.forward(m.subject.build(SIZES) if m.subject.build else None, logits, torch.full_like(labels, hidden))
    return near(got, ref), near(a, b), float(empty.detach()) == 0


def p13(m):
    return all(losses(m, lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1)))


def p14(m):
    def reference(x, y):
        keep = y != -100
        return F.cross_entropy(x.flatten(0, 1), y.flatten()) + 1e-3 * x.logsumexp(-1)[keep].square().mean()

    return all(losses(m, reference))


def p15(m):
    reference = lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten())  # noqa: E731
    assert all(losses(m, reference))
    return all(losses(m, reference, 0.25))


def p16(m):
    model = m.subject.build(SIZES)
    tokens = torch.randint(4, 50, (200, 500))
    tokens[:, 0], tokens[:, -1] = 1, 2
    inputs, labels = m.subject.forward(model, tokens, 0)
    chosen = labels != -100
    assert abs(chosen[:, 1:-1].float().mean() - 0.15) < 0.005 and not chosen[:, 0].any() and not chosen[:, -1].any()
    assert torch.equal(labels[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
    hidden, same = (inputs == 3)[chosen].float().mean(), (inputs == tokens)[chosen].float().mean()
    assert abs(hidden - 0.8) < 0.02
    return bool(abs(same - (0.1 + 0.1 / 46)) < 0.01 and abs((1 - hidden - same) - 0.1 * 45 / 46) < 0.01)


def p17(m):
    rate = lambda s: m.subject.forward(None, s)  # noqa: E731
    ref = lambda s: 6e-4 * s / 20 if s < 20 else 6e-5 + 0.5 * (6e-4 - 6e-5) * (1 + math.cos(math.pi * min(1, (s - 20) / 180)))  # noqa: E731
    return all(math.isclose(rate(s), ref(s), rel_tol=1e-9) for s in range(260)) and max(map(rate, range(260))) <= 6e-4 * (1 + 1e-12)


def p18(m):
    model = m.subject.build(SIZES)
    groups = m.subject.forward(model)
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    return decayed == {id(p) for p in model.parameters() if p.ndim >= 2}


def p19(m):
    tok = m.subject.build(SIZES)
    for text in ("the newest tokens, naïve ☃  x\n", "", "lowlowlow"):
        assert m.subject.decode(tok, m.subject.forward(tok, text)) == text
    # the trainer that counts anew
    words = Counter(w for t in m.CORPUS for w in m.words_of(t))
    words = {w: (list(w), n) for w, n in words.items()}
    ok = len(tok.merges) == 44
    for pair in tok.merges:
        counts = Counter()
        for symbols, n in words.values():
            for p in zip(symbols, symbols[1:]):
                counts[p] += n
        ok = ok and counts[pair] == max(counts.values())
        words = {w: (m.merged(s, pair), n) for w, (s, n) in words.items()}
    return ok


def p20(m):
    tok = m.subject.build(SIZES)
    for text in ("the language ☃ of  the model", "", "xyz é"):
        assert m.subject.decode(tok, m.subject.forward(tok, text)) == text

    def best(word):
        if not word:
            return 0.0
        options = [tok.pieces[word[:i]] + best(word[i:]) for i in range(1, len(word) + 1) if word[:i] in tok.pieces]
        return max([*options, -14.0 * len(word[0].encode()) + best(word[1:])])

    scores = {tok.vocab[p]: s for p, s in tok.scores().items()}
    return all(
        math.isclose(sum(scores[i] for i in m.subject.forward(tok, w)), best(w), abs_tol=1e-9)
        for w in m.WORD.findall(m.CORPUS + " modelled ☃ languages")
    )


if __name__ == "__main__":
    for number in range(1, 21):
        proof = globals()[f"p{number:02d}"]
        verdicts = []
        for which in ("right", "wrong"):
            torch.manual_seed(0)
            verdicts.append(bool(proof(load(number, which))))
        assert load(number, "right").subject.declares == load(number, "wrong").subject.declares
        print(f"{number:02d}", "ok" if verdicts == [True, False] else f"NOT PROVED {verdicts}")
