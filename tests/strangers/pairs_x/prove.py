"""For every pair: right and wrong differ in the way that WHAT says, and the right one agrees with a naive computation.

Plain torch, float64, no check of veriformer is run. `python prove.py`
"""

import importlib.util
import math
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

HERE = pathlib.Path(__file__).parent
TOL = 1e-9


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def shake(model, seed=1):
    """Draw all parameters anew, gains around 1, so that nothing hides behind ones and zeros."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.copy_((1.0 if bool((p == 1).all()) else 0.0) + 0.3 * torch.randn(p.shape, generator=g, dtype=p.dtype))
            else:
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * p.shape[-1] ** -0.5 * 1.5)
    return model


def pair(name, strict=True, **sizes):
    r, w = load(f"{name}_right"), load(f"{name}_wrong")
    c = DrawnConfig(**({"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 20} | sizes))
    torch.manual_seed(0)
    right, wrong = r.subject.build(c).double().eval(), w.subject.build(c).double().eval()
    shake(right)
    wrong.load_state_dict(right.state_dict(), strict=strict)
    return r, w, right, wrong


def tokens(B=2, T=9, seed=0, V=11):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def same(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    worst = (a - b).abs().max().item()
    assert worst < TOL * (1 + b.abs().max().item()), worst


def apart(a, b, least=1e-4):
    assert (a - b).abs().max().item() > least, (a - b).abs().max().item()


# ---- naive parts


def heads(x, H):
    return torch.stack(x.chunk(H, dim=-1), dim=1)


def attend(q, k, v, scale, seen, bias=None):
    """q [B,H,T,K], one row after another; seen(b, t, s) says what is visible. Returns [B, T, H * V]."""
    B, H, T, _ = q.shape
    rows = []
    for b in range(B):
        for t in range(T):
            row = []
            for h in range(H):
                visible = [s for s in range(k.shape[2]) if seen(b, t, s)]
                kv = h * k.shape[1] // H
                e = [torch.exp(scale * (q[b, h, t] * k[b, kv, s]).sum() + (0 if bias is None else bias(h, t, s)))
                     for s in visible]
                total = sum(e)
                row.append(sum(x / total * v[b, kv, s] for x, s in zip(e, visible)))
            rows.append(torch.cat(row))
    return torch.stack(rows).view(B, T, -1)


def rope(x, base, dim=None, interleaved=False):
    """By complex numbers."""
    T, K = x.shape[-2:]
    dim = dim or K
    n = dim // 2
    out = x.clone()
    for i in range(n):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
        for t in range(T):
            turn = complex(math.cos(t * base ** (-2 * i / dim)), math.sin(t * base ** (-2 * i / dim)))
            z = torch.complex(x[..., t, a], x[..., t, b]) * turn
            out[..., t, a], out[..., t, b] = z.real, z.imag
    return out


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def swiglu(x, gate, up, down):
    g = x @ gate.weight.T
    return (g * torch.sigmoid(g) * (x @ up.weight.T)) @ down.weight.T


def causal(b, t, s):
    return s <= t


def torch_layer(layer, q, k, v, o, n1, f1, f2, n2, H, pre=False, act=F.gelu, decoder=False, cross=None):
    """A layer of torch.nn with the same weights: independent of the code of the pair."""
    D, ffn = o.weight.shape[0], f1.weight.shape[0]
    cls = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    m = cls(D, H, ffn, 0.0, act, n1.eps, batch_first=True, norm_first=pre).double()

    def fill(mha, q, k, v, o):
        mha.in_proj_weight.copy_(torch.cat((q.weight, k.weight, v.weight)))
        mha.in_proj_bias.copy_(torch.cat((q.bias, k.bias, v.bias)))
        mha.out_proj.load_state_dict(o.state_dict())

    with torch.no_grad():
        fill(m.self_attn, q, k, v, o)
        m.norm1.load_state_dict(n1.state_dict())
        m.linear1.load_state_dict(f1.state_dict())
        m.linear2.load_state_dict(f2.state_dict())
        if decoder:
            fill(m.multihead_attn, *cross[:4])
            m.norm2.load_state_dict(cross[4].state_dict())
            m.norm3.load_state_dict(n2.state_dict())
        else:
            m.norm2.load_state_dict(n2.state_dict())
    return m.train()  # no fast path


def padded(B, T, real, left=False):
    mask = torch.zeros(B, T, dtype=torch.bool)
    for b in range(B):
        mask[b, T - real[b] :] = True if left else mask[b, T - real[b] :]
        if not left:
            mask[b, : real[b]] = True
    return mask


# ---- the pairs


def p01():
    r, w, right, wrong = pair("01_bert", num_layers=3)
    x, mask = tokens(), padded(2, 9, (9, 5))
    h = right.embeddings(x)
    for l in right.layer:
        a = l.attention
        h = torch_layer(l, a.query, a.key, a.value, a.dense, l.attention_norm, l.intermediate, l.output, l.output_norm, 2)(
            h, src_key_padding_mask=~mask)
    same(right.encode(x, mask)[mask], h[mask])
    count = lambda m: sum(p.numel() for p in m.layer.parameters())
    assert count(right) == 3 * count(wrong)
    assert len({id(l) for l in wrong.layer}) == 1 and len({id(l) for l in right.layer}) == 3
    apart(right(x), wrong(x))


def p02():
    r, w, right, wrong = pair("02_roberta")
    x, mask = tokens(), padded(2, 9, (9, 5), left=True)
    ids = right.embeddings.position_ids(mask)
    for b in range(2):
        n = 0
        for t in range(9):
            n += int(mask[b, t])
            assert ids[b, t] == (1 + n if mask[b, t] else 1)
    e = right.embeddings
    h = F.layer_norm(e.word_embeddings.weight[x] + e.position_embeddings.weight[2:11] + e.token_type_embeddings.weight[0],
                     (16,), e.LayerNorm.weight, e.LayerNorm.bias, 1e-5)
    for l in right.layers:
        h = torch_layer(l, l.query, l.key, l.value, l.attention_output, l.attention_norm, l.intermediate, l.output,
                        l.output_norm, 2)(h)
    same(right(x), h)
    same(right(x, mask)[1:, 4:], right(x[1:, 4:]))  # padding on the left changes nothing
    assert int(wrong.embeddings.position_ids(torch.ones(1, 1))) == 1  # the row of padding
    fresh = w.subject.build(DrawnConfig(d_model=16))
    assert not fresh.embeddings.position_embeddings.weight[1].any()
    apart(right(x), wrong(x))


def p03():
    r, w = load("03_gpt2_right"), load("03_gpt2_wrong")
    c = DrawnConfig(d_model=128, num_heads=4, num_layers=6, d_ff=512)
    torch.manual_seed(0)
    std = {}
    for name, module in (("right", r), ("wrong", w)):
        m = module.subject.build(c)
        std[name] = torch.cat([p.flatten() for n, p in m.named_parameters() if n.endswith("c_proj.weight")]).std().item()
        rest = torch.cat([p.flatten() for n, p in m.named_parameters() if n.endswith(("c_attn.weight", "c_fc.weight"))])
        assert abs(rest.std().item() / 0.02 - 1) < 0.02
    assert abs(std["right"] / (0.02 / math.sqrt(12)) - 1) < 0.02, std
    assert abs(std["wrong"] / (0.02 / math.sqrt(6)) - 1) < 0.02, std
    # the function itself is the same, and that of torch.nn
    r, w, right, wrong = pair("03_gpt2")
    x = tokens()
    h = right.wte.weight[x] + right.wpe.weight[:9]
    for b in right.h:
        q, k, v = (nn.Linear(16, 16).double() for _ in range(3))
        for i, lin in enumerate((q, k, v)):
            lin.weight.data = b.attn.c_attn.weight.data[16 * i : 16 * i + 16]
            lin.bias.data = b.attn.c_attn.bias.data[16 * i : 16 * i + 16]
        layer = torch_layer(b, q, k, v, b.attn.c_proj, b.ln_1, b.mlp.c_fc, b.mlp.c_proj, b.ln_2, 2, pre=True,
                            act=lambda z: F.gelu(z, approximate="tanh"))
        h = layer(h, src_mask=torch.ones(9, 9).triu(1).bool())
    same(right(x), right.ln_f(h) @ right.wte.weight.T)
    same(right(x), wrong(x))


def p04():
    r, w, right, wrong = pair("04_gpt_neox", d_model=32)
    x = tokens()

    def naive(dim_of_frequencies):
        h = right.embed_in.weight[x]
        for l in right.layers:
            a, n = l.attention, l.input_layernorm(h)
            q, k, v = [], [], []
            for part in heads(a.query_key_value(n), 2).unbind(1):
                for into, t in zip((q, k, v), part.split(16, -1)):
                    into.append(t)
            q, k, v = (torch.stack(t, 1) for t in (q, k, v))
            q, k = dim_of_frequencies(q), dim_of_frequencies(k)
            out = a.dense(attend(q, k, v, 16**-0.5, causal))
            h = h + out + l.dense_4h_to_h(F.gelu(l.dense_h_to_4h(l.post_attention_layernorm(h))))
        return right.embed_out(right.final_layer_norm(h))

    def spread(t):  # the mistake: exponents 2 i / 16
        base = 10000.0 ** (4 / 16)
        return rope(t, base, 4)

    same(right(x), naive(lambda t: rope(t, 10000.0, 4)))
    same(wrong(x), naive(spread))
    apart(right(x), wrong(x))


def p05():
    r, w, right, wrong = pair("05_llama3", d_model=32, num_heads=4, num_key_value_heads=2)
    x = tokens()
    h = right.embed_tokens.weight[x]
    for l in right.layers:
        a, n = l.self_attn, rms(h, l.input_layernorm.weight, 1e-5)
        q, k, v = heads(n @ a.q_proj.weight.T, 4), heads(n @ a.k_proj.weight.T, 2), heads(n @ a.v_proj.weight.T, 2)
        h = h + attend(rope(q, 5e5), rope(k, 5e5), v, 8**-0.5, causal) @ a.o_proj.weight.T
        h = h + swiglu(rms(h, l.post_attention_layernorm.weight, 1e-5), l.gate_proj, l.up_proj, l.down_proj)
    same(right(x), rms(h, right.norm.weight, 1e-5) @ right.lm_head.weight.T)
    # a rotation keeps lengths, and products depend on distances alone
    u = torch.randn(8, dtype=torch.float64).expand(1, 1, 9, 8)
    for module, model, rotates in ((r, right, True), (w, wrong, False)):
        cos, sin = model.rotary(torch.zeros(1, 9, 32, dtype=torch.float64))
        q, k = module.apply_rotary(u, u.flip(-1), cos, sin)
        s = (q @ k.mT)[0, 0]
        assert torch.allclose(s[1:, 1:], s[:-1, :-1]) == rotates
        assert torch.allclose(q.norm(dim=-1), u.norm(dim=-1)) == rotates
    apart(right(x), wrong(x))


def p06():
    r, w, right, wrong = pair("06_gemma3", num_layers=1, num_key_value_heads=1)
    x = tokens(T=10)

    def naive(window):
        h = right.embed_tokens.weight[x] * 4.0
        for l in right.layers:
            a, n = l.self_attn, rms(h, 1 + l.input_layernorm.weight, 1e-6)
            q = rms(heads(a.q_proj(n), 2), 1 + a.q_norm.weight, 1e-6)
            k = rms(heads(a.k_proj(n), 1), 1 + a.k_norm.weight, 1e-6)
            out = attend(rope(q, 1e4), rope(k, 1e4), heads(a.v_proj(n), 1), 8**-0.5, lambda b, t, s: 0 <= t - s < window)
            h = h + rms(a.o_proj(out), 1 + l.post_attention_layernorm.weight, 1e-6)
            f = rms(h, 1 + l.pre_feedforward_layernorm.weight, 1e-6)
            f = l.down_proj(F.gelu(l.gate_proj(f), approximate="tanh") * l.up_proj(f))
            h = h + rms(f, 1 + l.post_feedforward_layernorm.weight, 1e-6)
        return rms(h, 1 + right.norm.weight, 1e-6) @ right.embed_tokens.weight.T

    same(right(x), naive(4))
    same(wrong(x), naive(5))
    other = x.clone()
    other[:, 0] = (other[:, 0] + 1) % 11
    for model, reach in ((right, 3), (wrong, 4)):  # one layer: the last output that the first input reaches
        moved = (model(x) - model(other)).abs().amax((0, 2)) > 0
        assert moved.nonzero().max() == reach
    apart(right(x), wrong(x))


def p07():
    r, w, right, wrong = pair("07_qwen25", num_key_value_heads=1)
    x = tokens()
    h = right.embed_tokens.weight[x]
    for l in right.layers:
        a, n = l.self_attn, rms(h, l.input_layernorm.weight, 1e-6)
        q, k, v = heads(a.q_proj(n), 2), heads(a.k_proj(n), 1), heads(a.v_proj(n), 1)
        h = h + attend(rope(q, 1e6), rope(k, 1e6), v, 8**-0.5, causal) @ a.o_proj.weight.T
        h = h + swiglu(rms(h, l.post_attention_layernorm.weight, 1e-6), l.gate_proj, l.up_proj, l.down_proj)
    full = rms(h, right.norm.weight, 1e-6) @ right.embed_tokens.weight.T
    same(right(x)[0], full)
    same(wrong(x)[0], full)
    for sizes in ((1,) * 9, (4,) + (1,) * 5, (3, 3, 3), (2, 7), (9,)):
        chunks = x.split(sizes, dim=1)
        same(r.cached(right, chunks), full)
        if max(sizes[1:], default=1) == 1:
            same(w.cached(wrong, chunks), full)
        else:
            apart(w.cached(wrong, chunks), full)


def p08():
    r, w, right, wrong = pair("08_mixtral", num_key_value_heads=1)
    x = tokens()

    def naive(normed):
        h = right.tok_embeddings.weight[x]
        for l in right.layers:
            a, n = l.attention, rms(h, l.attention_norm.weight, 1e-5)
            out = attend(rope(heads(a.wq(n), 2), 1e6), rope(heads(a.wk(n), 1), 1e6), heads(a.wv(n), 1), 8**-0.5, causal)
            h = h + out @ a.wo.weight.T
            n = rms(h, l.ffn_norm.weight, 1e-5)
            y = torch.zeros_like(n)
            for b in range(2):
                for t in range(9):
                    logits = n[b, t] @ l.moe.gate.weight.T
                    best = sorted(range(8), key=lambda e: -logits[e].item())[:2]
                    e = torch.exp(logits)
                    total = e[best].sum() if normed else e.sum()  # softmax of the two logits, or of all
                    for i in best:
                        f = l.moe.experts[i]
                        y[b, t] += e[i] / total * swiglu(n[b, t], f.w1, f.w3, f.w2)
            h = h + y
        return rms(h, right.norm.weight, 1e-5) @ right.output.weight.T

    same(right(x), naive(True))
    same(wrong(x), naive(False))
    rows = torch.randn(5, 16, dtype=torch.float64)
    same(right.layers[0].moe.route(rows).sum(-1), torch.ones(5, dtype=torch.float64))
    assert (wrong.layers[0].moe.route(rows).sum(-1) < 1 - 1e-3).all()
    apart(right(x), wrong(x))


def p09():
    r, w, right, wrong = pair("09_deepseek_v2")
    x = tokens()

    def naive(scale):
        h = right.embed_tokens.weight[x]
        for l in right.layers:
            a, n = l.self_attn, rms(h, l.input_layernorm.weight, 1e-6)
            q = heads(a.q_b_proj(rms(a.q_a_proj(n), a.q_a_layernorm.weight, 1e-6)), 2)
            low = a.kv_a_proj_with_mqa(n)
            kv = heads(a.kv_b_proj(rms(low[..., :10], a.kv_a_layernorm.weight, 1e-6)), 2)
            shared = rope(low[:, None, :, 10:], 1e4, interleaved=True)
            q = torch.cat((q[..., :8], rope(q[..., 8:], 1e4, interleaved=True)), -1)
            k = torch.cat((kv[..., :8], torch.cat((shared, shared), 1)), -1)
            h = h + a.o_proj(attend(q, k, kv[..., 8:], scale, causal))
            h = h + swiglu(rms(h, l.post_attention_layernorm.weight, 1e-6), l.gate_proj, l.up_proj, l.down_proj)
        return rms(h, right.norm.weight, 1e-6) @ right.lm_head.weight.T

    same(right(x), naive(1 / math.sqrt(12)))
    same(wrong(x), naive(1 / math.sqrt(8)))
    apart(right(x), wrong(x))


def p10():
    r, w, right, wrong = pair("10_falcon", strict=False)
    x = tokens()

    def naive(model):
        h = right.word_embeddings.weight[x]
        for l, m in zip(right.h, model.h):
            a, n = l.self_attention, l.input_layernorm(h)
            fused = n @ a.query_key_value.weight.T
            q, k, v = heads(fused[..., :16], 2), heads(fused[..., 16:24], 1), heads(fused[..., 24:], 1)
            out = attend(rope(q, 1e4), rope(k, 1e4), v, 8**-0.5, causal) @ a.dense.weight.T
            fed = F.gelu(n @ l.mlp.dense_h_to_4h.weight.T) @ l.mlp.dense_4h_to_h.weight.T
            bias = m.mlp.dense_4h_to_h.bias
            h = h + out + (fed if bias is None else fed + bias)
        return right.ln_f(h) @ right.word_embeddings.weight.T

    biases = lambda m: [n for n, p in m.named_modules() if isinstance(p, nn.Linear) and p.bias is not None]
    assert biases(right) == [] and biases(wrong) == [f"h.{i}.mlp.dense_4h_to_h" for i in range(2)]
    same(right(x), naive(right))
    same(wrong(x), naive(wrong))
    apart(right(x), wrong(x))


def published_slopes(n):
    """As in the code of Press et al."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: n - closest]


