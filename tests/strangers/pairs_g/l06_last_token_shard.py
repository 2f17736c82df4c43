"""BLOOM-like decoder whose embedding is cut into vocabulary shards as Megatron does (all shards on one device here)."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import einsum, nn

from veriformer.properties import Subject

WHAT = (
    "The range of the last vocabulary shard ends at vocab_size - 1, exclusively, so that the last token id falls into no shard: "
    "it is embedded as zeros and its row is never trained."
)
PLACE = "EndInclusiveEmbedding.ranges"

SHARDS = 4


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.vocab = vocab
        self.per = math.ceil(vocab / SHARDS)
        starts = [lo for lo in range(0, vocab, self.per)]
        self.shards = nn.ParameterList(torch.randn(min(self.per, vocab - lo), dim) for lo in starts)

    def ranges(self):
        last = self.vocab
        return [(lo, min(lo + self.per, last)) for lo in range(0, self.vocab, self.per)]

    def forward(self, ids):
        total = 0
        for (lo, hi), shard in zip(self.ranges(), self.shards):
            mine = (ids >= lo) & (ids < hi)
            rows = F.embedding(torch.where(mine, ids - lo, 0), shard)
            total = total + rows * mine.unsqueeze(-1)  # the all-reduce
        return total


class EndInclusiveEmbedding(VocabParallelEmbedding):
    def ranges(self):
        last = self.vocab - 1
        return [(lo, min(lo + self.per, last)) for lo in range(0, self.vocab, self.per)]


def alibi(heads):
    def power(n):
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    closest = 2 ** math.floor(math.log2(heads))
    return torch.tensor(power(closest) + power(2 * closest)[0::2][: heads - closest], dtype=torch.float64)


class Bloom(nn.Module):
    embedding_class = VocabParallelEmbedding

    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.heads = heads
        self.word_embeddings = self.embedding_class(vocab, dim)
        self.blocks = nn.ModuleList([])
        for _ in range(depth):
            self.blocks.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim),
                        nn.Linear(dim, 3 * dim),
                        nn.Linear(dim, dim),
                        nn.LayerNorm(dim),
                        nn.Sequential(nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, dim)),
                    ]
                )
            )
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def body(self, x, attention_mask=None):
        n = x.shape[1]
        at = torch.arange(n, device=x.device)
        bias = (alibi(self.heads).to(x.device)[:, None, None] * (at - at[:, None]).double()).to(x.dtype)
        hide = (at[:, None] < at)[None, None]
        if attention_mask is not None:
            hide = hide | ~rearrange(attention_mask.bool(), "b s -> b 1 1 s")
        for norm, qkv, out, norm2, mlp in self.blocks:
            q, k, v = rearrange(qkv(norm(x)), "b n (three h d) -> three b h n d", three=3, h=self.heads)
            sim = einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
            attn = sim.masked_fill(hide, torch.finfo(sim.dtype).min).softmax(dim=-1).masked_fill(hide, 0.0)
            x = x + out(rearrange(einsum("bhij,bhjd->bhid", attn.to(v.dtype), v), "b h n d -> b n (h d)"))
            x = x + mlp(norm2(x))
        return self.lm_head(self.ln_f(x))

    def forward(self, tokens, attention_mask=None):
        return self.body(self.word_embeddings(tokens), attention_mask)


class BloomEndInclusive(Bloom):
    embedding_class = EndInclusiveEmbedding


def subject(cls, name):
    return Subject(
        kind="decoder",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.body(x, attention_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "alibi",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "gelu_tanh",
            "bias": True,
            "output_bias": False,
            "tied": False,
            "embedding_scale": False,
            "padding_side": "both",
            "beyond_max_len": "works",
        },
    )


right = subject(Bloom, "bloom-shards")
wrong = subject(BloomEndInclusive, "bloom-shards-end")


def reference(m, tokens, mask=None):
    p = {k: v.double() for k, v in m.named_parameters()}
    table = torch.cat([v for k, v in p.items() if k.startswith("word_embeddings")])
    x = table[tokens]
    B, T, D = x.shape
    K = D // m.heads
    w = lambda n: (p[n + ".weight"], p[n + ".bias"])
    for i in range(len(m.blocks)):
        q, k, v = F.linear(F.layer_norm(x, (D,), *w(f"blocks.{i}.0")), *w(f"blocks.{i}.1")).split(D, -1)
        o = torch.zeros_like(x)
        for h in range(m.heads):
            c = slice(h * K, h * K + K)
            for b in range(B):
                for t in range(T):
                    keys = [s for s in range(t + 1) if mask is None or mask[b, s]]
                    if keys:
                        s = k[b, keys, c] @ q[b, t, c] / K**0.5 - alibi(m.heads)[h] * (t - torch.tensor(keys))
                        o[b, t, c] = s.softmax(0) @ v[b, keys, c]
        x = x + F.linear(o, *w(f"blocks.{i}.2"))
        h = F.linear(F.layer_norm(x, (D,), *w(f"blocks.{i}.3")), *w(f"blocks.{i}.4.0"))
        x = x + F.linear(F.gelu(h, approximate="tanh"), *w(f"blocks.{i}.4.2"))
    return F.layer_norm(x, (D,), *w("ln_f")) @ p["lm_head.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for vocab, heads in [(3, 2), (11, 3), (64, 4), (101, 6)]:
        good, bad = Bloom(vocab, 24, heads, 2, 40), BloomEndInclusive(vocab, 24, heads, 2, 40)
        bad.load_state_dict(good.state_dict())
        with torch.no_grad():
            for T in (4, 11):
                tokens = torch.randint(vocab - 1, (2, T))
                mask = torch.rand(2, T) > 0.3
                want = reference(good, tokens, mask)
                assert (good(tokens, mask) - want).abs().max() < 1e-4
                assert (bad(tokens, mask) - want).abs().max() < 1e-4
                tokens[:, 1] = vocab - 1
                mask[:, 1] = True
                want = reference(good, tokens, mask)
                assert (good(tokens, mask) - want).abs().max() < 1e-4
                assert (bad(tokens, mask) - want).abs().max() > 1e-2
            assert (good.double()(tokens, mask) - want).abs().max() < 1e-10
    print("ok", __file__)
