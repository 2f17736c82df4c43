"""PaliGemma's text side: make_attn_mask of big_vision, a prefix that sees itself both ways and a suffix that is causal."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PREFIX = 3


def make_attn_mask(input_mask, mask_ar):
    """Token j is seen from i where the running sum of mask_ar at j is not above that at i."""
    cumsum = mask_ar.cumsum(-1)
    attn_mask = cumsum[:, None, :] <= cumsum[:, :, None]
    return attn_mask & input_mask[:, None, :]


class GemmaRMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.scale)


class Block(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.pre_attention_norm, self.pre_ffw_norm = GemmaRMSNorm(d), GemmaRMSNorm(d)
        self.qkv_einsum = nn.Parameter(torch.randn(3, heads, d, d // heads) / d**0.5)
        self.attn_vec_einsum = nn.Parameter(torch.randn(heads, d // heads, d) / d**0.5)
        self.gating, self.linear = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, attn_mask):
        q, k, v = torch.einsum("btd,sndh->sbnth", self.pre_attention_norm(x), self.qkv_einsum)
        logits = torch.einsum("bnth,bnsh->bnts", q * q.shape[-1] ** -0.5, k)
        seen = attn_mask[:, None]
        probs = logits.masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
        x = x + torch.einsum("bnth,nhd->btd", probs @ v, self.attn_vec_einsum)
        return x + self.linear(F.gelu(self.gating(self.pre_ffw_norm(x)), approximate="tanh"))


class PrefixLM(nn.Module):
    def __init__(self, vocab, d, heads, layers, ff, max_len):
        super().__init__()
        self.input_embedding = nn.Embedding(vocab, d)
        self.positions = nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(Block(d, heads, ff) for _ in range(layers))
        self.final_norm = GemmaRMSNorm(d)
        self.decode = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, input_mask=None):
        if input_mask is None:
            input_mask = torch.ones_like(tokens, dtype=torch.bool)
        mask_ar = torch.zeros_like(tokens)
        mask_ar[:, PREFIX + 1 :] = 1
        attn_mask = make_attn_mask(input_mask, mask_ar)
        x = self.input_embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, attn_mask)
        return self.decode(self.final_norm(x))


subject = Subject(
    kind="decoder",
    name="prefix LM",
    build=lambda c: PrefixLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"prefix": PREFIX, "positions": "learned", "norm": "rms", "norm_placement": "pre", "activation": "gelu_tanh",
              "padding_side": "right"},
)
WHAT = 'The causal part begins one token late (line 58): the first token behind the prefix of 3 is joined to it, so that the prefix sees a token that is to be predicted.'