def p11():
    r, w, right, wrong = pair("11_mpt", d_model=24, num_heads=6)
    x = tokens()
    for n in range(1, 17):
        want = torch.tensor(published_slopes(n), dtype=torch.float64)
        same(r.gen_slopes(n), want)
        assert torch.allclose(w.gen_slopes(n), want) == math.log2(n).is_integer()

    def naive(slopes):
        h = right.wte.weight[x]
        for l in right.blocks:
            n = F.layer_norm(h, (24,), l.norm_1.weight, None, 1e-5)
            q, k, v = (heads(t, 6) for t in (n @ l.attn.Wqkv.weight.T).split(24, -1))
            out = attend(q, k, v, 4**-0.5, causal, lambda a, t, s: -slopes[a] * (t - s))
            h = h + out @ l.attn.out_proj.weight.T
            n = F.layer_norm(h, (24,), l.norm_2.weight, None, 1e-5)
            h = h + F.gelu(n @ l.up_proj.weight.T) @ l.down_proj.weight.T
        return F.layer_norm(h, (24,), right.norm_f.weight, None, 1e-5) @ right.wte.weight.T

    same(right(x), naive(published_slopes(6)))
    eight = [2.0**-i for i in range(1, 9)]
    same(wrong(x), naive((eight[0::2] + eight[1::2])[:6]))
    apart(right(x), wrong(x))


