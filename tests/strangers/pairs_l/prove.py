"""Shows for each pair, in plain torch, that the right one holds the fact in question and the wrong one does not.

Of veriformer only the records Subject and DrawnConfig are used (the files are made of them), none of its checks.
Run: python prove.py [numbers]. Each proof returns an error: 0 up to rounding for the right one, large for the wrong one.
"""

import importlib.util
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
CONFIG = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32)
PROOFS = {}


def proof(number):
    def keep(function):
        PROOFS[number] = function
        return function

    return keep


def make(subject, seed=0, train=False, config=CONFIG):
    torch.manual_seed(seed)
    model = subject.build(config).double()
    with torch.no_grad():  # away from the initial values, so that nothing is symmetric by chance
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train(train)


def ids(*shape, seed=1, high=11):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    return (a - b).abs().max().item()


def prefix_gap(call, tokens):
    """Outputs of every prefix against those of the whole."""
    whole = call(tokens)
    return max(gap(call(tokens[:, :t]), whole[:, :t]) for t in range(1, tokens.shape[1]))


def padded_gap(call, tokens, length, side="right"):
    """A sequence alone, and the same one with padding of two contents hidden by the mask."""
    alone, worst = call(tokens[:, :length], None), 0.0
    for content in (0, 7):
        fill = torch.full((tokens.shape[0], 3), content)
        real, hidden = torch.ones(tokens.shape[0], length), torch.zeros(tokens.shape[0], 3)
        if side == "right":
            out = call(torch.cat([tokens[:, :length], fill], 1), torch.cat([real, hidden], 1).bool())
            out = out[:, :length] if out.dim() == 3 else out
        else:
            out = call(torch.cat([fill, tokens[:, :length]], 1), torch.cat([hidden, real], 1).bool())
            out = out[:, 3:] if out.dim() == 3 else out
        worst = max(worst, gap(out, alone))
    return worst


@proof(1)
def cached(s):
    """Chunks 3 + 1 + 4 against the whole; the whole is causal (prefixes)."""
    m, t = make(s), ids(2, 8)
    base = prefix_gap(lambda x: s.forward(m, x), t)
    one_by_one = gap(s.cache(m, list(t.split(1, 1))), s.forward(m, t))
    return max(base, one_by_one, gap(s.cache(m, list(t.split([3, 1, 4], 1))), s.forward(m, t)))


@proof(2)
def no_mask_is_all_true(s):
    m, t = make(s), ids(2, 6)
    padded = max(padded_gap(lambda x, k: s.forward(m, x, torch.ones_like(x).bool() if k is None else k), t, 6, side)
                 for side in ("right", "left"))
    return max(padded, gap(s.forward(m, t), s.forward(m, t, torch.ones_like(t).bool())))


