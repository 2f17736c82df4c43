"""Each wrong file is wrong and each right file right, by plain torch: `python prove.py`."""

import copy
import importlib.util
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
TOL = 1e-8


def load(number, side):
    (path,) = HERE.glob(f"{number:02}_*_{side}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def make(module, **sizes):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_heads": 2, "num_key_value_heads": 2, "num_layers": 2, "d_ff": 24} | sizes
    return module.subject.build(DrawnConfig(**sizes)).double().eval()


def tokens(*shape, seed=1, vocab=11):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    return (a - b).abs().max().item()


def p01(module):
    """After a step of SGD on a cast copy the output projection is the embedding still, and it is one parameter."""
    model = make(module)
    one = len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    named = {id(p) for p in model.parameters()}
    m = copy.deepcopy(model)
    loss = m(tokens(2, 4), tokens(2, 5)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.1 * p.grad
    return one and id(model.lm_head.weight) in named and gap(m.lm_head.weight, m.shared.weight) < TOL and (
        model.lm_head.weight is model.shared.weight
    )


def p02(module):
    model, x = make(module), tokens(2, 9)
    full = model(x)
    return all(gap(module.cached(model, list(x.split(n, 1))), full) < TOL for n in (9, 1, 2, 4))


def p03(module):
    model, x = make(module), tokens(3, 7)
    labels = tokens(3, 7, seed=2)
    labels[0, 3] = -100
    logp = module.subject.forward(model, x).log_softmax(-1)
    terms = [-logp[b, t, labels[b, t + 1]] for b in range(3) for t in range(6) if labels[b, t + 1] != -100]
    return gap(module.subject.loss(model, x, labels), torch.stack(terms).mean()) < TOL


def p04(module):
    """Against the paper's formula: softmax(q k^T / sqrt(d) - slope * (i - j))."""
    model, x = make(module, num_heads=4), tokens(2, 8)
    slopes = [2 ** (-8 * (h + 1) / 4) for h in range(4)]
    h = model.word_embeddings(x)
    for block in model.h:
        a, n = block.self_attention, block.input_layernorm(h)
        w, b = a.query_key_value.weight.view(4, 3, 4, 16), a.query_key_value.bias.view(4, 3, 4)
        heads = []
        for i in range(4):
            q, k, v = (n @ w[i, s].T + b[i, s] for s in range(3))
            dist = torch.arange(8)[:, None] - torch.arange(8)
            s = q @ k.mT / math.sqrt(4) - slopes[i] * dist
            heads.append(s.masked_fill(dist < 0, -math.inf).softmax(-1) @ v)
        h = h + a.dense(torch.cat(heads, -1))
        n = block.post_attention_layernorm(h)
        h = h + block.dense_4h_to_h(F.gelu(block.dense_h_to_4h(n), approximate="tanh"))
    return gap(model.ln_f(h) @ model.word_embeddings.weight.T, model(x)) < TOL


def p05(module):
    """A batch gives what its samples give alone, without their padding."""
    model, x = make(module), tokens(3, 6)
    lengths = [4, 6, 3]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    out = model(x, mask)
    return all(gap(out[i, :n], model(x[i : i + 1, :n])[0]) < TOL for i, n in enumerate(lengths))


def p06(module):
    model, x = make(module), tokens(2, 7)
    mask = (torch.arange(7) < 4).expand(2, 7)
    with torch.enable_grad():
        return gap(model(x, mask), model(x[:, :4])) < TOL


def p07(module):
    model = make(module)
    moe, x = model.blocks[0].moe, torch.randn(2, 5, 16, dtype=torch.double)
    weights = module.subject.router(model, x)
    both = (weights > 0).sum(-1).eq(2).all() and gap(weights.sum(-1), torch.ones(2, 5)) < TOL
    want = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(moe.experts))
    return bool(both) and gap(moe(x), want) < TOL