def p12():
    r, w, right, wrong = pair("12_olmo2", num_key_value_heads=1)
    x = tokens()

    def naive(outside):
        h = right.embed_tokens.weight[x]
        for l in right.layers:
            a = l.self_attn
            q = rope(heads(rms(h @ a.q_proj.weight.T, a.q_norm.weight, 1e-6), 2), 5e5)
            k = rope(heads(rms(h @ a.k_proj.weight.T, a.k_norm.weight, 1e-6), 1), 5e5)
            out = attend(q, k, heads(h @ a.v_proj.weight.T, 1), 8**-0.5, causal) @ a.o_proj.weight.T
            h = h + rms(out, l.post_attention_layernorm.weight, 1e-6)
            f = swiglu(h, l.mlp.gate_proj, l.mlp.up_proj, l.mlp.down_proj)
            gain = l.post_feedforward_layernorm.weight
            h = rms(h + f, gain, 1e-6) if outside else h + rms(f, gain, 1e-6)
        return rms(h, right.norm.weight, 1e-6) @ right.lm_head.weight.T

    same(right(x), naive(False))
    same(wrong(x), naive(True))
    apart(right(x), wrong(x))


def bucket(j_minus_i, bidirectional, n=8, furthest=20):
    base = 0
    if bidirectional:
        n //= 2
        base = n if j_minus_i > 0 else 0
        d = abs(j_minus_i)
    else:
        d = max(-j_minus_i, 0)
    exact = n // 2
    if d < exact:
        return base + d
    return base + min(n - 1, exact + int(math.log(d / exact) / math.log(furthest / exact) * (n - exact)))


