
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def sinusoid(pos, d):
    rate = 10000.0 ** (-torch.arange(0, d, 2, device=pos.device, dtype=pos.dtype) / d)
    a = pos[..., None] * rate
    return torch.stack((a.sin(), a.cos()), -1).flatten(-2)[..., :d]


def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.proj = h, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, ok):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        ok = ok | ~ok.any(-1, keepdim=True)  # a row without keys takes the mean: finite
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, ok):
        x = x + self.drop(self.attn(self.n1(x), ok))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        x = x + sinusoid(torch.arange(x.shape[1], device=x.device, dtype=x.dtype), x.shape[-1])
        ok = visible(x, mask)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], ok))
        return self.norm(states[-2 if self.bug else -1])


WHAT = 'The last but one hidden state is returned, so the last layer computes and has parameters but has no effect and no gradient.'
PLACE = 'encoder stack, choice of the returned hidden state'


def make(bug):
    return Subject(
        kind="encoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )


right, wrong = make(False), make(True)
