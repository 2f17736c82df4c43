WHAT = "decoder whose feed-forward is a shared expert, gated by a sigmoid, beside 4 routed ones of which 2 are taken; experts in one stacked weight, tokens dispatched by index_add_; query and key RMSNorm"
import torch
from torch import nn
from torch.nn import functional as F

EXPERTS, TOP = 4, 2


class Experts(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.gate = nn.Linear(d, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.empty(EXPERTS, d, 2 * ff).normal_(std=d**-0.5))
        self.w_out = nn.Parameter(torch.empty(EXPERTS, ff, d).normal_(std=ff**-0.5))
        self.shared_in, self.shared_out = nn.Linear(d, 2 * ff, bias=False), nn.Linear(ff, d, bias=False)
        self.shared_gate = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        p = self.gate(flat).softmax(-1)
        weight, chosen = p.topk(TOP, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        a, b = self.shared_in(flat).chunk(2, -1)
        out = self.shared_gate(flat).sigmoid() * self.shared_out(F.silu(a) * b)
        for e in range(EXPERTS):
            row, slot = (chosen == e).nonzero(as_tuple=True)
            if row.numel() == 0:
                continue
            a, b = (flat[row] @ self.w_in[e]).chunk(2, -1)
            out = out.index_add(0, row, ((F.silu(a) * b) @ self.w_out[e]) * weight[row, slot, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.qn, self.kn = nn.RMSNorm(d // h, eps=1e-6), nn.RMSNorm(d // h, eps=1e-6)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.moe = Experts(d, ff)

    def forward(self, x, cos, sin, seen):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        q, k = self.qn(q), self.kn(k)

        def turn(t):
            return t * cos + torch.roll(t, t.shape[-1] // 2, -1) * sin

        w = (turn(q) @ turn(k).mT) / (D // self.h) ** 0.5
        w = w.masked_fill(~seen, torch.finfo(w.dtype).min).softmax(-1)
        x = x + self.o((w @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.moe(self.n2(x))


class MoE(nn.Module):
    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        self.k = d // h
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, ff) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-6), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None):
        T = ids.shape[1]
        x = self.embed(ids)
        t = torch.arange(T, device=ids.device).double()[:, None]
        a = t * 10000.0 ** (-torch.arange(0, self.k, 2, device=ids.device).double() / self.k)
        cos = torch.cat([a.cos(), a.cos()], -1).to(x.dtype)
        sin = torch.cat([-a.sin(), a.sin()], -1).to(x.dtype)  # roll by half, the first half with a minus
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, None]
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        return self.head(self.norm(x))


from veriformer.properties import Subject


def build(c):
    return MoE(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="shared expert", build=build, forward=forward,
    declares={"positions": "rotary", "layout": "halves", "query_key_norm": True, "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "tied": False, "bias": False, "output_bias": False, "activation": "other",
              "structure": "other", "norm_topk_prob": True, "padding_side": "both", "batch_coupled": False},
)
