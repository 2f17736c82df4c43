"""For every pair: the right file agrees with an independent reference (or the defining relation), the wrong one does not."""
import importlib.util
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
CONFIG = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(number, which):
    path = next(HERE.glob(f"{number}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def make(module, jitter=True):
    """The model in float64, in eval mode, all parameters moved away from 0 and 1."""
    torch.manual_seed(0)
    model = module.subject.build(CONFIG)
    if not isinstance(model, nn.Module):
        return model
    model = model.double().eval()
    if jitter:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return model


def close(a, b, tol=1e-5):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=tol)


def tokens(b, t, seed=1):
    return torch.randint(2, 11, (b, t), generator=torch.Generator().manual_seed(seed))


def rotate(x, positions):  # independent: complex numbers
    half = x.shape[-1] // 2
    turn = torch.polar(torch.ones(len(positions), half).double(),
                       positions.double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half))
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def heads(x, h):
    b, t, _ = x.shape
    return x.view(b, t, h, -1).transpose(1, 2)


def unheads(x):
    return x.transpose(1, 2).flatten(2)


def causal(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def rms(x, w, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def p01(m):
    model, ids = make(m), tokens(2, 7)
    whole = m.subject.forward(model, ids)
    return all(close(m.subject.cache(model, list(ids.split(s, 1))), whole) for s in ([7], [1] * 7, [2, 3, 2]))


def p02(m):
    model, ids = make(m), tokens(2, 12)
    table = []  # Raffel et al.: half the buckets exact, the rest logarithmic up to max_distance
    for d in range(12):
        b = d if d < 4 else min(7, 4 + int(math.log(d / 4) / math.log(20 / 4) * 4))
        table.append(b)
    bias = torch.full((2, 12, 12), -math.inf).double()
    for i in range(12):
        for j in range(i + 1):
            bias[:, i, j] = model.relative_bias.table.weight[table[i - j]]
    x = model.embed_tokens(ids)
    for blk in model.block:
        y = rms(x, blk.attention_norm.weight, 1e-6)
        a = blk.attention
        w = (heads(a.q(y), 2) @ heads(a.k(y), 2).mT + bias).softmax(-1)
        x = x + a.o(unheads(w @ heads(a.v(y), 2)))
        x = x + blk.wo(blk.wi(rms(x, blk.ff_norm.weight, 1e-6)).relu())
    return close(model.lm_head(rms(x, model.final_layer_norm.weight, 1e-6)), m.subject.forward(model, ids))


def p03(m):  # torch.nn's own pre-LN decoder layer with the same weights
    model = make(m)
    mine = model.decoder[0]
    other = nn.TransformerDecoderLayer(8, 2, 20, 0.0, batch_first=True, norm_first=True).double().eval()
    with torch.no_grad():
        for to, frm in ((other.self_attn, mine.attn), (other.multihead_attn, mine.src_attn)):
            to.in_proj_weight.copy_(torch.cat([l.weight for l in frm.linears[:3]]))
            to.in_proj_bias.copy_(torch.cat([l.bias for l in frm.linears[:3]]))
            to.out_proj.load_state_dict(frm.linears[3].state_dict())
        for to, frm in ((other.linear1, mine.ff.w_1), (other.linear2, mine.ff.w_2), (other.norm1, mine.norm_attn),
                        (other.norm2, mine.norm_src), (other.norm3, mine.norm_ff)):
            to.load_state_dict(frm.state_dict())
    x, mem = torch.randn(2, 5, 8).double(), torch.randn(2, 4, 8).double()
    pad = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    want = other(x, mem, tgt_mask=~causal(5), memory_key_padding_mask=~pad)
    whole = m.subject.forward(model, tokens(2, 4), tokens(2, 5), pad, None)  # it runs as a whole
    return close(mine(x, mem, pad[:, None], causal(5)[None]), want) and bool(whole.isfinite().all())


def padding_exact(m):
    """A padded sample gives what it gives alone and unpadded, whatever stands in the padding."""
    model, ids = make(m), tokens(3, 6)
    mask = torch.arange(6)[None] < torch.tensor([6, 4, 2])[:, None]
    got = m.subject.forward(model, ids, mask)
    alone = [m.subject.forward(model, ids[i : i + 1, :n]) for i, n in enumerate((6, 4, 2))]
    return close(got, torch.cat(alone))


def p06(m):
    model, ids = make(m), tokens(2, 6)
    labels = ids.clone()
    labels[1, 4:] = -100
    logp = m.subject.forward(model, ids).log_softmax(-1)
    terms = [-logp[b, t, labels[b, t + 1]] for b in range(2) for t in range(5) if labels[b, t + 1] != -100]
    return close(m.subject.loss(model, ids, labels), torch.stack(terms).mean())


def p07(m):
    model = make(m)
    p, x = model.params, torch.randn(3, 5, 8).double()
    other = nn.TransformerEncoderLayer(8, 2, 20, 0.0, activation="gelu", batch_first=True).double()
    with torch.no_grad():
        other.self_attn.in_proj_weight.copy_(torch.cat([p["wq"].T, p["wk"].T, p["wv"].T]))
        other.self_attn.in_proj_bias.zero_()
        for to, w, b in ((other.self_attn.out_proj, p["wo"].T, p["bo"]), (other.linear1, p["w1"].T, p["b1"]),
                         (other.linear2, p["w2"].T, p["b2"]), (other.norm1, p["g1"], p["h1"]),
                         (other.norm2, p["g2"], p["h2"])):
            to.weight.copy_(w), to.bias.copy_(b)
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 1])[:, None]
    real = mask[..., None]
    same = close(m.subject.forward(model, x), other(x))
    padded = close(m.subject.forward(model, x, mask) * real, other(x, src_key_padding_mask=~mask) * real)
    return same and padded