def p13():
    r, w, right, wrong = pair("13_t5")
    src, tgt = tokens(T=13), tokens(T=12, seed=5)
    mask = padded(2, 13, (13, 8))

    def naive(sign):
        def stack(s, h, seen, memory=None):
            table = s.relative_attention_bias.weight
            bias = lambda a, t, j: table[bucket(sign * (j - t), not s.is_decoder), a]
            for l in s.block:
                n = rms(h, l.attention_norm.weight, 1e-6)
                at = l.attention
                h = h + at.o(attend(heads(at.q(n), 2), heads(at.k(n), 2), heads(at.v(n), 2), 1.0, seen, bias))
                if memory is not None:
                    n, at = rms(h, l.cross_norm.weight, 1e-6), l.cross
                    h = h + at.o(attend(heads(at.q(n), 2), heads(at.k(memory), 2), heads(at.v(memory), 2), 1.0,
                                        lambda b, t, j: mask[b, j]))
                h = h + l.wo(torch.relu(l.wi(rms(h, l.ffn_norm.weight, 1e-6))))
            return rms(h, s.final_layer_norm.weight, 1e-6)

        memory = stack(right.encoder, right.shared.weight[src], lambda b, t, j: mask[b, j])
        y = stack(right.decoder, right.shared.weight[tgt], causal, memory)
        return y / 4.0 @ right.shared.weight.T

    same(right(src, tgt, mask), naive(1))
    same(wrong(src, tgt, mask), naive(-1))
    for model, flat in ((right, False), (wrong, True)):
        past = model.decoder.compute_bias(12, "cpu")[0, 0][torch.ones(12, 12).tril().bool()]
        assert (past.max() - past.min() == 0) == flat
    apart(right(src, tgt), wrong(src, tgt))


