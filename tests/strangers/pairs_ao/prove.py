"""For each pair: the right one has the defining relation, the wrong one has not. Plain torch."""

import copy
import importlib.util
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = dict(
    d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32, num_classes=3, dropout=0.0
)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(m, **sizes):
    torch.manual_seed(0)
    c = SimpleNamespace(**{**C, **sizes})
    c.d_head = c.d_model // c.num_heads
    model = m.subject.build(c)
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
        for p in model.parameters():  # nothing at its initial one or zero
            p.data.add_(0.1 * torch.randn_like(p))
    return model


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(a, b, tol=1e-9):
    return a.shape == b.shape and torch.allclose(a, b, rtol=tol, atol=tol)


def attention(q, k, v, allowed, cap=None):
    G = q.shape[1] // k.shape[1]
    k, v = (torch.stack([t[:, h // G] for h in range(q.shape[1])], 1) for t in (k, v))
    s = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    if cap:
        s = cap * torch.tanh(s / cap)
    w = s.masked_fill(~allowed, -1e300).softmax(-1) * allowed
    return w @ v


def p01(m):
    good = True
    for shape, dim in [((3, 5), -1), ((2, 50), -1), ((37, 4), 0), ((2, 40, 3), 1), ((2, 2, 17, 33), -2)]:
        x = (rand(*shape) * 5).requires_grad_()
        x.data.view(-1)[::7] = -math.inf
        g = rand(*shape)
        y, z = m.subject.forward(None, x, dim), x.softmax(dim)
        good &= close(y, z) and close(*(torch.autograd.grad((t * g).sum(), x)[0] for t in (y, z)))
    good &= bool(m.subject.forward(None, torch.full((2, 20), -math.inf)).isnan().all())
    return good and bool(torch.autograd.gradcheck(lambda t: m.subject.forward(None, t), rand(2, 40).requires_grad_()))


def kernel(m, alignment, cap=None):
    good = True
    for T, S, H, G, K, E in [(5, 5, 2, 2, 4, 4), (40, 40, 4, 2, 5, 3), (129, 129, 2, 1, 8, 8), (7, 70, 2, 2, 4, 6), (70, 9, 2, 2, 4, 4)]:
        for causal in (False, True):
            for masked in (False, True):
                q, k, v = (t.requires_grad_() for t in (rand(2, H, T, K) * 2, rand(2, G, S, K), rand(2, G, S, E)))
                mask = torch.rand(2, 1, T, S) < 0.7 if masked else None
                if masked:
                    mask[0, 0, 2] = False
                allowed = torch.ones(2, 1, T, S, dtype=torch.bool)
                if causal:
                    shift = S - T if alignment == "bottom-right" else 0
                    allowed &= torch.arange(S)[None] <= torch.arange(T)[:, None] + shift
                if masked:
                    allowed &= mask
                a = m.subject.forward(None, q, k, v, mask, causal)
                b = attention(q, k, v, allowed.expand(2, H, T, S), cap)
                g = rand(*a.shape)
                good &= close(a, b)
                for x, y in zip(torch.autograd.grad((a * g).sum(), (q, k, v)), torch.autograd.grad((b * g).sum(), (q, k, v))):
                    good &= close(x, y)
    half = [rand(1, 2, 20, 8).half() for _ in range(3)]
    return good and m.subject.forward(None, *half).dtype == torch.float16


def p02(m):
    return kernel(m, "top-left")


def p03(m):
    return kernel(m, "bottom-right", cap=10.0)


def p04(m):
    model, good = build(m), True
    for T in (1, 3, 4, 5, 8, 11):
        x = rand(3, T, 8)
        keep = torch.ones(3, T, dtype=torch.bool)
        keep[1, : T // 2] = False
        keep[2] = torch.rand(T) < 0.6
        for mask in (None, keep):
            i = torch.arange(T)
            allowed = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 4)
            allowed = allowed[None, None] & (keep if mask is not None else torch.ones_like(keep))[:, None, None]
            q, k, v = (t.view(3, T, 2, 4).transpose(1, 2) for t in F.linear(x, model.qkv.weight).split(8, -1))
            want = attention(q, k, v, allowed.expand(3, 2, T, T)).transpose(1, 2).reshape(3, T, 8) @ model.out.weight.T
            good &= close(m.subject.forward(model, x, mask), want)
    return good


def p05(m):
    model = build(m)
    x, memory = rand(2, 5, 8), rand(2, 7, 8)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0, 0]]).bool()
    loud = memory.masked_fill(~mask[..., None], 1000.0)
    got = m.subject.forward(model, x, loud, mask)
    good = torch.isfinite(got).all()
    for b in range(2):
        good &= close(got[b : b + 1], m.subject.forward(model, x[b : b + 1], memory[b : b + 1, mask[b]]))
    q, k, v = (torch.einsum("btd,dhk->bhtk", a, w) for a, w in ((x, model.wq), (memory, model.wk), (memory, model.wv)))
    want = torch.einsum("bhtk,hkd->btd", F.scaled_dot_product_attention(q, k, v), model.wo)
    good &= close(m.subject.forward(model, x, memory), want)
    return bool(good & (m.subject.forward(model, x, memory, torch.zeros(2, 7).bool()) == 0).all())


def p06(m):
    good = True
    for lengths in ((5, 8), (9, 16, 40), (30,), (8, 9, 17, 100, 3)):
        model = m.subject.build(SimpleNamespace(**C)).double()
        for n in lengths:
            want = torch.tensor([[f(t / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)] for t in range(n)])
            good &= close(m.subject.forward(model, n), want.double(), 1e-6)
    return good


def p07(m):
    model = build(m)
    x, positions = rand(2, 3, 6, 10), torch.tensor([0, 1, 2, 5, 9, 40])
    rate = 10000.0 ** (-torch.arange(5, dtype=torch.float64) / 5)
    turn = torch.polar(torch.ones(6, 5, dtype=torch.float64), positions[:, None] * rate)
    want = torch.view_as_real(torch.view_as_complex(x.view(2, 3, 6, 5, 2)) * turn).flatten(-2)
    before = x.clone()
    good = close(m.subject.forward(model, x, positions), want) and torch.equal(x, before)
    return good and torch.autograd.gradcheck(lambda t: m.subject.forward(model, t, positions), x.requires_grad_())


def p08(m):
    def bucket(d):  # of the paper's code, number by number
        n, at = 8, 8 if d > 0 else 0
        d = abs(d)
        if d < 4:
            return at + d
        return at + min(7, 4 + int(math.log(d / 4) / math.log(50 / 4) * 4))

    model = build(m, num_heads=3)
    good = True
    for T, S in ((1, 1), (7, 7), (90, 90), (5, 60), (60, 5)):
        want = torch.stack([torch.stack([model.table.weight[bucket(s - t)] for s in range(S)]) for t in range(T)])
        good &= close(m.subject.forward(model, T, S), want.permute(2, 0, 1))
    return good


def p09(m):
    model = build(m)
    x, g = (rand(3, 5, 8) * 3 + 1).requires_grad_(), rand(3, 5, 8)
    inputs = (x, model.weight, model.bias)
    a = m.subject.forward(model, x)
    b = F.layer_norm(x, (8,), model.weight, model.bias, 1e-5)
    good = close(a, b)
    for p, q in zip(torch.autograd.grad((a * g).sum(), inputs), torch.autograd.grad((b * g).sum(), inputs)):
        good &= close(p, q)
    return good


def p10(m):
    model = build(m)
    x = rand(3, 7, 8)
    probability = (x @ model.gate.weight.T).softmax(-1)
    best = probability.topk(2, -1).indices
    weight = probability * torch.zeros_like(probability).scatter(-1, best, 1.0)
    weight = weight / weight.sum(-1, keepdim=True)
    want = torch.zeros_like(x)
    for e in range(4):
        a, b = (x @ model.up[e].T).split(20, -1)
        want = want + weight[..., e : e + 1] * ((a * a.sigmoid() * b) @ model.down[e].T)
    one = torch.cat([m.subject.forward(model, x[b : b + 1]) for b in range(3)])
    got = m.subject.forward(model, x)
    return close(m.subject.router(model, x), weight) and close(got, want) and close(got, one)


def p11(m):
    def plain(model, x, mask=None):
        B, T, D = x.shape
        h = F.layer_norm(x, (D,), model.norm1.weight, model.norm1.bias)
        q, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in model.attn.qkv(h).split(D, -1))
        allowed = torch.ones(B, 2, T, T, dtype=torch.bool) if mask is None else mask[:, None, None].expand(B, 2, T, T)
        x = x + model.attn.proj(attention(q, k, v, allowed).transpose(1, 2).reshape(B, T, D))
        h = F.layer_norm(x, (D,), model.norm2.weight, model.norm2.bias)
        return x + model.mlp[2](F.gelu(model.mlp[0](h)))

    good = True
    x, mask = rand(2, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    for p in (0.0, 0.3):
        model = build(m, dropout=p)
        good &= close(m.subject.forward(model, x), plain(model, x))
        good &= close(m.subject.forward(model, x, mask), plain(model, x, mask))
    for q in model.mlp.parameters():
        q.data.zero_()
    branch = m.subject.forward(model, x[:1]) - x[:1]  # what attention gives, at evaluation
    model.train()
    torch.manual_seed(1)
    trained = m.subject.forward(model, x[:1].expand(20000, -1, -1)) - x[:1]
    size = trained.abs().sum((1, 2))
    good &= abs((size > 0).double().mean().item() - 0.7) < 0.02  # whole samples
    return good and bool(torch.allclose(trained.mean(0), branch[0], rtol=0.03, atol=1e-3))


def p12(m):
    model = build(m)
    tokens = torch.randint(0, 11, (3, 6))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()

    def plain(row):
        T = len(row)
        pos = [[f(t / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)] for t in range(T)]
        x = (model.embedding.weight[row] + torch.tensor(pos, dtype=torch.float64))[None]
        for b in model.blocks:
            q, k, v = (t.view(1, T, 2, 4).transpose(1, 2) for t in b.qkv(b.norm_1(x)).split(8, -1))
            x = x + b.out(attention(q, k, v, torch.ones(1, 2, T, T).bool()).transpose(1, 2).reshape(1, T, 8))
            x = x + b.down(F.gelu(b.up(b.norm_2(x))))
        return model.norm(x)[0]

    got, full = m.subject.forward(model, tokens, mask), m.subject.forward(model, tokens)
    return all(close(got[b, mask[b]], plain(tokens[b, mask[b]]), 1e-6) and close(full[b], plain(tokens[b]), 1e-6) for b in range(3))


def p13(m):
    good = True
    for heads, groups in ((2, 2), (4, 2), (4, 1)):
        model = build(m, d_model=16, num_heads=heads, num_key_value_heads=groups, num_layers=3)
        tokens = torch.randint(0, 11, (2, 9))
        whole = m.subject.forward(model, tokens)
        good &= model.lm_head.weight is model.embed_tokens.weight
        for sizes in ((9,), (5, 1, 1, 1, 1), (1,) * 9, (2, 4, 3)):
            good &= close(m.subject.cache(model, list(tokens.split(sizes, 1))), whole)
        # the textbook, with complex rotation
        x, w = model.embed_tokens.weight[tokens], 16 // heads
        turn = torch.polar(
            torch.ones(9, w // 2, dtype=torch.float64),
            torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(w // 2, dtype=torch.float64) * 2 / w),
        )

        def rotated(t):
            z = torch.complex(t[..., : w // 2], t[..., w // 2 :]) * turn
            return torch.cat([z.real, z.imag], -1)

        def rms(t, n):
            return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight

        for b in model.layers:
            h = rms(x, b.input_norm)
            q, k, v = ((h @ p.weight.T).view(2, 9, -1, w).transpose(1, 2) for p in (b.q_proj, b.k_proj, b.v_proj))
            y = attention(rotated(q), rotated(k), v, torch.ones(2, heads, 9, 9).bool().tril())
            x = x + y.transpose(1, 2).reshape(2, 9, 16) @ b.o_proj.weight.T
            h = rms(x, b.post_norm)
            a = h @ b.gate_proj.weight.T
            x = x + (a * a.sigmoid() * (h @ b.up_proj.weight.T)) @ b.down_proj.weight.T
        good &= close(rms(x, model.norm) @ model.embed_tokens.weight.T, whole, 1e-6)
    return good


def p14(m):
    model = build(m)
    good, S, T = True, 5, 4
    mask, target_mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]).bool(), torch.tensor([[1] * 4, [1, 1, 0, 0]]).bool()

    def mha(a, x, y, allowed):
        q, k, v = (f(t).view(*t.shape[:2], 2, 4).transpose(1, 2) for f, t in ((a.q, x), (a.k, y), (a.v, y)))
        return a.o(attention(q, k, v, allowed.expand(2, 2, x.shape[1], y.shape[1])).transpose(1, 2).reshape(*x.shape))

    def embed(table, tokens):
        pos = [[f(t / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)] for t in range(tokens.shape[1])]
        return table.weight[tokens] * 8**0.5 + torch.tensor(pos, dtype=torch.float64)

    def plain(source, target, sm, tm):
        x, y = embed(model.source, source), embed(model.target, target)
        for b in model.encoder:
            x = b.norm_1(x + mha(b.attention, x, x, sm[:, None, None]))
            x = b.norm_2(x + b.ffn[2](b.ffn[0](x).clamp(min=0)))
        causal = torch.ones(target.shape[1], target.shape[1]).bool().tril()
        for b in model.decoder:
            y = b.norm_1(y + mha(b.attention, y, y, tm[:, None, None] & causal))
            y = b.norm_2(y + mha(b.cross, y, x, sm[:, None, None]))
            y = b.norm_3(y + b.ffn[2](b.ffn[0](y).clamp(min=0)))
        return model.head(y)

    for _ in range(3):
        source, target = torch.randint(0, 11, (2, S)), torch.randint(0, 11, (2, T))
        got = m.subject.forward(model, source, target, mask, target_mask)
        good &= close(got, plain(source, target, mask, target_mask), 1e-6)
        whole = m.subject.forward(model, source, target)
        good &= close(whole, plain(source, target, torch.ones(2, S).bool(), torch.ones(2, T).bool()), 1e-6)
        for sizes in ((4,), (1, 1, 1, 1), (2, 1, 1)):
            good &= close(m.subject.cache(model, source, list(target.split(sizes, 1))), whole)
        good &= torch.equal(m.subject.generate(model, source, 8, True), m.subject.generate(model, source, 8, False))
    copy.deepcopy(model)
    return good


def p15(m):
    model = build(m)
    tokens = torch.randint(0, 11, (3, 6))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]).bool()
    got, good = m.subject.forward(model, tokens, mask), True
    for b in range(3):
        row = tokens[b, mask[b]]
        T = len(row)
        x = (model.wte.weight[row] + model.wpe.weight[:T])[None]
        for k in model.h:
            q, key, v = (t.view(1, T, 2, 4).transpose(1, 2) for t in k.c_attn(k.ln_1(x)).split(8, -1))
            x = x + k.c_proj(attention(q, key, v, torch.ones(1, 2, T, T).bool()).transpose(1, 2).reshape(1, T, 8))
            x = x + k.c_out(F.gelu(k.c_fc(k.ln_2(x))))
        good &= close(got[b], model.score(model.ln_f(x).max(1).values)[0])
        good &= close(got[b], m.subject.forward(model, row[None])[0])
    return good


def p16(m):
    logits, labels = (rand(3, 6, 11) * 3).requires_grad_(), torch.randint(0, 11, (3, 6))
    labels[0, 2:] = -100
    labels[2, 0] = -100
    on = labels != -100
    a = m.subject.forward(None, logits, labels)
    b = F.cross_entropy(logits[on], labels[on]) + 0.01 * torch.logsumexp(logits[on], -1).pow(2).mean()
    good = close(a, b) and close(*(torch.autograd.grad(t, logits)[0] for t in (a, b)))
    good &= torch.autograd.grad(m.subject.forward(None, logits, labels), logits)[0][~on].abs().max().item() == 0
    return good and m.subject.forward(None, logits, torch.full_like(labels, -100)).item() == 0


def p17(m):
    model = build(m, vocab_size=50)
    tokens = torch.randint(0, 50, (200, 500), generator=torch.Generator().manual_seed(3))
    before = tokens.clone()
    inputs, labels = m.subject.forward(model, tokens, 7)
    on, special = labels != -100, tokens < 4
    good = torch.equal(tokens, before) and torch.equal(inputs[~on], tokens[~on])  # what has no label is as it was
    good &= torch.equal(labels[on], tokens[on]) and not (on & special).any()
    share = on.sum().item() / (~special).sum().item()
    hidden = (inputs[on] == 3).double().mean().item()
    left = (inputs[on] == tokens[on]).double().mean().item()
    good &= abs(share - 0.15) < 0.005 and abs(hidden - 0.8) < 0.01 and abs(left - 0.1 - 0.1 / 46) < 0.01
    again, other = m.subject.forward(model, tokens, 7), m.subject.forward(model, tokens, 8)
    return bool(good and torch.equal(again[0], inputs) and torch.equal(again[1], labels) and not torch.equal(other[1], labels))


def p18(m):
    model = build(m)
    want = []
    for t in range(260):
        if t <= 20:
            want.append(6e-4 * t / 20)
        else:
            want.append(6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * min(1.0, (t - 20) / 180))) / 2)
    return all(abs(m.subject.forward(model, t) - w) < 1e-12 for t, w in enumerate(want))