def p08(m):
    model, ids = make(m), tokens(2, 6)
    x = model.tok_embeddings(ids)
    at = torch.arange(6)
    for l in model.layers:
        y, a, f = rms(x, l.attention_norm.weight, 1e-5), l.attention, l.feed_forward
        q, k, v = rotate(heads(a.wq(y), 2), at), rotate(heads(a.wk(y), 1), at), heads(a.wv(y), 1)
        w = (q @ k.mT / 2.0).masked_fill(~causal(6), -math.inf).softmax(-1)  # d_head 4
        x = x + a.wo(unheads(w @ v))
        y = rms(x, l.ffn_norm.weight, 1e-5)
        g = f.w1(y)
        x = x + f.w2(g * g.sigmoid() * f.w3(y))
    return close(model.output(rms(x, model.norm.weight, 1e-5)), m.subject.forward(model, ids))


def p09(m):
    model, ids = make(m), tokens(3, 6)
    pe = torch.zeros(6, 8).double()
    for pos in range(6):
        for i in range(4):
            a = pos / 10000 ** (2 * i / 8)
            pe[pos, 2 * i], pe[pos, 2 * i + 1] = math.sin(a), math.cos(a)
    want = model.linear(model.transformer_encoder(model.embedding(ids) * math.sqrt(8) + pe))
    alone = torch.cat([m.subject.forward(model, row[None]) for row in ids])
    got = m.subject.forward(model, ids)
    return close(got, want, 1e-4) and close(got, alone)


def p10(m):
    model, ids = make(m), tokens(2, 6)
    x = model.token_embedding_table(ids) + model.position_embedding_table.weight[:6]
    for b in model.blocks:
        y = b.ln1(x)
        outs = [F.scaled_dot_product_attention(h.query(y), h.key(y), h.value(y), is_causal=True) for h in b.sa.heads]
        x = x + b.sa.proj(torch.cat(outs, -1))
        x = x + b.ffwd(b.ln2(x))
    return close(model.lm_head(model.ln_f(x)), m.subject.forward(model, ids))


def p11(m):
    model = make(m, jitter=False)
    # a post-LN layer of the paper: 4 d^2 + 4 d of attention, 2 d f + d + f of the network, two norms of 2 d each
    d, f = 8, 20
    count = sum(p.numel() for p in model.layer[0].parameters()) == 4 * d * d + 4 * d + 2 * d * f + d + f + 4 * d
    # and the gain of the first norm does not touch the second one
    layer, x = model.layer[0], torch.randn(2, 5, d).double()
    second = layer.after_output.norm
    before = second(x)
    with torch.no_grad():
        layer.after_attention.norm.weight.mul_(1.5)
    return count and close(second(x), before) and padding_encoder(m)


def padding_encoder(m):
    model, ids = make(m), tokens(2, 6)
    mask = torch.arange(6)[None] < torch.tensor([6, 4])[:, None]
    got = m.subject.forward(model, ids, mask)
    return close(got[1:, :4], m.subject.forward(model, ids[1:, :4]))


def p12(m):
    model, x = make(m), 1.0 + torch.randn(2, 5, 8).double()
    l, a, f = model, model.attn, model.ff
    norm = nn.RMSNorm(8, eps=1e-6).double()
    norm.weight = l.attn_norm.gamma
    y = norm(x)
    q, (k, v) = heads(a.to_q(y), 2), (heads(t, 1) for t in a.to_kv(y).chunk(2, -1))
    w = (q @ k.mT / 2.0).masked_fill(~causal(5), -math.inf).softmax(-1)
    h = x + a.to_out(unheads(w @ v))
    norm.weight = l.ff_norm.gamma
    gate, up = f.proj_in(norm(h)).chunk(2, -1)
    return close(h + f.proj_out(F.silu(gate) * up), m.subject.forward(model, x))


def p13(m):
    model, src, tgt = make(m), tokens(2, 6), tokens(2, 5, 2)
    mask = torch.arange(6)[None] < torch.tensor([6, 4])[:, None]
    got = m.subject.forward(model, src, tgt, mask, None)
    alone = m.subject.forward(model, src[1:, :4], tgt[1:])
    future = m.subject.forward(model, src, tgt[:, :3], mask, None)
    return close(got[1:], alone) and close(got[:, :3], future)