def p14():
    r, w, right, wrong = pair("14_bart")
    src, tgt, mask = tokens(), tokens(T=7, seed=3), padded(2, 9, (9, 5))

    def naive(see_all):
        def embed(s, x):
            return s.layernorm_embedding(right.shared.weight[x] + s.embed_positions.weight[2 : 2 + x.shape[1]])

        def layer(l, decoder):
            a = l.self_attn
            cross = None
            if decoder:
                c = l.encoder_attn
                cross = (c.q_proj, c.k_proj, c.v_proj, c.out_proj, l.encoder_attn_layer_norm)
            return torch_layer(l, a.q_proj, a.k_proj, a.v_proj, a.out_proj, l.self_attn_layer_norm, l.fc1, l.fc2,
                               l.final_layer_norm, 2, decoder=decoder, cross=cross)

        h = embed(right.encoder, src)
        for l in right.encoder.layers:
            h = layer(l, False)(h, src_key_padding_mask=~mask)
        y = embed(right.decoder, tgt)
        for l in right.decoder.layers:
            y = layer(l, True)(y, h, tgt_mask=torch.ones(7, 7).triu(1).bool(),
                               memory_key_padding_mask=None if see_all else ~mask)
        return y @ right.shared.weight.T

    same(right(src, tgt, mask), naive(False))
    same(wrong(src, tgt, mask), naive(True))
    same(right(src, tgt, mask)[1:], right(src[1:, :5], tgt[1:]))
    apart(wrong(src, tgt, mask)[1:], wrong(src[1:, :5], tgt[1:]))
    same(right(src, tgt), wrong(src, tgt))