def p19(m):
    model = build(m)
    groups = m.subject.forward(model)
    ids = Counter(id(p) for g in groups for p in g["params"])
    good = ids == Counter(id(p) for p in model.parameters())  # each once, none left out
    vectors = {id(p) for module in model.modules() if isinstance(module, torch.nn.LayerNorm) for p in module.parameters()}
    vectors |= {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    return good and all((id(p) in vectors) == (g["weight_decay"] == 0) for g in groups for p in g["params"])


def p20(m):
    texts = [*m.CORPUS, "naïve café — 東京 🙂\n\n\tdef f(x):  return x  ", "aaaa aaa aaaaaaa aa"]
    good = True
    for size in (256, 270, 330):
        model = m.subject.train(texts, size)
        good &= len(m.subject.vocabulary(model)) == size
        # learnt anew, each step from the whole text
        words = [w for text in texts for w in m.subject.words(model, text)]
        for pair in m.subject.merges(model):
            counts = Counter(p for w in words for p in zip(w, w[1:]))
            good &= counts[pair] == max(counts.values())
            words = [apply(w, pair) for w in words]
        for text in [*texts, "", " ", "\n x\r\n", "\x00\x7f", "never seen wétter"]:
            ids = m.subject.forward(model, text)
            good &= m.subject.decode(model, ids) == text
            flat = []
            for w in m.subject.words(model, text):
                for pair in m.subject.merges(model):  # each rule in its turn
                    w = apply(w, pair)
                flat += [m.subject.vocabulary(model)[s] for s in w]
            good &= flat == ids
    return good


def apply(word, pair):
    joined = "\x01" + "".join(symbol + "\x01" for symbol in word)
    (a, b) = map(re.escape, pair)
    return re.sub(f"(?<=\x01){a}\x01{b}(?=\x01)", lambda _: pair[0] + pair[1], joined).strip("\x01").split("\x01")


def main():
    for number in range(1, 21):
        (right,), (wrong,) = (list(HERE.glob(f"{number:02d}_*_{which}.py")) for which in ("right", "wrong"))
        verdicts = []
        for path in (right, wrong):
            torch.manual_seed(number)
            verdicts.append(bool(globals()[f"p{number:02d}"](load(path))))
        print(f"{number:02d}", "ok" if verdicts == [True, False] else f"NOT OK {verdicts}", right.stem.removesuffix("_right"), flush=True)


if __name__ == "__main__":
    main()