def p08(module):
    """The parameters of the model are those that it computes with."""
    model, x = make(module), tokens(2, 5)
    before = model(x)
    (before * torch.randn_like(before)).sum().backward()
    reached = all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for block in model.blocks:
            for expert in block.mixture.experts:
                expert.down.weight.zero_()
    mixture, h = model.blocks[0].mixture, torch.randn(1, 3, 16, dtype=torch.double)
    gate = mixture.gate(h).softmax(-1)
    want = sum(gate[..., e, None] * expert(h) for e, expert in enumerate(mixture.experts))
    return reached and gap(mixture(h), want) < 1e-6 and gap(model(x), before) > 1e-3


def p09(module):
    model, src, tgt = make(module, num_layers=3), tokens(2, 5), tokens(2, 6, seed=3)
    memory, mask = model.src_embed(src), torch.ones(2, 1, 5, dtype=torch.bool)
    for layer in model.encoder:
        memory = layer(memory, mask)
    x, future = model.tgt_embed(tgt), torch.ones(1, 6, 6).tril().bool()
    for layer in model.decoder:
        x = layer(x, memory, mask, future)
    return gap(model.generator(x), model(src, tgt)) < TOL


def p10(module):
    model, tgt = make(module), tokens(2, 6, seed=3)
    ok = True
    for seed in (1, 2, 3):
        src = tokens(2, 5, seed=seed)
        ok &= gap(module.subject.cache(model, src, list(tgt.split(2, 1))), model(src, tgt)) < TOL
    return ok


def p11(module):
    model, x, more = make(module), tokens(4, 5), tokens(4, 3, seed=2)
    ok = gap(model.decode([x, more]), model(torch.cat([x, more], 1))) < TOL
    for beams in ([1, 0, 3, 2], [0, 0, 1, 2], [3, 3, 0, 1]):
        beams = torch.tensor(beams)
        want = model(torch.cat([x[beams], more], 1))[:, 5:]
        ok &= gap(model.decode([x, more], beams)[:, 5:], want) < TOL
    return ok


def p12(module):
    model, ok = make(module, num_layers=3), True
    with torch.no_grad():
        model.head.weight.mul_(4)
    for seed in range(6):
        x = tokens(3, 5, seed=seed)
        ok &= torch.equal(model.generate(x, 6, use_cache=True), model.generate(x, 6, use_cache=False))
    # and the logits of the first step: those of the whole prompt
    seen = []
    hook = model.head.register_forward_hook(lambda m, i, o: seen.append(o[:, -1]))
    model.generate(x, 1, use_cache=True)
    hook.remove()
    return ok and gap(seen[-1], model(x)[0][:, -1]) < TOL


def p13(module):
    """Against dense attention with a banded mask, at lengths that are multiples of the window and that are not."""
    model, ok = make(module), True
    for t in (1, 3, 4, 8, 11):
        x = tokens(2, t)
        h = model.token_emb(x) + model.pos_emb.weight[:t]
        dist = torch.arange(t)[:, None] - torch.arange(t)
        seen = (dist >= 0) & (dist < 4)
        for norm, attn, ff in model.layers:
            q, k, v = attn.to_qkv(norm(h)).view(2, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
            s = (q @ k.mT / 8**0.5).masked_fill(~seen, -math.inf).softmax(-1)
            h = h + attn.to_out((s @ v).transpose(1, 2).reshape(2, t, 16))
            h = h + ff(h)
        ok &= gap(model.to_logits(h), model(x)) < TOL
    return ok


def p14(module):
    """Prefixes, and one layer's scores against the formula with the sinusoid of i - j."""
    model, x = make(module), tokens(2, 9)
    ok = all(gap(model(x)[:, :t], model(x[:, :t])) < TOL for t in range(1, 9))
    attn, t = model.attns[0], 6
    w = model.word_emb(x[:, :t])
    q, k, v = attn.qkv_net(w).view(2, t, 3, 2, 8).unbind(2)
    scores = torch.full((2, 2, t, t), -math.inf, dtype=torch.double)
    for i in range(t):
        for j in range(i + 1):
            r = attn.r_net(model.pos_emb(torch.tensor([i - j])).double()).view(2, 8)
            scores[:, :, i, j] = ((q[:, i] + model.r_w_bias) * k[:, j] + (q[:, i] + model.r_r_bias) * r).sum(-1) / 8**0.5
    want = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).reshape(2, t, 16)
    seen = []
    hook = attn.o_net.register_forward_hook(lambda m, i, o: seen.append(i[0]))
    model(x[:, :t])
    hook.remove()
    return ok and gap(seen[0], want) < TOL


