"""GPT-2 in the style of nanoGPT (a dataclass config, `c_attn`, `c_proj`, tied head), with the hook for the temperature of
the scores that Stanford's Mistral training code has."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The scores of layer i are divided by i + 1 besides (`scale_attn_by_inverse_layer_idx` was left on, without the float32 "
    "trick that undoes it): the first layer is right, the second has half and the third a third of the declared scale "
    "1/sqrt(d_head), so that deeper layers attend ever more evenly."
)
PLACE = "WrongAttention.temperature"


@dataclass
class GPTConfig:
    block_size: int = 2048
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int = 3072
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.layer_idx = config.n_head, layer_idx

    def temperature(self, head_size):
        return 1.0 / math.sqrt(head_size)

    def forward(self, x, keep):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, self.n_head, -1).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * self.temperature(q.size(-1))
        att = F.softmax(att.masked_fill(~keep, torch.finfo(att.dtype).min), dim=-1) * keep
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class WrongAttention(CausalSelfAttention):
    def temperature(self, head_size):
        return 1.0 / math.sqrt(head_size) / float(self.layer_idx + 1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config, attention, layer_idx):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = attention(config, layer_idx), MLP(config)

    def forward(self, x, keep):
        x = x + self.attn(self.ln_1(x), keep)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, attention=CausalSelfAttention):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config, attention, i) for i in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, attention_mask=None):
        b, t = idx.size()
        keep = torch.ones(t, t, dtype=torch.bool, device=idx.device).tril()[None, None]
        if attention_mask is not None:
            keep = keep & attention_mask.bool()[:, None, None, :]
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(t, device=idx.device)))
        for block in self.h:
            x = block(x, keep)
        return self.lm_head(self.ln_f(x))


def make(attention):
    def build(c):
        sizes = dict(vocab_size=c.vocab_size, n_layer=c.num_layers, n_head=c.num_heads, n_embd=c.d_model, n_inner=c.d_ff)
        return GPT(GPTConfig(dropout=c.dropout, **sizes), attention)

    return Subject(
        kind="decoder",
        name="nanoGPT-like GPT-2",
        build=build,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"num_layers": [2, 3]},
        declares={
            "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
            "residual": True, "activation": "gelu_tanh", "bias": True, "norm_bias": True, "output_bias": False,
            "tied": True, "attention_scale": "1/sqrt(d_head)", "embedding_scale": False, "padding_side": "right",
        },
    )  # fmt: skip


right, wrong = make(CausalSelfAttention), make(WrongAttention)


if __name__ == "__main__":
    import numpy as np

    def slow(model, tokens, real):
        """One sample, one head, one query at a time, in numpy."""
        w = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}

        def norm(x, n):
            return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w[n + ".weight"] + w[n + ".bias"]

        def lin(x, n):
            return w[n + ".weight"] @ x + w[n + ".bias"]

        out = np.zeros((*tokens.shape, w["wte.weight"].shape[0]))
        for b, row in enumerate(tokens.tolist()):
            xs = [w["wte.weight"][t] + w["wpe.weight"][i] for i, t in enumerate(row)]
            d = xs[0].shape[0]
            for i, block in enumerate(model.h):
                p, hs = f"h.{i}.", block.attn.n_head
                qkv = [lin(norm(x, p + "ln_1"), p + "attn.c_attn") for x in xs]
                new = []
                for t, x in enumerate(xs):
                    y = np.zeros(d)
                    for h in range(hs):
                        rows = slice(h * d // hs, (h + 1) * d // hs)
                        seen = [s for s in range(t + 1) if real[b, s]]
                        e = [math.exp(qkv[t][:d][rows] @ qkv[s][d : 2 * d][rows] / math.sqrt(d // hs)) for s in seen]
                        y[rows] = sum(a * qkv[s][2 * d :][rows] for a, s in zip(e, seen)) / sum(e)
                    new.append(x + lin(y, p + "attn.c_proj"))
                xs = []
                for x in new:
                    a = lin(norm(x, p + "ln_2"), p + "mlp.c_fc")
                    a = 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
                    xs.append(x + lin(a, p + "mlp.c_proj"))
            out[b] = [w["wte.weight"] @ norm(x, "ln_f") for x in xs]
        return torch.from_numpy(out)

    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    good, bad = right.build(c).eval(), wrong.build(c).eval()
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.8 if p.dim() > 1 else 1.0)
    bad.load_state_dict(good.state_dict())
    tokens = torch.randint(0, 11, (2, 7))
    mask = torch.arange(7)[None] < torch.tensor([7, 5])[:, None]
    truth = slow(good, tokens, mask)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        a, b = (m.to(dtype)(tokens, mask) for m in (good, bad))
        far = [(y - truth)[mask].abs().max().item() for y in (a, b)]
        print(dtype, "from the definition: right %.1e wrong %.2f" % tuple(far), "spread", a.std().item(), b.std().item())
        assert far[0] < small and far[1] > 0.1
        later = tokens.clone()
        later[:, 4:] = (later[:, 4:] + 1) % 11
        for m in (good, bad):  # neither looks ahead, neither sees padding
            assert (m(later) - m(tokens))[:, :4].abs().max() < small
            assert (m(tokens[1:, :5]) - m(tokens, mask)[1:, :5]).abs().max() < small
        one = DrawnConfig(d_model=12, num_heads=3, num_layers=1)
        first, other = right.build(one).to(dtype), wrong.build(one).to(dtype)
        other.load_state_dict(first.state_dict())
        assert torch.equal(first(tokens), other(tokens))  # one layer alone does not show it