def turned(x):
    """RoFormer's rotation with complex numbers, pairs (i, i + d/2), over axis -2."""
    n, d = x.shape[-2:]
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :])
    angle = torch.arange(n)[:, None] * 10000.0 ** (-2 * torch.arange(d // 2).double() / d)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


@proof(3)
def palm_twin(s):
    """All tokens equal: every value is equal, so every output is the same at every position. And an independent forward."""
    m, t = make(s), ids(2, 7)
    out = s.forward(m, torch.full((1, 7), 3))
    x = m.emb.weight[t]
    for b in m.net:
        y = F.layer_norm(x, (16,), b.norm.gamma) @ b.fused.weight.T
        q, k, v, gate, up = y[..., :16], y[..., 16:20], y[..., 20:24], y[..., 24:44], y[..., 44:]
        q = torch.stack([turned(q[..., 4 * h : 4 * h + 4]) for h in range(4)], 1)
        a = F.scaled_dot_product_attention(q, turned(k)[:, None].expand_as(q), v[:, None].expand_as(q), is_causal=True)
        x = x + b.attn_out(torch.cat(list(a.unbind(1)), -1)) + b.ff_out(F.silu(gate) * up)
    twin = gap(F.layer_norm(x, (16,), m.norm.gamma) @ m.emb.weight.T, s.forward(m, t))
    return max(twin, gap(out, out[:, :1].expand_as(out)), prefix_gap(lambda z: s.forward(m, z), t))


@proof(4)
def alibi_twin(s):
    """Against an independent forward with slopes from the paper: for 4 heads 1/4, 1/16, 1/64, 1/256."""
    m, t = make(s), ids(2, 7)
    x, T = m.embed.weight[t], 7
    for b in m.blocks:
        y = F.layer_norm(x, (16,), b.attention_norm.weight, b.attention_norm.bias)
        q, k, v = (y @ b.attention.in_proj.weight.T + b.attention.in_proj.bias).chunk(3, -1)
        heads = []
        for h, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
            c = slice(4 * h, 4 * h + 4)
            sc = q[..., c] @ k[..., c].mT / 2
            for i in range(T):
                for j in range(T):
                    sc[:, i, j] += -slope * (i - j) if j <= i else -torch.inf
            heads.append(sc.softmax(-1) @ v[..., c])
        x = x + b.attention.out_proj(torch.cat(heads, -1))
        x = x + b.ffn(b.ffn_norm(x))
    return gap(m.norm(x) @ m.embed.weight.T, s.forward(m, t))


@proof(5)
def xl(s):
    """Prefixes, the recurrence by segments, and one layer's attention by the formula with explicit distances."""
    m, t = make(s), ids(2, 8)
    a = m.layers[0].attn
    w = normal(1, 5, 16)
    q, (k, v) = a.q_net(w)[0], a.kv_net(w)[0].chunk(2, -1)
    heads = []
    for h in range(4):
        c = slice(4 * h, 4 * h + 4)
        sc = torch.full((5, 5), -math.inf, dtype=torch.float64)
        for i in range(5):
            for j in range(i + 1):
                r = torch.tensor([f((i - j) / 10000 ** (n / 16)) for f in (math.sin, math.cos) for n in range(0, 16, 2)], dtype=torch.float64)
                rk = a.r_net(r)[c]
                sc[i, j] = ((q[i, c] + a.u[h, 0]) @ k[j, c] + (q[i, c] + a.v[h, 0]) @ rk) / 2
        heads.append(sc.softmax(-1) @ v[:, c])
    expected = a.norm(w[0] + a.o_net(torch.cat(heads, -1)))
    r5 = {}
    m.layers[0].register_forward_pre_hook(lambda mod, args: r5.__setitem__("r", args[1]))
    m(ids(1, 5))
    formula = gap(a(w, r5["r"], None)[0], expected)
    return max(formula, prefix_gap(lambda x: s.forward(m, x), t), gap(s.cache(m, list(t.split([3, 5], 1))), s.forward(m, t)))


@proof(6)
def batch(s):
    m, x = make(s), normal(3, 5, 16)
    return max(gap(s.forward(m, x)[i : i + 1], s.forward(m, x[i : i + 1])) for i in range(3))


@proof(7)
def source_padding(s):
    m, t, src = make(s), ids(2, 5, seed=2), ids(2, 6)
    keep = torch.cat([torch.ones(2, 6), torch.zeros(2, 3)], 1).bool()
    padded = lambda c: s.forward(m, torch.cat([src, torch.full((2, 3), c)], 1), t, keep, None)
    causal = prefix_gap(lambda x: s.forward(m, src, x), t)
    return max(causal, *(gap(padded(c), s.forward(m, src, t)) for c in (0, 7)))


@proof(8)
def reorder(s):
    m, t = make(s), ids(3, 7)
    order = torch.tensor([2, 0, 0])
    went_on = torch.cat([t[order, :4], t[:, 4:]], 1)  # sample b goes on as order[b] began
    out = s.cache(m, [t[:, :4], t[:, 4:6], t[:, 6:]], reorder=order)
    plain = gap(s.cache(m, list(t.split(2, 1))), s.forward(m, t))
    return max(plain, gap(out[:, 4:], s.forward(m, went_on)[:, 4:]), prefix_gap(lambda x: s.forward(m, x), t))


@proof(9)
def causal_with_mask(s):
    m, src, t = make(s), ids(2, 4), ids(2, 6, seed=3)
    keep = torch.ones_like(t).bool()
    keep[1, 4:] = False
    call = lambda x: s.forward(m, src, x, None, keep[:, : x.shape[1]])
    whole = call(t)
    real = max(gap(call(t[:, :n])[0], whole[0, :n]) for n in range(1, 6))
    none = prefix_gap(lambda x: s.forward(m, src, x), t)
    pad = max(gap(s.forward(m, torch.cat([src, torch.full((2, 2), c)], 1), t, torch.cat([torch.ones(2, 4), torch.zeros(2, 2)], 1).bool()), s.forward(m, src, t)) for c in (0, 5))
    table = torch.tensor([[f(p / 10000 ** (i / 16)) for i in range(0, 16, 2) for f in (math.sin, math.cos)] for p in range(6)])
    e = m.tgt_embed
    embed = gap(e(t), e.lut.weight[t] * 4 + table.double())
    return max(real, none, pad, 0 if embed < 1e-6 else embed)


@proof(10)
def encoder_gradient(s):
    m = make(s)
    src, t = ids(2, 5), ids(2, 4, seed=3)
    s.forward(m, src, t).square().sum().backward()
    def plain_bucket(r, two):  # of Raffel et al., in plain arithmetic; r = key - query
        n, half, start = (abs(r), 16, 16 * (r > 0)) if two else (max(-r, 0), 32, 0)
        e = half // 2
        return start + (n if n < e else min(half - 1, e + int(math.log(n / e) / math.log(128 / e) * e)))

    from_file = s.forward.__globals__["bucket"]
    far = torch.arange(-200, 201)
    buckets = max(gap(from_file(far, two), torch.tensor([plain_bucket(r.item(), two) for r in far])) for two in (True, False))
    missing = sum(p.grad is None or p.grad.abs().max() == 0 for p in m.encoder.parameters())
    causal = prefix_gap(lambda x: s.forward(m, src, x), t)
    pad = max(gap(s.forward(m, torch.cat([src, torch.full((2, 2), c)], 1), t, torch.cat([torch.ones(2, 5), torch.zeros(2, 2)], 1).bool()), s.forward(m, src, t)) for c in (0, 5))
    return max(float(missing), float(buckets), causal, pad)


@proof(11)
def one_parameter(s):
    torch.manual_seed(0)
    m = s.build(CONFIG)
    named = [n for n, _ in m.named_parameters()]
    t = ids(2, 6)
    same = m.lm_head.weight is m.transformer.wte.weight
    m.double()
    cast = gap(m.lm_head.weight, m.transformer.wte.weight)
    torch.optim.SGD(m.parameters(), 1.0)
    opt = torch.optim.SGD(m.parameters(), 0.5)
    s.loss(m, t, ids(2, 6, seed=4)).backward()
    opt.step()
    after = gap(m.lm_head.weight, m.transformer.wte.weight)  # untied by cast and step
    return max(float(not same), cast, after, prefix_gap(lambda x: s.forward(m, x), t), float("lm_head.weight" in named))


@proof(12)
def evaluated_twice(s):
    m, t = make(s, config=DrawnConfig(d_model=16, num_heads=4, dropout=0.1)), ids(2, 6)
    twice = max(gap(s.forward(m, t), s.forward(m, t)) for _ in range(5))
    return max(twice, padded_gap(lambda x, k: s.forward(m, x, k), t, 6))


@proof(13)
def max_padding(s):
    m = make(s)
    return max(padded_gap(lambda x, k: s.forward(m, x, k), ids(4, n, seed=n), n) for n in (1, 2, 6))


@proof(14)
def cap_causal(s):
    m, t = make(s), ids(2, 7)
    norm = lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w.weight)
    x = 4 * m.embedder.weight[t]
    for b in m.layers:
        y, a, heads = norm(x, b.input_layernorm), b.self_attn, []
        for h in range(4):
            c, g = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
            q, k, v = turned(a.q_proj(y)[..., c]), turned(a.k_proj(y)[..., g]), a.v_proj(y)[..., g]
            sc = 5 * torch.tanh(q @ k.mT / 2 / 5)
            e = sc.exp() * torch.ones(7, 7).tril()
            heads.append(e / e.sum(-1, keepdim=True) @ v)
        x = x + a.o_proj(torch.cat(heads, -1))
        y = norm(x, b.pre_ff_layernorm)
        x = x + b.down_proj(F.gelu(b.gate_proj(y), approximate="tanh") * b.up_proj(y))
    twin = gap(norm(x, m.norm) @ m.embedder.weight.T, s.forward(m, t))
    return max(twin, prefix_gap(lambda z: s.forward(m, z), t))


@proof(15)
def own_layers(s):
    m = make(s)
    one = sum(p.numel() for p in m.layer[0].parameters())
    every = sum(p.numel() for p in m.layer.parameters())
    return max(float(every != 2 * one), padded_gap(lambda x, k: s.forward(m, x, k), ids(2, 6), 6))


@proof(16)
def dist_token(s):
    m, x = make(s), normal(2, 5, 16)
    alone = s.forward(m, x)
    keep = torch.cat([torch.ones(2, 5), torch.zeros(2, 3)], 1).bool()
    return max(gap(s.forward(m, torch.cat([x, normal(2, 3, 16, seed=n)], 1), keep), alone) for n in (5, 6))


@proof(17)
def local_causal(s):
    """Prefixes, and the pattern: t sees its own block up to t and the block before, one layer."""
    m, t = make(s), ids(2, 11)
    a = m.layers[0].attn
    x = normal(1, 11, 16)
    q, k, v = (z.view(11, 4, 4).transpose(0, 1) for z in a.qkv(x)[0].chunk(3, -1))
    see = torch.tensor([[j <= i and j // 4 >= i // 4 - 1 for j in range(11)] for i in range(11)])
    y = ((q @ k.mT / 2).masked_fill(~see, -math.inf).softmax(-1) @ v).transpose(0, 1).reshape(11, 16)
    return max(gap(a(x)[0], a.out(y)), prefix_gap(lambda z: s.forward(m, z), t))


@proof(18)
def tiles(s):
    worst = 0.0
    for S in (5, 16, 40):
        q, k, v = 2 * normal(2, 3, 7, 8), 2 * normal(2, 3, S, 8, seed=2), normal(2, 3, S, 5, seed=3)
        mask = normal(7, S, seed=4) > -0.5
        expected = (q @ k.mT / 8**0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v
        worst = max(worst, gap(s.forward(None, q, k, v, mask), expected))
    return worst


@proof(19)
def cross(s):
    """Each query for itself: output t with all queries equals output with query t alone; against a loop over heads."""
    m, x, mem = make(s), normal(2, 5, 16), normal(2, 6, 16, seed=2)
    whole = s.forward(m, x, mem)
    alone = max(gap(s.forward(m, x[:, t : t + 1], mem), whole[:, t : t + 1]) for t in range(5))
    q, k, v = m.query(x), m.key(mem), m.value(mem)
    loop = torch.cat([(q[..., c] @ k[..., c].mT / 2).softmax(-1) @ v[..., c] for c in (slice(i, i + 4) for i in range(0, 16, 4))], -1)
    return max(alone, gap(whole, m.out(loop)))


@proof(20)
def window(s):
    """Gradient of output t with respect to inputs outside t-2..t is 0, inside it is not."""
    m, x = make(s), normal(1, 7, 16).requires_grad_()
    worst = 0.0
    for t in range(7):
        (g,) = torch.autograd.grad(s.forward(m, x)[0, t].square().sum(), x)
        seen = g[0].abs().amax(-1)
        for j in range(7):
            if not t - 2 <= j <= t:
                worst = max(worst, seen[j].item())
            elif seen[j] == 0:
                worst = math.inf
    return worst


@proof(21)
def rotary(s):
    m, x = s.build(CONFIG), normal(1, 2, 5, 8)
    p = torch.arange(5)
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4).double(), p[:, None] * 10000.0 ** (-torch.arange(4).double() / 4))
    y = s.forward(m, x, p)
    return max(gap(y, torch.cat([z.real, z.imag], -1)), gap(y.norm(dim=-1), x.norm(dim=-1)))


@proof(22)
def t5_buckets(s):
    """Bucket 0, 1, 2 ... of distances 0, 1, 2 ... into the past, by the table in plain arithmetic."""
    m = make(s)
    table, bias, worst = m.relative_attention_bias.weight, s.forward(m, 300, 300), 0.0
    for d in range(300):
        b = d if d < 16 else min(31, 16 + int(math.log(d / 16) / math.log(8) * 16))
        worst = max(worst, gap(bias[:, 299, 299 - d], table[b]))
    return worst


@proof(23)
def sinusoid(s):
    pe = s.forward(s.build(CONFIG), 40)
    return gap(pe.double(), torch.tensor([[f(p / 10000 ** (i / 16)) for i in range(0, 16, 2) for f in (math.sin, math.cos)] for p in range(40)]).double()) // 1e-6


@proof(24)
def own_mask(s):
    m, x = make(s), normal(3, 5, 16)
    mask = (normal(3, 5, 5, seed=2) > -0.3) | torch.eye(5).bool()
    out = s.forward(m, x, mask)
    own = max(gap(out[i : i + 1], s.forward(m, x[i : i + 1], mask[i : i + 1])) for i in range(3))
    q, k, v = (z.view(3, 5, 4, 4).transpose(1, 2) for z in m.in_proj(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    return max(own, gap(out, m.out_proj(y.transpose(1, 2).flatten(2))))


@proof(25)
def identity_path(s):
    """With silent sublayers a pre-norm layer gives back its input; against the formula otherwise."""
    m, x = make(s), 3 * normal(2, 5, 16) + 1
    y = x + m.attn(m.norm1(x))
    formula = gap(s.forward(m, x), y + m.mlp(m.norm2(y)))
    for linear in (m.attn.o, m.mlp[2]):
        torch.nn.init.zeros_(linear.weight), torch.nn.init.zeros_(linear.bias)
    return max(formula, gap(s.forward(m, x), x))


@proof(26)
def rms(s):
    m, x = s.build(CONFIG).double(), normal(3, 5, 16)
    return gap(s.forward(m, x), x / x.square().mean(-1, keepdim=True).sqrt())


@proof(27)
def mixture(s):
    m, x = make(s), normal(2, 5, 16)
    w = s.router(m, x)
    assert ((w > 0).sum(-1) == 2).all() and gap(w.sum(-1), torch.ones(2, 5)) < 1e-12
    return gap(s.forward(m, x), sum(w[..., e : e + 1] * m.experts[e](x) for e in range(4)))


@proof(28)
def z_loss(s):
    """c is 1e-4: the gap is counted in that."""
    x, y = 3 * normal(2, 5, 11) + 2, ids(2, 5)
    y[1, 3:] = -100
    rows = y != -100
    expected = (F.cross_entropy(x[rows], y[rows]) + 1e-4 * x[rows].logsumexp(-1).square().mean())
    x.requires_grad_()
    (g,) = torch.autograd.grad(s.forward(None, x, y), x)
    (h,) = torch.autograd.grad(F.cross_entropy(x[rows], y[rows]) + 1e-4 * x[rows].logsumexp(-1).square().mean(), x)
    return max(gap(s.forward(None, x, y), expected), gap(g, h)) / 1e-4


@proof(29)
def mlm(s):
    m = s.build(DrawnConfig(vocab_size=1000))
    t = ids(64, 1000, high=1000)
    inputs, labels = s.forward(m, t, 5)
    n, chosen = (t > 4).sum().item(), labels != -100
    assert (labels[chosen] == t[chosen]).all() and (t[chosen] > 4).all()
    share = chosen.sum().item() / n
    unpredicted = ((inputs != t) & ~chosen).sum().item()  # replaced and yet without a label
    masked = (inputs == 4)[chosen].float().mean().item()
    return max(0, abs(share - 0.15) - 0.006, abs(masked - 0.8) - 0.02, unpredicted / 1e3)


@proof(30)
def cosine(s):
    r = [s.forward(None, n) for n in range(260)]
    expected = lambda n: 3e-5 + 2.7e-4 * (1 + math.cos(math.pi * min((n - 20) / 180, 1.0))) / 2
    rising = all(a < b for a, b in zip(r[:20], r[1:21]))
    return max(max(abs(r[n] - expected(n)) for n in range(20, 260)) / 3e-4, 0.0 if rising and abs(max(r) - 3e-4) < 1e-12 else 1.0)


def load(path):
    spec = importlib.util.spec_from_file_location("pair_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    chosen, bad = [int(n) for n in sys.argv[1:]], 0
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        number = int(path.name[:2])
        if chosen and number not in chosen:
            continue
        pair = load(path)
        assert pair.right.declares == pair.wrong.declares and pair.right.kind == pair.wrong.kind and pair.right.domain == pair.wrong.domain
        assert pair.WHAT and pair.CAUSE
        right, wrong = PROOFS[number](pair.right), PROOFS[number](pair.wrong)
        holds = right < 1e-9 and wrong > 1e-3
        bad += not holds
        print(f"{'ok ' if holds else 'BAD'} {path.stem:28} right {right:9.1e}  wrong {wrong:9.1e}", flush=True)
    print(f"{bad} do not hold up")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