def p14(m):
    model, ids = make(m), tokens(2, 5)
    good = True
    for temperature, k in ((1.0, None), (0.5, None), (2.0, 3)):
        torch.manual_seed(3)
        out, drawn = m.subject.sampling(model, ids, 4, temperature=temperature, top_k=k)
        drawn = drawn / drawn.sum(-1, keepdim=True)
        for s in range(4):
            logits = m.subject.forward(model, out[:, : 5 + s])[:, -1]
            p = (logits / temperature).exp()
            if k is not None:
                p = p * (logits >= logits.topk(k).values[:, -1:])
            good &= close(drawn[:, s], p / p.sum(-1, keepdim=True))
    return good


def p15(m):
    model = make(m)
    x, mem = torch.randn(2, 3, 8).double(), torch.randn(2, 5, 8).double()
    mask = torch.arange(5)[None] < torch.tensor([5, 2])[:, None]
    got, plain = m.subject.forward(model, x, mem, mask), m.subject.forward(model, x, mem)
    other = nn.MultiheadAttention(8, 2, batch_first=True).double()
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([model.to_q.weight, model.to_k.weight, model.to_v.weight]))
        other.in_proj_bias.zero_()
        other.out_proj.load_state_dict(model.to_out.state_dict())
    return close(plain, other(x, mem, mem)[0]) and close(got, other(x, mem, mem, key_padding_mask=~mask)[0])


def p16(m):
    model, x = make(m), torch.randn(2, 6, 8).double()
    want = torch.zeros_like(x)
    for b in range(2):
        for t in range(6):
            scores = model.gate(x[b, t])
            best = scores.argsort(descending=True)[:2]
            share = scores[best].softmax(0)  # of the two alone: as dividing by their sum
            for s, e in zip(share, best):
                want[b, t] += s * model.experts[int(e)](x[b, t])
    mixed = (m.subject.router(model, x)[..., None] * torch.stack([e(x) for e in model.experts], 2)).sum(2)
    got = m.subject.forward(model, x)
    return close(got, want) and close(got, mixed)


def p17(m):
    class Wide:
        vocab_size = 5000

    model = m.subject.build(Wide)
    ids = torch.randint(2, 5000, (100, 1000), generator=torch.Generator().manual_seed(0))
    inputs, labels = m.subject.forward(model, ids, 5)
    chosen = labels != -100
    masked = chosen & (inputs == 1)
    changed = chosen & (inputs != ids) & ~masked
    n = chosen.sum().item()
    shares = n / ids.numel(), masked.sum().item() / n, changed.sum().item() / n
    kept = torch.equal(inputs[~chosen], ids[~chosen]) and torch.equal(labels[chosen], ids[chosen])
    return kept and all(abs(a - b) < 0.015 for a, b in zip(shares, (0.15, 0.8, 0.1)))


def p18(m):
    model, logits = make(m), torch.randn(3, 5, 7).double()
    labels = torch.randint(0, 7, (3, 5))
    full = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    a = close(m.subject.forward(model, logits, labels), full)
    labels[1, 3:] = labels[2, 1:] = -100
    part = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    return a and close(m.subject.forward(model, logits, labels), part)


def p19(m):
    x, g = torch.randn(2, 3, 5).double().requires_grad_(), torch.randn(2, 3, 5).double()
    y = m.subject.forward(None, x)
    ok = close(y, torch.softmax(x, -1))
    return ok and close(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(torch.softmax(x, -1), x, g)[0])


def p20(m):
    good = True
    for h, g in ((6, 2), (4, 2), (3, 3), (4, 1)):
        q, k, v = torch.randn(2, h, 5, 4).double(), torch.randn(2, g, 7, 4).double(), torch.randn(2, g, 7, 3).double()
        mask = torch.rand(2, 1, 5, 7) > 0.3
        mask[..., 0] = True
        for kind in (False, True):
            allowed = mask & (torch.ones(5, 7, dtype=torch.bool).tril(2) if kind else True)
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
            good &= close(m.subject.forward(None, q, k, v, mask, kind), want)
    return good


PROOFS = {"01": p01, "02": p02, "03": p03, "04": padding_exact, "05": padding_exact, "06": p06, "07": p07, "08": p08,
          "09": p09, "10": p10, "11": p11, "12": p12, "13": p13, "14": p14, "15": p15, "16": p16, "17": p17, "18": p18,
          "19": p19, "20": p20}

if __name__ == "__main__":
    bad = 0
    for number, proof in PROOFS.items():
        torch.manual_seed(0)
        right = bool(proof(load(number, "right")))
        torch.manual_seed(0)
        wrong = bool(proof(load(number, "wrong")))
        bad += not (right and not wrong)
        print(number, "ok" if right and not wrong else f"NOT OK: right {right}, wrong {wrong}")
    sys.exit(bool(bad))
