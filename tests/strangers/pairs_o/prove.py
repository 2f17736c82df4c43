"""Show in plain torch, pair by pair, that the right one holds the fact up to rounding and the wrong one does not.

No check of veriformer is run. A pair's proof gives one number: how far what must agree is apart (0 = agrees).
"""

import copy
import importlib.util
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
SMALL = DrawnConfig(d_model=32, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=40, vocab_size=13, max_len=32)
OTHER = DrawnConfig(d_model=48, num_heads=2, num_key_value_heads=1, num_layers=1, d_ff=20, vocab_size=29, max_len=24,
                    num_classes=5)  # fmt: skip
VOCAB = SMALL.vocab_size


def load(path):
    spec = importlib.util.spec_from_file_location(f"pair_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(subject, config=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return subject.build(config).to(dtype).eval()


def draw(*shape, seed=1, low=0):
    return torch.randint(low, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=2, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gap(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float("inf") if not (a.isfinite().all() and b.isfinite().all()) else (a - b).abs().max().item()


def cached(sizes):
    """Cached decoding in chunks of these sizes against the forward of it all."""

    def proof(s):
        model, tokens = make(s), draw(2, sum(sizes))
        return gap(s.cache(model, list(tokens.split(sizes, 1))), s.forward(model, tokens))

    return proof


def beams(s):
    model, tokens, origin = make(s), draw(3, 6), torch.tensor([1, 0, 1])
    got = s.cache(model, [tokens[:, :3], tokens[:, 3:]], reorder=origin)[:, 3:]
    return gap(got, s.forward(model, torch.cat((tokens[origin, :3], tokens[:, 3:]), 1))[:, 3:])


def stale_weights(s):
    model, x = make(s), normal(2, 3, SMALL.d_model)
    with torch.no_grad():
        s.forward(model, x)
        for p in model.parameters():
            p.mul_(1.5)
        return gap(s.forward(model, x), copied(s, model)(x))


def copied(s, model):
    fresh = make(s)
    fresh.load_state_dict(model.state_dict())
    return lambda *inputs: s.forward(fresh, *inputs)


def temperature(s):
    model, tokens = make(s), draw(2, 4)
    _, probs = s.sampling(model, tokens, 1, temperature=0.5)
    with torch.no_grad():
        expected = (s.forward(model, tokens)[:, -1] / 0.5).softmax(-1)
    return gap(probs[:, 0] / probs[:, 0].sum(-1, keepdim=True), expected)


def full_context(s):
    torch.manual_seed(5)
    model, apart = make(s), 0
    for p in model.parameters():  # unlike tokens in a row, not one token for ever
        torch.nn.init.normal_(p, std=0.5)
    for seed in range(4):
        tokens = draw(2, 10, seed=seed)
        apart += (s.generate(model, tokens, 24, True) != s.generate(model, tokens, 24, False)).sum().item()
    return float(apart)


def left_padded_classifier(s):
    model, tokens = make(s), draw(2, 5)
    padded = torch.cat((draw(2, 3, seed=7), tokens), 1)
    mask = torch.arange(8).expand(2, 8) >= 3
    return gap(s.forward(model, padded, mask), s.forward(model, tokens))


def right_padded_classifier(s):
    model, tokens = make(s), draw(2, 5)
    padded = torch.cat((tokens, draw(2, 3, seed=7)), 1)
    mask = torch.arange(8).expand(2, 8) < 5
    return gap(s.forward(model, padded, mask), s.forward(model, tokens))


def attended(q, k, v, mask):
    r = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1), attn_mask=mask)


def grouped(s, heads=4, groups=2):
    q, k, v = normal(2, heads, 5, 4), normal(2, groups, 5, 4, seed=3), normal(2, groups, 5, 4, seed=4)
    return gap(s.forward(None, q, k, v, causal=True), attended(q, k, v, torch.ones(5, 5).bool().tril()))


def grouped_gradient(s):
    tensors = [normal(2, h, 5, 4, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2))]
    mask, weights = torch.ones(5, 5).bool().tril(), normal(2, 4, 5, 4, seed=9)
    own = torch.autograd.grad((s.forward(None, *tensors, causal=True) * weights).sum(), tensors)
    true = torch.autograd.grad((attended(*tensors, mask) * weights).sum(), tensors)
    return max(gap(a, b) for a, b in zip(own, true))


def alone(s):
    """Each sample of a batch with padding on the right, against the sample by itself."""
    model, tokens, lengths = make(s), draw(3, 7), (4, 7, 5)  # sorted: 1, 2, 0, which is not its own inverse
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    out = s.forward(model, tokens, mask)
    return max(gap(out[i, :n], s.forward(model, tokens[i : i + 1, :n])[0]) for i, n in enumerate(lengths))


