"""Shows in plain torch that each wrong file is wrong and each right one right."""
import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(number, side):
    (path,) = HERE.glob(f"{number:02d}_*_{side}.py")
    name = path.stem
    spec = importlib.util.spec_from_file_location("m" + name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["m" + name] = module
    spec.loader.exec_module(module)
    return module


def close(a, b, tol=1e-9):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and float((a - b).abs().max()) < tol


def lively(model, std=0.6):
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * (std if p.dim() > 1 else 0.3) + (p.dim() == 1) * 0.7)
    return model.double()


def p01(m):
    torch.manual_seed(0)
    good = True
    for dtype, tol in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        x = 4 * torch.randn(3, 5, 7, dtype=dtype)
        x[0, 0, 2:4] = -math.inf
        for dim in (-1, 1):
            if dim == -1 or dtype == torch.float64:
                good &= close(m.subject.forward(None, x, dim), x.softmax(dim), tol)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 6, dtype=torch.float64)
    (a,) = torch.autograd.grad((m.softmax(x) * w).sum(), x)
    (b,) = torch.autograd.grad((x.softmax(-1) * w).sum(), x)
    return good and close(a, b)


def p02(m):
    torch.manual_seed(0)
    good = True
    for t, s, causal in ((5, 5, True), (19, 19, True), (16, 24, True), (17, 9, False)):
        q = torch.randn(2, 4, t, 6, dtype=torch.float64)
        k, v = torch.randn(2, 2, s, 6, dtype=torch.float64), torch.randn(2, 2, s, 5, dtype=torch.float64)
        mask = torch.rand(2, 1, t, s) > 0.2
        mask[..., 0] = True
        for given in (None, mask):
            allowed = torch.ones(2, 1, t, s, dtype=torch.bool)
            allowed = allowed.tril() if causal else allowed
            allowed = allowed if given is None else allowed & given
            want = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=allowed)
            good &= close(m.attend(None, q, k, v, given, causal), want)
    return good


def p03(m):
    torch.manual_seed(0)
    a = m.StreamingAttention(8, 2).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    good = True
    for keep in (None, torch.tensor([[True] * 9, [True] * 6 + [False] * 3])):
        q, k, v = (y.view(2, 9, 2, 4).transpose(1, 2) for y in a.to_qkv(x).chunk(3, -1))
        i, j = torch.arange(9)[:, None], torch.arange(9)[None]
        seen = (j <= i) & ((i - j < m.WINDOW) | (j < m.SINKS))
        if keep is not None:
            seen = seen & keep[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        want = a.to_out(y.transpose(1, 2).reshape(2, 9, 8))
        got = a(x, keep)
        real = torch.ones(2, 9, dtype=torch.bool) if keep is None else keep
        good &= close(got[real], want[real])
    return good


def p04(m):
    torch.manual_seed(0)
    a = m.ChunkedCrossAttention(8, 2).double()
    x, memory = torch.randn(3, 7, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    good = True
    for given in (None, mask):
        q, k, v = (a.split_heads(f) for f in (a.q_proj(x), a.k_proj(memory), a.v_proj(memory)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if given is None else given[:, None, None])
        good &= close(a(x, memory, given), a.out_proj(y.transpose(1, 2).reshape(3, 7, 8)))
        good &= close(a(x, memory, given)[1:2], a(x[1:2], memory[1:2], None if given is None else given[1:2]))
    return good


def p05(m):
    got = m.FusedSinusoids(8)(11)
    p = torch.arange(11, dtype=torch.float64)[:, None]
    w = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    want = torch.zeros(11, 8, dtype=torch.float64)
    want[:, 0::2], want[:, 1::2] = torch.sin(p * w), torch.cos(p * w)
    return close(got, want, 1e-6)


def p06(m):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 5, 9, 40])
    got = m.RoPE(8)(x, positions)
    w = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(6, 4).double(), positions[:, None] * w)
    return close(got, torch.cat([turned.real, turned.imag], -1))


