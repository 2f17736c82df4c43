"""A small GPT with the sampler of gpt-fast: argmax of probabilities over noise, so that the device need not be waited for."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def multinomial_sample_one_no_sync(probs):
    q = torch.empty_like(probs).uniform_()
    return torch.argmax(probs / q, dim=-1, keepdim=True)


def logits_to_probs(logits, temperature=1.0, top_k=None):
    logits = logits / max(temperature, 1e-5)
    if top_k is not None:
        best, where = torch.topk(logits, min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, -float("inf")).scatter(-1, where, best)
    return F.softmax(logits, dim=-1)


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_head, ff):
        super().__init__()
        self.n_head = n_head
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, ff, bias=False), nn.Linear(ff, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x):
        bsz, seqlen, dim = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).split(dim, dim=-1)
        q, k, v = (z.view(bsz, seqlen, self.n_head, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.wo(y.transpose(1, 2).reshape(bsz, seqlen, dim))
        return h + self.w2(F.silu(self.w1(self.ffn_norm(h))))


class Transformer(nn.Module):
    def __init__(self, vocab, dim, n_head, n_layer, ff):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_head, ff) for _ in range(n_layer))
        self.norm, self.output = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

    @torch.no_grad()
    def sample(self, idx, steps, **sampling_kwargs):
        drawn_from = []
        for _ in range(steps):
            probs = logits_to_probs(self(idx)[:, -1], **sampling_kwargs)
            idx = torch.cat([idx, multinomial_sample_one_no_sync(probs)], dim=1)
            drawn_from.append(probs)
        return idx, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="gpt-fast",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(
        tokens, steps, temperature=temperature, top_k=top_k
    ),
    declares={"positions": "none", "norm": "rms"},
)
WHAT = 'The noise that the probabilities are divided by is uniform, not exponential (line 10): the argmax is then no draw from them, and likely tokens come too often.'