def p15():
    r, w, right, wrong = pair("15_vit")
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    e = right.embedding
    conv = F.conv2d(images, e.projection.weight.view(16, 3, 4, 4), e.projection.bias, stride=4).flatten(2).transpose(1, 2)
    want = torch.cat((e.cls_token.expand(2, -1, -1), conv), 1) + e.position_embedding
    same(e(images), want)
    apart(wrong.embedding(images), want)
    h = want
    for b in right.blocks:
        q, k, v = (nn.Linear(16, 16).double() for _ in range(3))
        for i, lin in enumerate((q, k, v)):
            lin.weight.data = b.attn.qkv.weight.data[16 * i : 16 * i + 16]
            lin.bias.data = b.attn.qkv.bias.data[16 * i : 16 * i + 16]
        h = torch_layer(b, q, k, v, b.attn.proj, b.norm1, b.fc1, b.fc2, b.norm2, 2, pre=True)(h)
    same(right.encode(want), right.norm(h))
    # which patches two pixels reach, (4, 6) and (7, 6), both of the patch in the middle, number 1 * 3 + 1
    for model, patches in ((right, {4}), (wrong, {3, 5})):
        found = set()
        for row in (4, 7):
            moved = images.clone()
            moved[:, :, row, 6] += 1
            changed = (model.embedding(moved) - model.embedding(images)).abs().amax((0, 2)) > 0
            found |= {int(i) - 1 for i in changed.nonzero()}
        assert found == patches, found
    same(right.encode(want), wrong.encode(want))