def p15(module):
    """A pixel reaches the token of its own patch alone; and all equals a strided convolution."""
    model, images = make(module), torch.randn(2, 3, 8, 12, dtype=torch.double)
    ok, base = True, model.tokens(images)
    for row, col in ((0, 0), (3, 5), (5, 2), (7, 11), (2, 9)):
        other = images.clone()
        other[:, 1, row, col] += 1
        hit = (model.tokens(other) - base).abs().amax((0, 2)).gt(1e-12).nonzero().flatten().tolist()
        ok &= hit == [1 + row // 4 * 3 + col // 4]
    conv = F.conv2d(images, model.proj.weight.view(16, 3, 4, 4), model.proj.bias, stride=4).flatten(2).mT
    return ok and gap(base[:, 1:], conv + model.pos_embed[:, 1:]) < TOL


def p16(module):
    norm = module.RMSNorm(5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(5) + 0.5)
    x = torch.randn(2, 3, 5, dtype=torch.double, requires_grad=True)
    return torch.autograd.gradcheck(norm, (x,), raise_exception=False) and torch.autograd.gradcheck(
        lambda w: module.FusedRMSNorm.apply(x.detach(), w, 1e-6), (norm.weight,), raise_exception=False
    )


def p17(module):
    """Moved by padding on the left, outputs stay, with gains that differ by channel."""
    model, x = make(module), tokens(2, 5)
    with torch.no_grad():
        for layer in model.layers:
            for norm in (layer.attn.q_norm, layer.attn.k_norm):
                norm.weight.copy_(torch.rand(8) * 2 + 0.2)
    padded = torch.cat([tokens(2, 4, seed=5), x], 1)
    mask = (torch.arange(9) >= 4).expand(2, 9)
    return gap(model(padded, mask)[:, 4:], model(x)) < TOL


def p18(module):
    model = make(module)
    matrices = [w for p in model.layers for n, w in p.items() if w.ndim == 2]
    apart = all(
        a.shape != b.shape or gap(a, b) > 1e-3 for i, a in enumerate(matrices) for b in matrices[i + 1 :]
    )
    limits = all(w.abs().max() <= math.sqrt(6 / sum(w.shape)) for w in matrices)
    return apart and limits


def p19(module):
    model, x = make(module), tokens(2, 5)
    h = model.token_embedding(x) + model.position_embedding.weight[:5]
    for layer in model.layers:
        h = layer(h)
    return gap(model.final_layer_norm(h), module.subject.forward(model, x)) < 1e-6


def p20(module):
    model = make(module)
    norms = {id(m) for layer in model.layers for m in (layer.attention_norm, layer.mlp_norm)}
    d, f, v = 16, 24, 11
    layer = 4 * (d * d + d) + d * f + f + f * d + d + 2 * 2 * d
    count = v * d + 32 * d + 2 * layer + 3 * d + 3
    return len(norms) == 4 and sum(p.numel() for p in model.parameters()) == count


if __name__ == "__main__":
    bad = 0
    for number in range(1, 21):
        prove = globals()[f"p{number:02}"]
        right, wrong = bool(prove(load(number, "right"))), bool(prove(load(number, "wrong")))
        good = right and not wrong
        bad += not good
        print(f"{number:02} ok" if good else f"{number:02} NOT PROVED: right holds: {right}, wrong holds: {wrong}")
    sys.exit(bool(bad))