def p07(m):
    """bucket by bucket: the borders of the logarithmic part, from the formula, one distance at a time"""
    bias = m.RelativeBias(2)
    n = 300
    rel = torch.arange(-n, n + 1)
    want = []
    for r in rel.tolist():
        side, d = (16 if r > 0 else 0), abs(r)
        if d >= 8:
            d = min(15, 8 + int(math.log(d / 8) / math.log(128 / 8) * 8))
        want.append(side + d)
    same = torch.equal(bias.bucket(rel), torch.tensor(want))
    got = bias(5, 9)
    return same and torch.equal(got[1, 4, 0], bias.relative_attention_bias.weight[4, 1])


def p08(m):
    torch.manual_seed(0)
    good = True
    for width in (8, 12, 20):
        norm = m.TritonRMSNorm(width).double()
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
        x = torch.randn(2, 3, width, dtype=torch.float64)
        good &= close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)
    return good


def p09(m):
    good = True
    for seed in range(6):
        torch.manual_seed(seed)
        moe = m.SortedMoE(8, 12).double()
        x = torch.randn(1, 2, 8, dtype=torch.float64)
        gates = moe.dense_router(x)
        want = sum(gates[..., e, None] * moe.experts[e](x) for e in range(6))
        good &= close(moe(x), want) and close(moe(x)[:, :1], moe(x[:, :1]))
    return good


def p10(m):
    torch.manual_seed(0)
    block = m.EncoderBlock(8, 2, 16).double()
    x = 3 * torch.randn(2, 5, 8, dtype=torch.float64) + 1
    h = block.norm1(x)
    q, k, v = F.linear(h, block.attn.in_proj_weight, block.attn.in_proj_bias).chunk(3, -1)
    q, k, v = (y.view(2, 5, 2, 4).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)
    s = x + block.attn.out_proj(y)
    return close(block(x), s + block.mlp(block.norm2(s)))


def p11(m):
    torch.manual_seed(0)
    model = m.Encoder(11, 8, 2, 2, 16, 12, 0.3)
    tokens = torch.randint(11, (2, 6))
    model.train()
    outs = [model(tokens) for _ in range(8)]
    fresh = len({round(float(o.sum() + o[0, 0, 0] * 7), 5) for o in outs}) == 8
    model.eval()
    return fresh and torch.equal(model(tokens), model(tokens))


def p12(m):
    torch.manual_seed(0)
    model = m.GPT(9, 8, 2, 1, 16).eval()
    tokens = torch.randint(9, (1, 3)).expand(4000, 3)
    good = True
    for temperature, k in ((1.0, None), (1.0, 3), (2.0, 2)):
        out, probs = model.sample(tokens, 1, temperature, k)
        p = probs[0, 0].double() / probs[0, 0].double().sum()
        share = torch.bincount(out[:, -1], minlength=9).double() / 4000
        logits = model(tokens[:1])[0, -1].double() / temperature
        if k is not None:
            logits = logits.masked_fill(logits < logits.topk(k).values[-1], -math.inf)
        good &= close(p, logits.softmax(-1), 1e-5) and float((share - p).abs().max()) < 0.05
        good &= bool((share[p == 0] == 0).all())
    return good


def p13(m):
    torch.manual_seed(0)
    model = lively(m.LM(11, 8, 2, 2, 24))
    tokens = torch.randint(11, (3, 13))
    want = model(tokens)
    good = True
    for sizes in ([13], [3, 4, 6], [1] * 13, [4, 1, 8]):
        good &= close(m.cached(model, list(tokens.split(sizes, 1))), want)
    order = torch.tensor([2, 0, 0])
    mixed = torch.cat([tokens[order, :3], tokens[:, 3:]], 1)
    got = m.cached(model, [tokens[:, :3], tokens[:, 3:7], tokens[:, 7:]], order)
    return good and close(got[:, 3:], model(mixed)[:, 3:])