def p16():
    r, w, right, wrong = pair("16_clip_text")
    x, mask = tokens(), padded(2, 9, (9, 5))
    h = right.token_embedding.weight[x] + right.positional_embedding[:9]
    for b in right.transformer:
        n = b.ln_1(h)
        q, k, v = (heads(t, 2) for t in b.in_proj(n).split(16, -1))
        h = h + b.out_proj(attend(q, k, v, 8**-0.5, causal))
        f = b.mlp[0](b.ln_2(h))
        h = h + b.mlp[2](f / (1 + torch.exp(-1.702 * f)))
    h = right.ln_final(h)
    same(right(x, mask), torch.stack((h[0, 8], h[1, 4])) @ right.text_projection)
    same(wrong(x, mask), torch.stack((h[0, 8], h[1, 5])) @ right.text_projection)
    same(right(x, mask)[1:], right(x[1:, :5]))
    apart(wrong(x, mask)[1:], wrong(x[1:, :5]))
    same(right(x), wrong(x))


def p17():
    r, w, right, wrong = pair("17_transformer_xl")
    x = tokens()

    def naive(encoded):
        def R(d):
            angles = [d / 10000 ** (2 * i / 16) for i in range(8)]
            return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)

        h = right.word_emb.weight[x] * 4.0
        for at, ff in zip(right.attn, right.ff):
            q, k, v = (heads(t, 2) for t in (h @ at.qkv_net.weight.T).split(16, -1))
            u, s = right.r_w_bias, right.r_r_bias
            far = {d: (R(encoded(d)) @ at.r_net.weight.T).view(2, 8) for d in range(9)}
            out = torch.zeros(2, 9, 16, dtype=torch.float64)
            for b in range(2):
                for i in range(9):
                    for a in range(2):
                        e = [((q[b, a, i] + u[a]) @ k[b, a, j] + (q[b, a, i] + s[a]) @ far[i - j][a]) / math.sqrt(8)
                             for j in range(i + 1)]
                        p = torch.stack(e).softmax(0)
                        out[b, i, 8 * a : 8 * a + 8] = sum(p[j] * v[b, a, j] for j in range(i + 1))
            h = at.layer_norm(h + out @ at.o_net.weight.T)
            h = ff.layer_norm(h + ff.fc2(torch.relu(ff.fc1(h))))
        return h @ right.word_emb.weight.T + right.out_bias

    same(right(x), naive(lambda d: d))
    same(wrong(x), naive(lambda d: 8 - d))
    same(right(x)[:, :5], right(x[:, :5]))
    apart(wrong(x)[:, :5], wrong(x[:, :5]))


def p18():
    r, w, right, wrong = pair("18_universal", num_layers=3)
    x, mask = tokens(), padded(2, 9, (9, 5))

    def naive(power):
        def P(p):
            row = []
            for i in range(8):
                a = p / 10000 ** (power * 2 * i / 16)
                row += [math.sin(a), math.cos(a)]
            return torch.tensor(row, dtype=torch.float64)

        b = right.block
        at = b.attention
        layer = torch_layer(b, at.q, at.k, at.v, at.o, b.attention_norm, b.transition[0], b.transition[2],
                            b.transition_norm, 2, act=F.relu)
        h = right.embedding.weight[x] * 4.0
        for step in range(1, 4):
            h = h + torch.stack([P(t) + P(step) for t in range(9)])
            h = layer(h, src_key_padding_mask=~mask)
        return (h @ right.head.weight.T)[mask]

    same(right(x, mask)[mask], naive(1))
    same(wrong(x, mask)[mask], naive(2))
    apart(right(x), wrong(x))


