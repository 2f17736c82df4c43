"""Proofs in plain torch: every model against a naive computation, and identities. No check of veriformer is run."""
import copy
import importlib.util
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
NAIVE = {}


def naive(name):
    return lambda f: NAIVE.setdefault(name, f)


def load(name):
    spec = importlib.util.spec_from_file_location("r6_" + name, HERE / f"{name}.py")
    m = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = m
    spec.loader.exec_module(m)
    return m


def shake(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            r = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
            p.copy_(r * (0.6 if p.dim() < 2 else 1.2 * p.shape[-1] ** -0.5) + (0.7 if p.dim() == 1 else 0.0))
    return model


# ---------------------------------------------------------------- the naive pieces
def sdp(q, k, v, see=lambda t, s: True, scale=None, bias=None, cap=None, sink=None):
    """[H,T,K], [H,S,K], [H,S,E] -> [H,T,E], one number after another."""
    H, T, K = q.shape
    scale = K**-0.5 if scale is None else scale
    out = torch.zeros(H, T, v.shape[-1], dtype=q.dtype)
    for h in range(H):
        for t in range(T):
            seen = [s for s in range(k.shape[1]) if see(t, s)]
            e = []
            for s in seen:
                z = float((q[h, t] * k[h, s]).sum()) * scale
                if bias is not None:
                    z += float(bias(h, t, s))
                if cap:
                    z = cap * math.tanh(z / cap)
                e.append(z)
            top = max(e + ([] if sink is None else [float(sink[h])]))
            w = [math.exp(z - top) for z in e]
            total = sum(w) + (0 if sink is None else math.exp(float(sink[h]) - top))
            for s, x in zip(seen, w):
                out[h, t] += x / total * v[h, s]
    return out


def ln(x, n=None, eps=1e-5, w=None, b=None):
    w, b, eps = (n.weight, n.bias, n.eps) if n is not None else (w, b, eps)
    m = x.sum(-1, keepdim=True) / x.shape[-1]
    return (x - m) / (((x - m) ** 2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * w + b


def rms(x, w=1.0, eps=1e-6):
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * w


def lin(x, l):
    y = x @ l.weight.T
    return y if l.bias is None else y + l.bias


def heads(x, h):  # [T,D] -> [H,T,K]
    return torch.stack([x[:, i * x.shape[1] // h : (i + 1) * x.shape[1] // h] for i in range(h)])


def merge(y):
    return torch.cat(list(y), -1)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelut(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def sinus(T, D, halves=False, places=None):
    out = torch.zeros(T, D, dtype=torch.float64)
    half = -(-D // 2)
    for r, t in enumerate(places or range(T)):
        for i in range(half):
            a = t / 10000 ** (2 * i / D)
            if halves:
                out[r, i] = math.sin(a)
                if half + i < D:
                    out[r, half + i] = math.cos(a)
            else:
                out[r, 2 * i] = math.sin(a)
                if 2 * i + 1 < D:
                    out[r, 2 * i + 1] = math.cos(a)
    return out


def rope(x, base=10000.0, halves=True, dim=None, sign=1, places=None):  # [H,T,K]
    y, K = x.clone(), dim or x.shape[-1]
    for t in range(x.shape[1]):
        for i in range(K // 2):
            p = t if places is None else float(places[t])
            a = sign * p * base ** (-2 * i / K)
            m, n = (i, i + K // 2) if halves else (2 * i, 2 * i + 1)
            y[:, t, m] = x[:, t, m] * math.cos(a) - x[:, t, n] * math.sin(a)
            y[:, t, n] = x[:, t, m] * math.sin(a) + x[:, t, n] * math.cos(a)
    return y


def causal(t, s):
    return s <= t


def repeat(k, H):
    return torch.stack([k[i * k.shape[0] // H] for i in range(H)])


def aslopes(n):
    p = 2 ** int(math.log2(n))
    first = [2 ** (-8 * (i + 1) / p) for i in range(p)]
    return first + [2 ** (-8 * (i + 1) / (2 * p)) for i in range(0, 2 * (n - p), 2)]


# ---------------------------------------------------------------- one naive computation a file
@naive("annotated_seq2seq")
def _(m, c, src, tgt):
    def mha(a, x, y, see):
        q, k, v, o = a.linears
        H = a.h
        return lin(merge(sdp(heads(lin(x, q), H), heads(lin(y, k), H), heads(lin(y, v), H), see)), o)

    def ff(f, x):
        return lin(lin(x, f.w_1).clamp(min=0), f.w_2)

    x = m.src_embed[0].lut.weight[src] * c.d_model**0.5 + sinus(len(src), c.d_model)
    for l in m.encoder.layers:
        y = ln(x, l.sublayer[0].norm)
        x = x + mha(l.self_attn, y, y, lambda t, s: True)
        x = x + ff(l.feed_forward, ln(x, l.sublayer[1].norm))
    mem = ln(x, m.encoder.norm)
    x = m.tgt_embed[0].lut.weight[tgt] * c.d_model**0.5 + sinus(len(tgt), c.d_model)
    for l in m.decoder.layers:
        y = ln(x, l.sublayer[0].norm)
        x = x + mha(l.self_attn, y, y, causal)
        x = x + mha(l.src_attn, ln(x, l.sublayer[1].norm), mem, lambda t, s: True)
        x = x + ff(l.feed_forward, ln(x, l.sublayer[2].norm))
    return lin(ln(x, m.decoder.norm), m.generator)


@naive("speedrun_gpt")
def _(m, c, ids):
    x, v1, H, D = rms(m.lm_head.weight[ids]), None, c.num_heads, c.d_model
    for b in m.transformer.h:
        w = b.attn.c_attn.weight
        y = rms(x)
        q, k, v = (heads(y @ w[i * D : (i + 1) * D].T, H) for i in range(3))
        v1 = v if v1 is None else v1
        v = (1 - b.attn.lamb) * v + b.attn.lamb * v1
        q, k = rope(rms(q), sign=-1), rope(rms(k), sign=-1)
        x = x + merge(sdp(q, k, v, causal)) @ b.attn.c_proj.weight.T
        x = x + (rms(x) @ b.mlp.c_fc.weight.T).clamp(min=0) ** 2 @ b.mlp.c_proj.weight.T
    return 30 * torch.tanh(rms(x) @ m.lm_head.weight.T / 30)


@naive("fairseq_encoder")
def _(m, c, ids):
    x = m.embed_tokens.weight[ids] * c.d_model**0.5
    x = x + torch.stack([m.embed_positions.weight[t + 2] for t in range(len(ids))])
    for l in m.layers:
        a = l.self_attn
        q, k, v = (heads(lin(x, p), c.num_heads) for p in (a.q_proj, a.k_proj, a.v_proj))
        x = ln(x + lin(merge(sdp(q, k, v)), a.out_proj), l.self_attn_layer_norm)
        x = ln(x + lin(lin(x, l.fc1).clamp(min=0), l.fc2), l.final_layer_norm)
    return x


@naive("einsum_llama")
def _(m, c, ids):
    x, H, D = m.tok_embeddings[ids], c.num_heads, c.d_model
    for l in m.layers:
        y = rms(x, l.attention_norm.weight, 1e-5)
        q = rope(heads(y @ l.wq.reshape(D, D), H), halves=False)
        k = repeat(rope(heads(y @ l.wk.reshape(D, -1), c.num_key_value_heads), halves=False), H)
        v = repeat(heads(y @ l.wv.reshape(D, -1), c.num_key_value_heads), H)
        x = x + merge(sdp(q, k, v, causal)) @ l.wo.reshape(D, D)
        y = rms(x, l.ffn_norm.weight, 1e-5)
        x = x + (silu(y @ l.w1) * (y @ l.w3)) @ l.w2
    return rms(x, m.norm.weight, 1e-5) @ m.output


@naive("dict_bert")
def _(m, c, ids):
    w = m.w
    L = lambda n, x: x @ w[n + "_w"].T + w[n + "_b"]
    N = lambda n, x: ln(x, eps=1e-12, w=w[n + "_g"], b=w[n + "_b"])
    x = N("embedding_norm", w["words"][ids] + w["places"][: len(ids)] + w["segments"][0])
    for i in range(c.num_layers):
        q, k, v = (heads(L(f"{i}_{n}", x), c.num_heads) for n in ("query", "key", "value"))
        x = N(f"{i}_norm1", x + L(f"{i}_out", merge(sdp(q, k, v))))
        x = N(f"{i}_norm2", x + L(f"{i}_down", gelu(L(f"{i}_up", x))))
    return x


@naive("microbatch_encoder")
def _(m, c, ids):
    x, H, K = m.emb.weight[ids] + sinus(len(ids), c.d_model), c.num_heads, c.d_model // c.num_heads
    for l in m.layers:
        z = rms(x, l.n1.g) @ l.qkv.weight.T
        q, k, v = (torch.stack([z[:, (3 * h + j) * K : (3 * h + j + 1) * K] for h in range(H)]) for j in range(3))
        x = x + lin(merge(sdp(q, k, v)), l.o)
        z = rms(x, l.n2.g) @ l.gate_up.weight.T
        x = x + lin(silu(z[:, : c.d_ff]) * z[:, c.d_ff :], l.down)
    return rms(x, m.norm.g)


@naive("reversible_gpt")
def _(m, c, ids):
    a = b = m.tok.weight[ids] + m.pos.weight[: len(ids)]
    K = c.d_model // c.num_heads
    for l in m.blocks:
        z = lin(ln(b, l.f.norm), l.f.in_proj)
        q, k, v = (
            torch.stack([z[:, (3 * h + j) * K : (3 * h + j + 1) * K] for h in range(c.num_heads)]) for j in range(3)
        )
        na = a + lin(merge(sdp(q, k, v, causal)), l.f.out_proj)
        nb = b + lin(gelut(lin(ln(na, l.g.net[0]), l.g.net[1])), l.g.net[3])
        back = l.inverse(na[None], nb[None], None)
        assert torch.allclose(back[0][0], a, atol=1e-9) and torch.allclose(back[1][0], b, atol=1e-9)
        a, b = na, nb
    return lin(ln((a + b) / 2, m.norm), m.head)


@naive("scripted_decoder")
def _(m, c, ids):
    x, H, D = m.emb.weight[ids], c.num_heads, c.d_model
    sl = aslopes(H)
    for b in m.blocks:
        y = ln(x, w=b.a.weight, b=b.a.bias)
        kv = lin(y, b.kv)
        q, k, v = heads(lin(y, b.q), H), heads(kv[:, :D], H), heads(kv[:, D:], H)
        x = x + lin(merge(sdp(q, k, v, causal, bias=lambda h, t, s: -sl[h] * (t - s))), b.o)
        x = x + lin(lin(ln(x, w=b.b.weight, b=b.b.bias), b.up).clamp(min=0), b.down)
    return lin(ln(x, m.norm), m.out)


@naive("bloom_decoder")
def _(m, c, ids):
    H, K = c.num_heads, c.d_model // c.num_heads
    x, sl = ln(m.word_embeddings.weight[ids], m.word_embeddings_layernorm), aslopes(H)
    for b in m.h:
        z = lin(ln(x, b.input_layernorm), b.self_attention.query_key_value)
        q, k, v = (torch.stack([z[:, (3 * h + j) * K : (3 * h + j + 1) * K] for h in range(H)]) for j in range(3))
        x = x + lin(merge(sdp(q, k, v, causal, bias=lambda h, t, s: -sl[h] * (t - s))), b.self_attention.dense)
        x = x + lin(gelut(lin(ln(x, b.post_attention_layernorm), b.dense_h_to_4h)), b.dense_4h_to_h)
    return ln(x, m.ln_f) @ m.word_embeddings.weight.T


@naive("t5_seq2seq")
def _(m, c, src, tgt):
    H = c.num_heads

    def bucket(rel, both, n=12, far=30):  # the authors' rule, written again for one number
        base = 0
        if both:
            n //= 2
            base = n if rel > 0 else 0
            d = abs(rel)
        else:
            d = max(-rel, 0)
        exact = n // 2
        if d < exact:
            return base + d
        return base + min(n - 1, exact + int(math.log(d / exact) / math.log(far / exact) * (n - exact)))

    def att(a, x, y, see, bias=None):
        q, k, v = heads(lin(x, a.q), H), heads(lin(y, a.k), H), heads(lin(y, a.v), H)
        return lin(merge(sdp(q, k, v, see, scale=1.0, bias=bias)), a.o)

    def stack(s, ids, mem=None):
        x = m.shared.weight[ids]
        see = causal if s.decoder else (lambda t, s: True)
        table = s.relative.weight
        for b in s.block:
            y = rms(x, b.norms[0].weight)
            x = x + att(b.attn, y, y, see, lambda h, t, u: table[bucket(u - t, not s.decoder), h])
            if mem is not None:
                x = x + att(b.cross, rms(x, b.norms[1].weight), mem, lambda t, s: True)
            x = x + lin(lin(rms(x, b.norms[-1].weight), b.wi).clamp(min=0), b.wo)
        return rms(x, s.final.weight)

    return stack(m.decoder, tgt, stack(m.encoder, src)) * c.d_model**-0.5 @ m.shared.weight.T


@naive("transformer_xl")
def _(m, c, ids):
    H, D, T = c.num_heads, c.d_model, len(ids)
    K = D // H
    x = m.word_emb.weight[ids] * D**0.5
    table = {d: sinus(1, D, halves=True, places=[d])[0] for d in range(T)}
    for l in m.layers:
        a = l.dec_attn
        w = a.qkv_net.weight
        q, k, v = (heads(x @ w[i * D : (i + 1) * D].T, H) for i in range(3))
        R = {d: (a.r_net.weight @ table[d]).view(H, K) for d in table}
        out = torch.zeros(H, T, K, dtype=x.dtype)
        for h in range(H):
            for t in range(T):
                e = torch.stack(
                    [
                        ((q[h, t] + m.r_w_bias[h]) @ k[h, s] + (q[h, t] + m.r_r_bias[h]) @ R[t - s][h]) / K**0.5
                        for s in range(t + 1)
                    ]
                )
                out[h, t] = e.softmax(0) @ v[h, : t + 1]
        x = ln(x + lin(merge(out), a.o_net), a.layer_norm)
        f = l.pos_ff
        x = ln(x + lin(lin(x, f.CoreNet[0]).clamp(min=0), f.CoreNet[2]), f.layer_norm)
    return lin(x, m.out_layer)


@naive("deberta_encoder")
def _(m, c, ids):
    H, K, T, S = c.num_heads, c.d_model // c.num_heads, len(ids), 6
    x, P = ln(m.embeddings.weight[ids], m.norm), m.rel_embeddings.weight

    def delta(i, j):
        d = i - j
        return 0 if d <= -S else 2 * S - 1 if d >= S else d + S

    for l in m.layer:
        a = l.attention
        z = x @ a.in_proj.weight.T
        q, k, v = (torch.stack([z[:, (3 * h + j) * K : (3 * h + j + 1) * K] for h in range(H)]) for j in range(3))
        q, v = q + a.q_bias.view(H, 1, K), v + a.v_bias.view(H, 1, K)
        pk, pq = heads(lin(P, a.pos_proj), H), heads(lin(P, a.pos_q_proj), H)
        out = torch.zeros(H, T, K, dtype=x.dtype)
        for h in range(H):
            for i in range(T):
                e = torch.stack(
                    [
                        q[h, i] @ k[h, j] + q[h, i] @ pk[h, delta(i, j)] + k[h, j] @ pq[h, delta(j, i)]
                        for j in range(T)
                    ]
                ) / math.sqrt(3 * K)
                out[h, i] = e.softmax(0) @ v[h]
        x = ln(lin(merge(out), a.dense) + x, l.norm1)
        x = ln(lin(gelu(lin(x, l.up)), l.down) + x, l.norm2)
    return x


@naive("swin_layer")
def _(m, c, x):
    H, D = c.num_heads, c.d_model
    for b in m.blocks:
        z = lin(ln(x, b.norm1), b.attn.qkv)
        q, k, v = (heads(z[:, i * D : (i + 1) * D], H) for i in range(3))
        window = lambda t: (t + 4 - b.shift) // 4 if b.shift else t // 4
        table = b.attn.relative_position_bias_table
        y = sdp(q, k, v, lambda t, s: window(t) == window(s), bias=lambda h, t, s: table[t - s + 3, h])
        x = x + lin(merge(y), b.attn.proj)
        x = x + lin(gelu(lin(ln(x, b.norm2), b.mlp[0])), b.mlp[2])
    return x


@naive("perceiver_classifier")
def _(m, c, ids):
    H, D = c.num_heads, c.d_model
    data, x = m.tokens.weight[ids] + m.places.weight[: len(ids)], m.latents

    def att(a, q, y):
        kv = lin(y, a.to_kv)
        return lin(merge(sdp(heads(lin(q, a.to_q), H), heads(kv[:, :D], H), heads(kv[:, D:], H))), a.to_out)

    def ff(p, x):
        z = lin(ln(x, p.norm), p.fn[0])
        return lin(z[:, : c.d_ff] * gelu(z[:, c.d_ff :]), p.fn[2])

    for a, f, s, g in m.layers:
        x = x + att(a.fn, ln(x, a.norm), ln(data, a.norm_context))
        x = x + ff(f, x)
        y = ln(x, s.norm)
        x = x + att(s.fn, y, y)
        x = x + ff(g, x)
    return lin(ln(x.sum(0) / len(x), m.to_logits[0]), m.to_logits[1])


@naive("performer_decoder")
def _(m, c, ids):
    H, K, T = c.num_heads, c.d_model // c.num_heads, len(ids)
    x = m.token_emb.weight[ids] + m.pos_emb.weight[:T]
    for l in m.layers:
        a, y = l.attention, ln(x, l.n1)
        q, k, v = (heads(lin(y, p), H) for p in (a.q, a.k, a.v))
        out = torch.zeros(H, T, K, dtype=x.dtype)
        om = a.omega.double()

        def phi(u):
            u = u / u.norm() * K**0.25
            return torch.stack([torch.exp(w @ u - u @ u / 2) for w in om]) / len(om) ** 0.5

        for h in range(H):
            for t in range(T):
                w = [phi(q[h, t]) @ phi(k[h, s]) for s in range(t + 1)]
                out[h, t] = sum(wi * v[h, s] for s, wi in enumerate(w)) / sum(w)
        x = x + lin(merge(out), a.o)
        x = x + lin(gelu(lin(ln(x, l.n2), l.ff[0])), l.ff[3])
    return lin(ln(x, m.norm), m.to_out)


@naive("linear_chunk_decoder")
def _(m, c, ids):
    H, T = c.num_heads, len(ids)
    x = m.emb.weight[ids] + sinus(T, c.d_model)
    phi = lambda u: torch.where(u > 0, u + 1, torch.exp(u))
    for b in m.blocks:
        y = ln(x, b.ln1)
        q, k, v = phi(heads(lin(y, b.q), H)), phi(heads(lin(y, b.k), H)), heads(lin(y, b.v), H)
        out = torch.zeros_like(v)
        for h in range(H):
            for t in range(T):
                w = [q[h, t] @ k[h, s] for s in range(t + 1)]
                out[h, t] = sum(wi * v[h, s] for s, wi in enumerate(w)) / sum(w)
        x = x + lin(merge(out), b.o)
        x = x + lin(lin(ln(x, b.ln2), b.fc).clamp(min=0), b.proj)
    return ln(x, m.ln) @ m.emb.weight.T


@naive("streaming_sinks")
def _(m, c, ids):
    H, G = c.num_heads, c.num_key_value_heads
    x = m.embed_tokens.weight[ids]
    for l in m.layers:
        a, y = l.self_attn, rms(x, l.input_layernorm.weight)
        q = rope(heads(lin(y, a.q_proj), H))
        k, v = repeat(rope(heads(lin(y, a.k_proj), G)), H), repeat(heads(lin(y, a.v_proj), G), H)
        y = sdp(q, k, v, lambda t, s: s <= t and (s < 2 or s > t - 5))
        x = x + lin(merge(y), a.o_proj)
        y = rms(x, l.post_attention_layernorm.weight)
        x = x + lin(silu(lin(y, l.gate_proj)) * lin(y, l.up_proj), l.down_proj)
    return lin(rms(x, m.norm.weight), m.lm_head)


@naive("mla_decoder")
def _(m, c, ids):
    H, D, T = c.num_heads, c.d_model, len(ids)
    K = D // H
    x = m.embed.weight[ids]
    for b in m.layers:
        a, y = b.attn, rms(x, b.attn_norm.weight)
        q = heads(lin(y, a.wq), H)
        q = torch.cat([q[..., : K - 2], rope(q[..., K - 2 :], halves=False)], -1)
        z = lin(y, a.wkv_a)
        kv = heads(lin(rms(z[:, : a.rank], a.kv_norm.weight), a.wkv_b), H)
        kr = rope(z[None, :, a.rank :], halves=False).expand(H, T, 2)
        k, v = torch.cat([kv[..., : K - 2], kr], -1), kv[..., K - 2 :]
        x = x + lin(merge(sdp(q, k, v, causal)), a.wo)
        y = rms(x, b.ffn_norm.weight)
        x = x + lin(silu(lin(y, b.w1)) * lin(y, b.w3), b.w2)
    return lin(rms(x, m.norm.weight), m.head)


@naive("moe_shared_ffn")
def _(m, c, x):
    rows = []
    for u in x:
        p = (m.gate.weight @ u).softmax(0)
        best = sorted(range(4), key=lambda e: -float(p[e]))[:2]
        f = lambda w1, w2: (silu(u @ w1[:, : c.d_ff]) * (u @ w1[:, c.d_ff :])) @ w2
        y = f(m.shared_in.weight.T, m.shared_out.weight.T)
        for e in best:
            y = y + p[e] / sum(p[i] for i in best) * f(m.w_in[e], m.w_out[e])
        rows.append(y)
    return torch.stack(rows)


@naive("weightnorm_ffn")
def _(m, c, x):
    def w(l):
        g, v = l.parametrizations.weight.original0, l.parametrizations.weight.original1
        return torch.stack([g[i] * v[i] / v[i].norm() for i in range(len(v))])

    return gelut(x @ w(m.expand).T + m.expand.bias) @ w(m.contract).T + m.contract.bias


@naive("parametrised_attention")
def _(m, c, x):
    def w(l):
        p = l.parametrizations.weight
        return torch.stack([col / (col @ col) ** 0.5 * math.exp(g) for col, g in zip(p.original.T, p[0].log_gain)], 1)

    q, k, v = (heads(x @ w(l).T, c.num_heads) for l in (m.to_q, m.to_k, m.to_v))
    return merge(sdp(q, k, v, causal)) @ w(m.to_out).T + m.to_out.bias


@naive("mod_decoder")
def _(m, c, ids):
    H, D = c.num_heads, c.d_model
    x = m.tok.weight[ids] + m.pos.weight[: len(ids)]
    for b in m.blocks:
        g = [1 / (1 + math.exp(-float(b.router.weight[0] @ u + b.router.bias[0]))) for u in x]
        on = [i for i, v in enumerate(g) if v > 0.5]
        f = b.inner
        z = lin(ln(x, f.ln1), f.qkv)
        q, k, v = (heads(z[:, i * D : (i + 1) * D], H) for i in range(3))
        new = list(x)
        for t in on:
            y = sdp(q[:, t : t + 1], k, v, lambda _, s: s <= t and s in on)
            a = lin(merge(y), f.o)[0]
            new[t] = x[t] + g[t] * (a + lin(gelu(lin(ln(x[t] + a, f.ln2), f.up)), f.down))
        x = torch.stack(new)
    return lin(ln(x, m.ln), m.head)


@naive("hyper_decoder")
def _(m, c, ids):
    S = [m.tok.weight[ids] + m.pos[: len(ids)]] * 3

    def hc(h, S, fn):
        y = fn(sum(h.read[i] * S[i] for i in range(3)))
        return [sum(h.mix[i, j] * S[j] for j in range(3)) + h.write[i] * y for i in range(3)]

    for i, (a, f) in enumerate(zip(m.attn, m.ffn)):
        def att(x):
            x = rms(x, a.norm.weight)
            q, k, v = (heads(x @ w, c.num_heads) for w in list(a.w)[:3])
            return merge(sdp(q, k, v, causal)) @ a.w[3]

        S = hc(m.hc[2 * i], S, att)
        S = hc(m.hc[2 * i + 1], S, lambda x: lin(lin(rms(x, f[0].weight), f[1]).clamp(min=0), f[3]))
    return lin(rms(S[0] + S[1] + S[2], m.norm.weight), m.head)


@naive("gptj_parallel")
def _(m, c, ids):
    H, x = c.num_heads, m.wte.weight[ids]
    for b in m.h:
        y = ln(x, b.ln_1)
        q = rope(heads(lin(y, b.q_proj), H), halves=False, dim=2)
        k, v = repeat(rope(lin(y, b.k_proj)[None], halves=False, dim=2), H), repeat(lin(y, b.v_proj)[None], H)
        x = x + lin(merge(sdp(q, k, v, causal)), b.out_proj) + lin(gelut(lin(y, b.fc_in)), b.fc_out)
    return lin(ln(x, m.ln_f), m.lm_head)


@naive("gemma_sandwich")
def _(m, c, ids):
    H, G, K = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
    E = m.embedder.weight
    x = E[ids] * c.d_model**0.5
    for i, l in enumerate(m.layers):
        z = lin(rms(x, 1 + l.pre1.weight), l.attn.qkv_proj)
        q = rope(heads(z[:, : H * K], H))
        k = repeat(rope(heads(z[:, H * K : (H + G) * K], G)), H)
        v = repeat(heads(z[:, (H + G) * K :], G), H)
        see = (lambda t, s: t - 4 < s <= t) if i % 2 == 0 else causal
        x = x + rms(lin(merge(sdp(q, k, v, see, cap=5.0)), l.attn.o_proj), 1 + l.post1.weight)
        y = rms(x, 1 + l.pre2.weight)
        x = x + rms(lin(gelut(lin(y, l.gate)) * lin(y, l.up), l.down), 1 + l.post2.weight)
    return 30 * torch.tanh(rms(x, 1 + m.norm.weight) @ E.T / 30)


@naive("deepnorm_encoder")
def _(m, c, ids):
    H, D, alpha = c.num_heads, c.d_model, (2 * c.num_layers) ** 0.25
    x = m.word.weight[ids] + m.place.weight[: len(ids)]
    for l in m.layers:
        z = lin(x, l.qk)
        y = sdp(heads(z[:, :D], H), heads(z[:, D:], H), heads(lin(x, l.v), H))
        x = ln(alpha * x + lin(merge(y), l.o), l.norm1)
        x = ln(alpha * x + lin(gelu(lin(x, l.up)), l.down), l.norm2)
    return x


@naive("rezero_layer")
def _(m, c, x):
    H, D = c.num_heads, c.d_model
    for i in range(c.num_layers):
        parts, feed = m.tower[f"floor {i}"]
        z = lin(x, parts["fused"])
        k, q, v = (torch.stack([z[:, j * D + h : (j + 1) * D : H] for h in range(H)]) for j in range(3))
        y = sdp(q, k, v, causal)
        out = torch.stack([y[h, :, n] for n in range(D // H) for h in range(H)], 1)
        x = x + m.gains[str(i)][0] * lin(out, parts["out"])
        x = x + m.gains[str(i)][1] * lin(lin(x, feed.up).clamp(min=0), feed.down)
    return x


@naive("vit_registers")
def _(m, c, x):
    D = c.d_model
    for b in m.blocks:
        z = lin(ln(x, b.norm1), b.attn.qkv)
        y = sdp(*(heads(z[:, i * D : (i + 1) * D], c.num_heads) for i in range(3)))
        x = x + b.ls1.gamma * lin(merge(y), b.attn.proj)
        x = x + b.ls2.gamma * lin(gelu(lin(ln(x, b.norm2), b.mlp[0])), b.mlp[2])
    return ln(x, m.norm)


@naive("mae_layer")
def _(m, c, x):
    D = c.d_model
    x = x + sinus(len(x), D, halves=True)
    for b in m.blocks:
        z = ln(x, b.norm1) @ b.attn.in_proj_weight.T + b.attn.in_proj_bias
        y = sdp(*(heads(z[:, i * D : (i + 1) * D], c.num_heads) for i in range(3)))
        x = x + lin(merge(y), b.attn.out_proj)
        x = x + lin(gelu(lin(ln(x, b.norm2), b.fc1)), b.fc2)
    return ln(x, m.norm)


@naive("clip_text_classifier")
def _(m, c, ids):
    D = c.d_model
    x = m.token_embedding.weight[ids] + m.positional_embedding[: len(ids)]
    for b in m.resblocks:
        z = ln(x, b.ln_1) @ b.attn.in_proj_weight.T + b.attn.in_proj_bias
        y = sdp(*(heads(z[:, i * D : (i + 1) * D], c.num_heads) for i in range(3)), causal)
        x = x + lin(merge(y), b.attn.out_proj)
        z = lin(ln(x, b.ln_2), b.mlp[0])
        x = x + lin(z / (1 + torch.exp(-1.702 * z)), b.mlp[2])
    f = ln(x, m.ln_final)[-1] @ m.text_projection
    return torch.stack([math.exp(m.logit_scale) * F.cosine_similarity(f, p, dim=0) for p in m.classes])


@naive("whisper_seq2seq")
def _(m, c, src, tgt):
    H, D = c.num_heads, c.d_model

    def conv(x, l, stride):
        z = torch.cat([torch.zeros(1, D, dtype=x.dtype), x, torch.zeros(1, D, dtype=x.dtype)])
        return torch.stack(
            [l.bias + sum(l.weight[:, :, j] @ z[t + j] for j in range(3)) for t in range(0, len(x), stride)]
        )

    def att(a, x, y, see):
        q, k, v = heads(lin(x, a.query), H), heads(lin(y, a.key), H), heads(lin(y, a.value), H)
        return lin(merge(sdp(q, k, v, see)), a.out)

    def mlp(b, x):
        return lin(gelu(lin(ln(x, b.mlp_ln), b.mlp[0])), b.mlp[2])

    x = gelu(conv(gelu(conv(m.source.weight[src], m.conv1, 1)), m.conv2, 2))
    half = -(-D // 2)
    for t in range(len(x)):
        for i in range(D):
            a = t * 10000 ** (-(i % half) / max(half - 1, 1))
            x[t, i] = x[t, i] + (math.sin(a) if i < half else math.cos(a))
    full = lambda t, s: True
    for b in m.enc:
        y = ln(x, b.attn_ln)
        x = x + att(b.attn, y, y, full)
        x = x + mlp(b, x)
    mem = ln(x, m.ln_post)
    x = m.token_embedding.weight[tgt] + m.positional_embedding[: len(tgt)]
    for b in m.dec:
        y = ln(x, b.attn_ln)
        x = x + att(b.attn, y, y, causal)
        x = x + att(b.cross_attn, ln(x, b.cross_attn_ln), mem, full)
        x = x + mlp(b, x)
    return ln(x, m.ln) @ m.token_embedding.weight.T


@naive("attnpool_classifier")
def _(m, c, ids):
    D = c.d_model
    x = m.emb.weight[ids] + m.pos.weight[: len(ids)]
    for i in range(c.num_layers):
        z = lin(ln(x, m.norms[2 * i]), m.qkv[i])
        x = x + lin(merge(sdp(*(heads(z[:, j * D : (j + 1) * D], c.num_heads) for j in range(3)))), m.proj[i])
        x = x + lin(gelu(lin(ln(x, m.norms[2 * i + 1]), m.fc1[i])), m.fc2[i])
    x = ln(x, m.norms[-1])
    e = [math.exp(float(m.pool.score.weight[0] @ torch.tanh(lin(u, m.pool.hidden)))) for u in x]
    return lin(sum(a / sum(e) * u for a, u in zip(e, x)), m.head[1])


@naive("static_cache_decoder")
def _(m, c, ids):
    x = m.wte.weight[ids] + m.wpe.weight[: len(ids)]
    for l in m.layers:
        y = ln(x, l.ln1)
        x = x + lin(merge(sdp(*(heads(lin(y, w), c.num_heads) for w in (l.wq, l.wk, l.wv)), causal)), l.wo)
        x = x + lin(gelu(lin(ln(x, l.ln2), l.up)), l.down)
    return lin(ln(x, m.ln), m.head)


@naive("differential_decoder")
def _(m, c, ids):
    H, K = c.num_heads, c.d_model // c.num_heads
    x = m.embed.weight[ids] + m.places.weight[: len(ids)]
    for d, l in enumerate(m.layers):
        a, y = l.attn, rms(x, l.norm1.weight, 1e-5)
        q, k, v = heads(lin(y, a.q_proj), H), heads(lin(y, a.k_proj), H), heads(lin(y, a.v_proj), H)
        init = 0.8 - 0.6 * math.exp(-0.3 * d)
        lam = math.exp(a.lambda_q1 @ a.lambda_k1) - math.exp(a.lambda_q2 @ a.lambda_k2) + init
        n = K // 2
        y = sdp(q[..., :n], k[..., :n], v, causal) - lam * sdp(q[..., n:], k[..., n:], v, causal)
        x = x + lin(merge(rms(y, a.subln.weight, 1e-5) * (1 - init)), a.out_proj)
        y = rms(x, l.norm2.weight, 1e-5)
        x = x + lin(silu(lin(y, l.gate)) * lin(y, l.up), l.down)
    return lin(rms(x, m.norm.weight, 1e-5), m.head)


@naive("gated_sink_attention")
def _(m, c, x):
    q, k, v = (heads(lin(x, w), c.num_heads) for w in (m.q, m.k, m.v))
    y = merge(sdp(q, k, v, sink=m.sinks))
    return lin(y / (1 + torch.exp(-lin(x, m.gate))), m.o)


@naive("cla_mup_decoder")
def _(m, c, ids):
    H, K = c.num_heads, c.d_model // c.num_heads
    x, k, v = m.embed.weight[ids] + m.place.weight[: len(ids)], None, None
    for i, l in enumerate(m.layers):
        y = ln(x, l.norms["attention"])
        if i % 2 == 0:
            z = lin(y, l.memory)
            k, v = (torch.stack([z[:, (2 * h + j) * K : (2 * h + j + 1) * K] for h in range(H)]) for j in range(2))
        x = x + lin(merge(sdp(heads(lin(y, l.query), H), k, v, causal, scale=1 / K)), l.out)
        x = x + lin(gelu(lin(ln(x, l.norms["feed"]), l.feed[0])), l.feed[2])
    return lin(ln(x, m.norm), m.readout) * 4 / c.d_model


# ---------------------------------------------------------------- kinds that are no sequence model
def close(a, b, what, tol=1e-9):
    assert a.shape == b.shape, (what, a.shape, b.shape)
    assert torch.isfinite(a).all(), what + ": not finite"
    error = (a - b).abs().max().item() / max(1.0, b.abs().max().item()) if a.numel() else 0.0
    assert error < tol, f"{what}: {error:.3g}"


def prove_attention(mod):
    f = mod.declared.forward
    m = mod.declared.build(DrawnConfig())
    g = torch.Generator().manual_seed(1)
    for B, H, G, T, S, K, E in ((1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 5, 5, 4, 3), (2, 4, 2, 13, 9, 3, 5), (1, 3, 1, 7, 23, 5, 2), (2, 2, 1, 17, 17, 8, 8)):
        q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) * 2 for s in ((B, H, T, K), (B, G, S, K), (B, G, S, E)))
        for mask in (None, torch.rand(B, 1, T, S, generator=g) > 0.5):
            for cz in (False, True):
                out = f(m, q, k, v, mask, cz)
                assert out.shape == (B, H, T, E)
                for b in range(B):
                    see = lambda t, s: (mask is None or bool(mask[b, 0, t, s])) and (not cz or s <= t + S - T)
                    for t in range(T):
                        if not any(see(t, s) for s in range(S)):
                            assert (out[b, :, t] == 0).all()
                            continue
                        want = sdp(q[b, :, t : t + 1], repeat(k[b], H), repeat(v[b], H), lambda _, s: see(t, s))
                        close(out[b, :, t], want[:, 0], "attention")
                close(f(m, q.float(), k.float(), v.float(), mask, cz).double(), out, "float32", 1e-4)
    q, k, v = (torch.randn(1, 2, 4, 3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(1, 1, 4, 4, generator=g) > 0.4
    assert torch.autograd.gradcheck(lambda *a: f(m, *a, mask, True), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *a: f(m, *a, None, True), (q, k, v))


def prove_rotary(mod):
    for K in (2, 4, 6, 10):
        m = mod.declared.build(DrawnConfig(d_model=2 * K, num_heads=2))
        x = torch.randn(2, 2, 7, K, dtype=torch.float64)
        p = torch.tensor([0, 1, 2, 5, 9, 40, 100000])
        y = mod.declared.forward(m, x, p)
        close(y, torch.stack([rope(x[b], 500.0, True, places=p) for b in range(2)]), "rotary")
        close(y.norm(dim=-1), x.norm(dim=-1), "isometry")
        assert mod.declared.forward(m, x.bfloat16(), p).dtype == torch.bfloat16


def prove_loss(mod):
    m, g = mod.declared.build(DrawnConfig()), torch.Generator().manual_seed(3)
    for B, T, V in ((1, 1, 2), (2, 5, 11), (3, 4, 8), (2, 3, 3), (1, 1, 1)):
        x = torch.randn(B, T, V, generator=g, dtype=torch.float64) * 4
        y = torch.randint(0, V, (B, T), generator=g)
        if B * T > 1:
            y[0, 0] = -100
        got, total, n = mod.declared.forward(m, x, y), 0.0, 0
        for row, label in zip(x.reshape(-1, V), y.flatten()):
            if label >= 0:
                lse = math.log(sum(math.exp(z) for z in row.tolist()))
                target = [0.1 / V + (0.9 if i == label else 0) for i in range(V)]
                total += -sum(t * (float(z) - lse) for t, z in zip(target, row)) + 1e-2 * lse**2
                n += 1
        close(got, torch.tensor(total / n, dtype=torch.float64), "loss")
        want = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        want = want + 1e-2 * x.logsumexp(-1)[y != -100].square().mean()
        close(got, want, "loss against torch")
        x.requires_grad_(True)
        assert torch.autograd.gradcheck(lambda x: mod.declared.forward(m, x, y), (x,))
        assert mod.declared.forward(m, x, torch.full_like(y, -100)).item() == 0.0
    assert torch.isfinite(mod.declared.forward(m, torch.tensor([[[1e4, -1e4, 0.0]]]), torch.tensor([[1]])))


def prove_norm(mod):
    for D in (1, 2, 3, 5, 8, 9, 33):
        m = shake(mod.declared.build(DrawnConfig(d_model=D, num_heads=1)).double())
        x = torch.randn(2, 3, D, dtype=torch.float64) * 3 + 5
        close(mod.declared.forward(m, x), F.layer_norm(x, (D,), m.gain, m.shift, 1e-5), "norm")
        x[0] = 2.0
        close(mod.declared.forward(m, x), F.layer_norm(x, (D,), m.gain, m.shift, 1e-5), "constant rows")
        assert torch.autograd.gradcheck(lambda x: mod.declared.forward(m, x), (x.requires_grad_(True),)) or D == 1


SPECIAL = {"attention": prove_attention, "rotary": prove_rotary, "loss": prove_loss, "norm": prove_norm}
SIZES = (
    DrawnConfig(),
    DrawnConfig(d_model=12, num_heads=3, num_key_value_heads=1, num_layers=3, d_ff=7, vocab_size=5, max_len=40),
    DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=1, d_ff=9, vocab_size=17, max_len=33, num_classes=2),
    DrawnConfig(d_model=15, num_heads=3, num_key_value_heads=3, num_layers=2, d_ff=11, vocab_size=13, max_len=32),
    DrawnConfig(d_model=6, num_heads=1, num_key_value_heads=1, num_layers=4, d_ff=24, vocab_size=7, max_len=16),
    DrawnConfig(d_model=24, num_heads=6, num_key_value_heads=3, num_layers=2, d_ff=20, vocab_size=11, max_len=32),
)


def prove_sequence(name, mod):
    s, f, kind = mod.declared, mod.declared.forward, mod.declared.kind
    embedded = kind in ("layer", "self_attention", "feed_forward")
    pair, pooled = kind == "encoder_decoder", kind == "classifier"
    is_causal = pair or kind == "decoder" or s.declares.get("causal", False)
    masked = "attention_mask" in f.__code__.co_varnames or pair
    sides = ["right"] if s.declares.get("padding_side") == "right" else ["right", "left"]
    judged = 0
    for number, c in enumerate(SIZES):
        torch.manual_seed(number)
        try:
            model = s.build(c)
        except ValueError:
            continue
        judged += 1
        model = shake(model.double().eval(), number)
        assert mod.undeclared.build(c) is not None
        g = torch.Generator().manual_seed(number)

        def draw(b, t):
            if embedded:
                return torch.randn(b, t, c.d_model, generator=g, dtype=torch.float64)
            return torch.randint(0, c.vocab_size, (b, t), generator=g)

        longest = min(c.max_len, 21)
        # 1. the naive computation
        for t in (1, 2, 5, 9 if number else longest):
            if pair:
                a, b = draw(2, max(1, t - 1)), draw(2, t)
                got = f(model, a, b)
                want = torch.stack([NAIVE[name](model, c, a[i], b[i]) for i in range(2)])
            else:
                x = draw(2, t)
                got = f(model, x)
                want = torch.stack([NAIVE[name](model, c, x[i]) for i in range(2)])
            close(got, want.detach(), f"naive T={t} {c}", 1e-8)
        for t in (1, 3, 8, longest):
            src = draw(3, max(1, t // 2 + 1)) if pair else None
            call = (lambda x, *m: f(model, src, x, None, *m)) if pair else (lambda x, *m: f(model, x, *m))
            x = draw(3, t)
            full = call(x)
            # 2. alone as in the batch; without gradients as with them; copied; in float32 and bfloat16
            if pair:
                close(f(model, src[1:2], x[1:2]), full[1:2], "batch")
            else:
                close(f(model, x[1:2]), full[1:2], "batch")
            with torch.no_grad():
                close(call(x), full.detach(), "no_grad")
            other = s.build(c).double().eval()
            other.load_state_dict(model.state_dict())
            close(f(other, src, x) if pair else f(other, x), full, "state dict")
            for dtype, tol in ((torch.float32, 2e-3), (torch.bfloat16, None)):
                low = copy.deepcopy(model).to(dtype)
                y = x.to(dtype) if embedded else x
                out = f(low, src, y) if pair else f(low, y)
                assert out.dtype == dtype or name in (), (out.dtype, dtype)
                assert torch.isfinite(out).all(), dtype
                if tol:
                    close(out.double(), full.double(), "float32", tol)
            # 3. causality, both ways
            if t > 1 and not pooled and kind != "feed_forward":
                y = x.clone()
                y[:, t // 2 :] = draw(3, t - t // 2)
                if not embedded:
                    y[:, t // 2 :] = (x[:, t // 2 :] + 1) % c.vocab_size
                changed = call(y)
                if is_causal:
                    close(changed[:, : t // 2], full[:, : t // 2], "causality")
                elif not s.declares.get("sparse"):
                    assert (changed[:, : t // 2] - full[:, : t // 2]).abs().max() > 1e-6, "blind to the future"
            # 4. padding
            if masked and t > 1:
                ones = torch.ones(3, t, dtype=torch.bool)
                close(call(x, ones), full, "a mask of ones")
                for side in sides if not pair else ["right"]:
                    for extra in (1, 4):
                        if t + extra > c.max_len:
                            continue
                        junk = draw(3, extra)
                        real = torch.ones(3, t + extra, dtype=torch.bool)
                        if side == "right":
                            y = torch.cat([x, junk], 1)
                            real[:, t:] = False
                            cut = slice(0, t)
                        else:
                            y = torch.cat([junk, x], 1)
                            real[:, :extra] = False
                            cut = slice(extra, None)
                        out = call(y, real)
                        close(out if pooled else out[:, cut], full, f"padding {side}")
                if pair:
                    for side in sides:
                        junk = draw(3, 3)
                        y = torch.cat([src, junk] if side == "right" else [junk, src], 1)
                        real = torch.ones_like(y, dtype=torch.bool)
                        real[:, slice(src.shape[1], None) if side == "right" else slice(0, 3)] = False
                        close(f(model, y, x, real, None), full, f"source padding {side}")
                        if side == "left":
                            z, there = torch.cat([junk, x], 1), torch.ones(3, t + 3, dtype=torch.bool)
                            there[:, :3] = False
                            close(f(model, src, z, None, there)[:, 3:], full, "target padding left")
            # 5. everything stays finite, gradients too, for any mask
            model.train()
            for kindof in ("random", "none real"):
                real = torch.rand(3, t, generator=g) > 0.5
                if kindof == "none real":
                    real[1] = False
                y = x.clone().requires_grad_(True) if embedded else x
                if pair:
                    hide = torch.rand(src.shape, generator=g) > 0.5
                    hide[2] = False
                    out = f(model, src, y, hide, real)
                elif masked:
                    out = f(model, y, real)
                else:
                    out = f(model, y)
                assert torch.isfinite(out).all(), "not finite under " + kindof
                if out.requires_grad:
                    grads = torch.autograd.grad(out.square().sum(), [p for p in model.parameters()], allow_unused=True)
                    assert all(p is None or torch.isfinite(p).all() for p in grads), "gradient under " + kindof
            model.eval()
            # 6. the cache, in any chunks, padded and reordered
            if s.cache is not None and t > 1:
                for sizes in ([1] * t, [t], [2] + [1] * (t - 2), [1, t - 1], [t // 2, t - t // 2]):
                    chunks = list(x.split([n for n in sizes if n], 1))
                    close(s.cache(model, chunks), full, "cache")
                    real = torch.ones(3, t, dtype=torch.bool)
                    if "left" in sides:
                        real[1, : t // 2] = False
                    else:
                        real[1, t - 1 :] = False
                    close(s.cache(model, chunks, attention_mask=real)[real], f(model, x, real)[real], "masked cache")
                    if len(chunks) > 1:
                        order = torch.tensor([2, 0, 0])
                        n = chunks[0].shape[1]
                        got = s.cache(model, chunks, reorder=order)
                        joined = torch.cat([chunks[0][order], *chunks[1:]], 1)
                        close(got[:, n:], f(model, joined)[:, n:], "reordered cache")
                        close(got[:, :n], full[:, :n], "first chunk")
                        got = s.cache(model, chunks, attention_mask=real, reorder=order)
                        mixed = real[order]
                        keep = mixed.clone()
                        keep[:, :n] = False
                        close(got[keep], f(model, joined, mixed)[keep], "reordered masked cache")
            if s.generate is not None and t + 4 <= c.max_len:
                slow, fast = (s.generate(model, x, 4, flag) for flag in (False, True))
                assert torch.equal(slow, fast) and slow.shape == (3, t + 4) and torch.equal(slow[:, :t], x)
            if s.weights is not None:
                w = s.weights(model, x)
                assert w.shape == (3, c.num_heads, t, t)
                total = w.sum(-1)
                assert (total < 1 + 1e-9).all() and (s.declares.get("sink") or torch.allclose(total, torch.ones_like(total)))
            if s.router is not None:
                w = s.router(model, x)
                assert ((w > 0).sum(-1) == 2).all() and torch.allclose(w.sum(-1), torch.ones_like(w.sum(-1)))
            if s.loss is not None and not pair:
                y = draw(3, t)
                want = F.cross_entropy(full.flatten(0, 1), y.flatten())
                close(s.loss(model, x, y), want, "loss")
        # 7. past max_len
        past = s.declares.get("beyond_max_len")
        if past:
            x = draw(1, c.max_len + 3)
            try:
                out = f(model, draw(1, 3), x) if pair else f(model, x)
                assert past == "works" and torch.isfinite(out).all()
            except (IndexError, RuntimeError, ValueError):
                assert past == "error"
            if pair:
                try:
                    f(model, draw(1, c.max_len + 3), x[:, :2])
                    assert past == "works"
                except (IndexError, RuntimeError, ValueError):
                    assert past == "error"
        if s.declares.get("tied"):
            names = [n for n, p in model.named_parameters(remove_duplicate=False) if p.shape == (c.vocab_size, c.d_model)]
            assert len({id(p) for n, p in model.named_parameters() if n in names}) == 1 or pair
    assert judged >= 1, "nothing was built"
    # dropout runs
    try:
        noisy = s.build(DrawnConfig(dropout=0.3)).train()
        x = torch.randn(2, 4, 8) if embedded else torch.randint(0, 11, (2, 4))
        f(noisy, x, x) if pair else f(noisy, x)
    except ValueError:
        pass
    return judged


EXTRA = {}


def extra(name):
    return lambda f: EXTRA.setdefault(name, f)


@extra("vit_registers")
def _(mod):
    m = shake(mod.declared.build(DrawnConfig()).double())
    images = torch.randn(2, *mod.declared.image, dtype=torch.float64)
    got = mod.declared.patches(m, images)
    rows = [m.cls_token[0, 0] + m.pos_embed[0, 0], *m.register_tokens[0]]
    for b in range(2):
        want = list(rows)
        for i in range(2):
            for j in range(3):
                patch = images[b, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
                value = torch.stack([(k * patch).sum() for k in m.patch_embed.weight]) + m.patch_embed.bias
                want.append(value + m.pos_embed[0, 1 + 3 * i + j])
        close(got[b], torch.stack(want), "patches")


@extra("mae_layer")
def _(mod):
    m = shake(mod.declared.build(DrawnConfig()).double().eval())
    x, see = torch.randn(3, 9, 8, dtype=torch.float64), torch.rand(3, 9) > 0.5
    see[:, 0] = True
    out = mod.declared.forward(m, x, see)
    for b in range(3):  # only the visible, at their own places
        places = see[b].nonzero().flatten()
        z = x[b, places] + m.places(9, x)[places]
        for block in m.blocks:
            z = block(z[None], torch.zeros(1, len(places), dtype=x.dtype))[0]
        close(out[b, places], m.norm(z), "visible")
        assert (out[b, ~see[b]] == 0).all()


@extra("dict_bert")
def _(mod):
    m = shake(mod.declared.build(DrawnConfig()).double().eval())
    x, seg = torch.randint(0, 11, (2, 6)), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    assert (m(x, None, seg) - m(x)).abs().max() > 1e-3


@extra("swin_layer")
def _(mod):
    """Influence stays within windows, and crosses them through the shift."""
    m = shake(mod.declared.build(DrawnConfig()).double().eval())
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    jac = torch.autograd.functional.jacobian(lambda x: m(x)[0].sum(-1), x)[:, 0].abs().sum(-1)
    for t in range(11):
        for s in range(11):
            first = any(u // 4 == s // 4 and (u + 2) // 4 == (t + 2) // 4 for u in range(11))
            assert (jac[t, s] > 0) == first, (t, s)


@extra("streaming_sinks")
def _(mod):
    m = shake(mod.declared.build(DrawnConfig(num_layers=1)).double().eval())
    x = torch.randint(0, 11, (1, 14))
    full = m(x)
    for s in range(14):
        y = x.clone()
        y[0, s] = (y[0, s] + 1) % 11
        moved = (m(y) - full)[0].abs().amax(-1) > 1e-9
        for t in range(14):
            assert bool(moved[t]) == (s <= t and (s < 2 or s > t - 5)), (t, s)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(p.stem for p in HERE.glob("*.py") if p.stem != "prove")
    torch.set_num_threads(1)
    bad = 0
    for name in names:
        started = time.time()
        try:
            mod = load(name)
            kind = mod.declared.kind
            assert mod.undeclared.kind == kind and mod.undeclared.build is mod.declared.build
            if kind in SPECIAL:
                SPECIAL[kind](mod)
                sizes = "-"
            else:
                sizes = prove_sequence(name, mod)
            if name in EXTRA:
                EXTRA[name](mod)
            print(f"ok    {name:26} {kind:16} sizes {sizes}  {time.time() - started:.1f}s", flush=True)
        except Exception as e:
            bad += 1
            import traceback

            at = traceback.extract_tb(e.__traceback__)[-1]
            print(f"WRONG {name:26} {type(e).__name__}: {str(e)[:300]}  ({Path(at.filename).name}:{at.lineno})", flush=True)
    print(f"{len(names) - bad} of {len(names)} proved")
    sys.exit(bool(bad))