def p14(m):
    """a batch gives each sample what it gives alone (up to what stands behind the end)"""
    good, ended = True, 0
    for seed in range(12):
        torch.manual_seed(seed)
        model = m.Translator(6, 8, 2, 1, 16, 16).double().eval()
        with torch.no_grad():
            model.project.weight.mul_(2)
        source = torch.randint(6, (4, 5))
        whole = model.translate(source, 8)
        for b in range(4):
            alone = model.translate(source[b : b + 1], 8)[0]
            # by hand, from forward
            ids = [m.BOS]
            while len(ids) < 9 and m.EOS not in ids[1:]:
                ids.append(int(model(source[b : b + 1], torch.tensor([ids]))[0, -1].argmax()))
            padded = F.pad(torch.tensor(ids), (0, 9 - len(ids)))
            ended += m.EOS in ids[1:]
            good &= torch.equal(F.pad(alone, (0, 9 - len(alone))), padded)
            good &= torch.equal(F.pad(whole[b], (0, 9 - whole.shape[1])), padded)
    assert 0 < ended < 48
    return good


def p15(m):
    torch.manual_seed(0)
    pool = m.AttentionPooling(8).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    want = torch.stack([(pool.score(r[k]).softmax(0) * r[k]).sum(0) for r, k in zip(x, mask)])
    good = close(pool(x, mask), want)
    model = m.ReviewClassifier(11, 8, 2, 1, 16, 12, 3).double()
    tokens = torch.randint(11, (2, 5))
    other = tokens.clone()
    other[1, 3:] = (other[1, 3:] + 1) % 11
    good &= close(model(tokens, mask), model(other, mask)) and close(model(tokens, mask)[1:], model(tokens[1:, :3]))
    model(tokens, mask).square().sum().backward()
    return good and float(model.pool.score[0].weight.grad.abs().max()) > 1e-9


def p16(m):
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 9, dtype=torch.float64)
    labels = torch.randint(9, (3, 7))
    good = close(m.causal_lm_loss(logits, labels), F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    labels[0, :3], labels[1, 5:], labels[2, 2] = -100, -100, -100
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return good and close(m.causal_lm_loss(logits, labels), want)


def p17(m):
    tokens = torch.randint(2, 1000, (16, 400), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = m.CLS
    inputs, labels = m.MLMCollator(1000)(tokens, 3)
    chosen = labels != -100
    swapped = chosen & (inputs != m.MASK) & (inputs != tokens)
    good = bool((labels[chosen] == tokens[chosen]).all()) and bool((inputs[~chosen] == tokens[~chosen]).all())
    good &= not bool(chosen[:, 0].any()) and abs(chosen.float().mean() - 0.15) < 0.02
    good &= abs(swapped.sum() / chosen.sum() - 0.1) < 0.03
    per_row = [len(set(inputs[b][swapped[b]].tolist())) / max(1, int(swapped[b].sum())) for b in range(16)]
    return good and min(per_row) > 0.6


def p18(m):
    s = m.InverseSquareRoot(64)
    return all(
        abs(s.step_update(t) - 64**-0.5 * min(t**-0.5, t * 40**-1.5)) < 1e-12 for t in (1, 7, 39, 40, 41, 60, 400, 10000)
    )


def p19(m):
    model = m.Transformer(11, 8, 2, 2, 16)
    groups = m.optimizer_groups(model)
    decay = {id(p) for g in groups if g["weight_decay"] > 0 for p in g["params"]}
    exempt = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    want_decay, want_exempt = set(), set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            matrix = name == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
            (want_decay if matrix else want_exempt).add(id(p))
    return decay == want_decay and exempt == want_exempt


def p20(m):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    t = m.WordPiece(m.PIECES)
    theirs = Tokenizer(models.WordPiece(t.vocab, unk_token="[UNK]"))
    theirs.normalizer = normalizers.Lowercase()
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    texts = ["The attention is unaffable.", "transformers tokenize, tokens", "the quiz", "thex tenz tokenized", "a,b. transformx"]
    return all(t.encode(text) == theirs.encode(text).ids for text in texts)


def main():
    bad = 0
    for n in range(1, 21):
        proof = globals()[f"p{n:02d}"]
        right = bool(proof(load(n, "right")))
        wrong = bool(proof(load(n, "wrong")))
        ok = right and not wrong
        bad += not ok
        print(f"{n:02d} {'ok' if ok else f'NOT OK: right holds {right}, wrong holds {wrong}'}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