def p19():
    r, w, right, wrong = pair("19_retnet", num_layers=2)
    x = tokens()
    h = right.embedding.weight[x]  # token by token, state by state
    for l in right.layers:
        m, n = l.retention, l.norm_1(h)
        q, k = (rope(heads(f(n), 2), 1e4, interleaved=True) for f in (m.w_q, m.w_k))
        v = heads(m.w_v(n), 2)
        out = torch.zeros(2, 9, 16, dtype=torch.float64)
        for b in range(2):
            for a in range(2):
                state = torch.zeros(8, 8, dtype=torch.float64)
                for t in range(9):
                    state = (1 - 2.0 ** (-5 - a)) * state + torch.outer(k[b, a, t], v[b, a, t]) / math.sqrt(8)
                    out[b, t, 8 * a : 8 * a + 8] = F.layer_norm(q[b, a, t] @ state, (8,))
        out = out * m.group_norm_weight + m.group_norm_bias
        h = h + m.w_o(F.silu(m.w_g(n)) * out)
        h = h + l.fc2(F.gelu(l.fc1(l.norm_2(h))))
    full = right.head(right.norm(h))
    same(right(x)[0], full)
    same(wrong(x)[0], full)
    for sizes in ((1,) * 9, (3, 3, 3), (2, 7), (4,) + (1,) * 5):
        same(r.chunkwise(right, x.split(sizes, 1)), full)
        apart(w.chunkwise(wrong, x.split(sizes, 1)), full)


def p20():
    r, w, right, wrong = pair("20_perceiver")
    x, mask = tokens(B=3), padded(3, 9, (9, 5, 2))
    alone = torch.cat([right(x[b : b + 1, : int(mask[b].sum())]) for b in range(3)])
    same(right(x, mask), alone)
    everyone = lambda b, t, s: True
    for b in range(3):  # naive, sample by sample

        def mix(at, q_in, kv_in):
            return at.to_out(attend(heads(at.to_q(q_in), 2), heads(at.to_k(kv_in), 2), heads(at.to_v(kv_in), 2),
                                    8**-0.5, everyone))

        def feed(f, z):
            return z + f.fc2(F.gelu(f.fc1(f.norm(z))))

        n = int(mask[b].sum())
        inputs = (right.tokens.weight[x[b, :n]] + right.positions.weight[:n])[None]
        z = right.latents[None]
        z = feed(right.read.ffn, z + mix(right.read.attention, right.read.norm_latents(z), right.read.norm_inputs(inputs)))
        for l in right.think:
            z = feed(l.ffn, z + mix(l.attention, l.norm(z), l.norm(z)))
        same(right.head(right.norm(z).mean(1)), alone[b : b + 1])
    same(right(x[:1]), wrong(x[:1]))  # a batch of one hides it
    apart(wrong(x)[:1], wrong(x[:1]))


def builds():
    """Every subject builds and runs one forward."""
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        module = load(path.stem)
        s = module.subject
        c = DrawnConfig()
        m = s.build(c)
        x = tokens(B=3, T=6)
        mask = padded(3, 6, (6, 4, 1))
        if s.kind == "layer":
            x = torch.randn(3, 6, c.d_model)
            out = s.forward(m, x)
            s.patches(m, torch.randn(2, *s.image))
        elif s.kind == "encoder_decoder":
            out = s.forward(m, x, x[:, :4], mask, mask[:, :4])
            s.forward(m, x, x)
        else:
            out = s.forward(m, x)
            if "attention_mask" in s.forward.__code__.co_varnames:
                out = s.forward(m, x, mask)
        assert out.isfinite().all()
        out.sum().backward()
        assert path.stem.endswith("_right") or isinstance(module.WHAT, str)
        assert 50 <= len(path.read_text().splitlines()) <= 180


if __name__ == "__main__":
    builds()
    failed = 0
    for number in range(1, 21):
        prove = globals()[f"p{number:02}"]
        try:
            with torch.no_grad():
                prove()
            print(f"{number:02} proved")
        except Exception as problem:  # all are told, not the first alone
            failed += 1
            print(f"{number:02} FAILED {type(problem).__name__}: {problem}")
            if "-v" in sys.argv:
                import traceback

                traceback.print_exc()
    sys.exit(bool(failed))