def tied(s):
    """One step of SGD; then the head must still be the embedding."""
    model, tokens = make(s), draw(2, 6)
    F.cross_entropy(s.forward(model, tokens).flatten(0, 1), tokens.flatten()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gap(model.lm_head.weight, model.wte.weight)


def saved_and_loaded(s):
    model, tokens = make(s), draw(2, 6)
    return gap(copied(s, copy.deepcopy(model))(tokens), s.forward(model, tokens))


def under_autocast(s):
    """The angles alone: x in float32, positions below 64."""
    model, x = make(s, dtype=torch.float32), torch.ones(1, 1, 64, SMALL.d_head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = s.forward(model, x, torch.arange(64))
    half = SMALL.d_head // 2
    angles = torch.arange(64).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    return gap(got[0, 0], torch.cat((angles.cos() - angles.sin(), angles.cos() + angles.sin()), -1))


def float16_norm(s):
    model, x = make(s, dtype=torch.float16), normal(1, 3, SMALL.d_model, dtype=torch.float16)
    x = x * torch.tensor([0.0, 1.0, 1000.0], dtype=torch.float16)[None, :, None]
    wide = x.double()
    return gap(s.forward(model, x), wide * (wide.square().mean(-1, keepdim=True) + 1e-8).rsqrt())


def published_frequencies(s):
    """The model against itself with tables written down here."""
    model, tokens = make(s), draw(2, 9)
    before, module = s.forward(model, tokens), sys.modules[type(model).__module__]
    original = module.rotary_tables

    def tables(length, spread_over, like):
        angles = torch.arange(length).to(like)[:, None] * torch.tensor([1.0, 0.01, 1.0, 0.01], dtype=like.dtype)
        return angles.cos(), angles.sin()

    module.rotary_tables = tables
    try:
        return gap(before, s.forward(model, tokens))
    finally:
        module.rotary_tables = original


def source_to_target(s):
    model, source, target = make(s), draw(2, 5), draw(2, 6, seed=8)
    return gap(s.cache(model, source, list(target.split([2, 1, 3], 1))), s.forward(model, source, target))


def mean_loss(s):
    logits, labels = normal(2, 7, VOCAB), draw(2, 7)
    labels[0, 1:4] = labels[1, 5:] = -100
    return gap(s.forward(make(s), logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def padded_prompts(s):
    model, tokens, mask = make(s), draw(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[1, :2] = False
    got, want = s.cache(model, list(tokens.split([4, 1, 3], 1)), attention_mask=mask), s.forward(model, tokens, mask)
    return gap(got[mask], want[mask])


def padding_row(s):
    row = make(s).embed_tokens.weight[1]
    return gap(row, torch.zeros_like(row))


PROOFS = {
    1: (cached([4, 3, 1, 2]), 1e-9), 2: (beams, 1e-9), 3: (cached([3, 2, 1, 3]), 1e-9), 4: (stale_weights, 1e-9),
    5: (cached([3, 2, 1]), 1e-9), 6: (temperature, 1e-9), 7: (full_context, 0.5), 8: (left_padded_classifier, 1e-9),
    9: (grouped, 1e-9), 10: (alone, 1e-9), 11: (right_padded_classifier, 1e-9), 12: (tied, 1e-12),
    13: (saved_and_loaded, 1e-12), 14: (under_autocast, 1e-4), 15: (float16_norm, 5e-3), 16: (alone, 1e-9),
    17: (published_frequencies, 1e-6), 18: (source_to_target, 1e-9), 19: (grouped_gradient, 1e-9),
    20: (mean_loss, 1e-9), 21: (padded_prompts, 1e-9), 22: (padding_row, 1e-12),
}  # fmt: skip


def runs(s):
    """Build at two sizes and call once each, in float32."""
    for c in (SMALL, OTHER):
        torch.manual_seed(0)
        model = None if s.build is None else s.build(c)
        tokens = torch.randint(0, c.vocab_size, (2, 6))
        q, kv = torch.randn(2, c.num_heads, 6, c.d_head), torch.randn(2, c.num_key_value_heads, 6, c.d_head)
        inputs = {
            "attention": (q, kv, kv), "feed_forward": (torch.randn(2, 6, c.d_model),),
            "norm": (torch.randn(2, 6, c.d_model),), "rotary": (q, torch.arange(6)), "encoder_decoder": (tokens, tokens),
            "loss": (torch.randn(2, 6, c.vocab_size), tokens),
        }.get(s.kind, (tokens,))  # fmt: skip
        out = s.forward(model, *inputs)
        assert out.isfinite().all()
        if s.kind in ("encoder", "decoder"):
            assert out.shape[:2] == (2, 6)
        if s.kind == "classifier":
            assert out.shape == (2, c.num_classes)


if __name__ == "__main__":
    good, files = True, sorted(HERE.glob("[0-9][0-9]_*.py"))
    assert len(files) == len(PROOFS) == 22
    for path in files:
        module = load(path)
        assert module.right.declares == module.wrong.declares and module.right.kind == module.wrong.kind
        assert module.WHAT and module.CAUSE and 40 <= len(path.read_text().splitlines()) <= 150, path.name
        runs(module.right), runs(module.wrong)
        proof, limit = PROOFS[int(path.name[:2])]
        right, wrong = proof(module.right), proof(module.wrong)
        holds = right <= limit and not wrong <= 10 * limit
        good &= holds
        print(f"{'ok ' if holds else 'BAD'} {path.stem:24} right {right:9.2e}  wrong {wrong:9.2e}  limit {limit:.0e}")
    sys.exit(not good)
