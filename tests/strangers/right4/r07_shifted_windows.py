"""A Swin-like encoder over sequences: windows of 4 that are moved by 2 in every second layer, a relative bias per head within a
window, gathered by padding, rolling and a mask of regions as in the image model, then cut back.

Why it is right: two positions may see each other if they lie in the same (moved) window; rolling joins the ends, and the mask
of regions parts them again. Lengths that are no multiple of 4 are padded inside. Below: against a mask written pair by
pair, in float64, for all lengths up to 13, with padding on the right; two layers reach beyond a window."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WIN, SHIFT = 4, 2


class WindowAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.scale = heads, (d // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * WIN - 1, heads) * 0.02)

    def forward(self, x, allowed):
        """x [B, N, W, D] of N windows, allowed [B, N, W, W]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        at = torch.arange(WIN, device=x.device)
        bias = self.relative_position_bias_table[at[:, None] - at[None] + WIN - 1].permute(2, 0, 1)
        scores = (q * self.scale) @ k.mT + bias
        weights = scores.masked_fill(~allowed[:, :, None], torch.finfo(scores.dtype).min).softmax(-1) * allowed[:, :, None]
        return self.proj((weights @ v).transpose(2, 3).flatten(3))


class Block(nn.Module):
    def __init__(self, c, shift):
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = WindowAttention(c.d_model, c.num_heads)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, real):
        t = x.shape[1]
        extra = -t % WIN if not self.shift else -(t - self.shift) % WIN + WIN - self.shift
        h = F.pad(self.norm1(x), (0, 0, 0, extra))
        real = F.pad(real, (0, extra))
        region = torch.zeros(t + extra, dtype=torch.long, device=x.device)
        if self.shift:
            region[: self.shift] = 1  # what rolls over to the end
            h, real, region = h.roll(-self.shift, 1), real.roll(-self.shift, 1), region.roll(-self.shift)
        region = region.view(-1, WIN)
        same = region[:, :, None] == region[:, None]
        allowed = same & real.unflatten(1, (-1, WIN))[:, :, None]
        h = self.attn(h.unflatten(1, (-1, WIN)), allowed).flatten(1, 2)
        if self.shift:
            h = h.roll(self.shift, 1)
        x = x + h[:, :t]
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, SHIFT * (i % 2)) for i in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, real)
        return self.norm(x)


def make(**declares):
    return Subject(
        kind="encoder", name="shifted windows", build=Encoder, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    )  # fmt: skip


declared = make(
    causal=False, sparse=True, positions="other", norm="layer", norm_placement="pre", final_norm=True, residual=True,
    activation="gelu", bias=True, attention_scale="1/sqrt(d_head)", padding_side="right", structure="other",
    embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    model = Encoder(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.5)
    w = {k: v.double() for k, v in model.state_dict().items()}

    def slow(row):
        def lin(x, n):
            return x @ w[n + ".weight"].T + w[n + ".bias"]

        def norm(x, n):
            return F.layer_norm(x, (12,), w[n + ".weight"], w[n + ".bias"])

        x = w["embed.weight"][row]
        for l in range(3):
            p, heads = f"blocks.{l}.", []
            q, k, v = lin(norm(x, p + "norm1"), p + "attn.qkv").chunk(3, 1)
            for h in range(3):
                r = slice(4 * h, 4 * h + 4)
                s = q[:, r] @ k[:, r].T / 2
                for i in range(len(row)):
                    for j in range(len(row)):
                        if (i + SHIFT * (l % 2)) // WIN != (j + SHIFT * (l % 2)) // WIN:
                            s[i, j] = -torch.inf
                        else:
                            s[i, j] += w[p + "attn.relative_position_bias_table"][i - j + WIN - 1, h]
                heads.append(s.softmax(1) @ v[:, r])
            x = x + lin(torch.cat(heads, 1), p + "attn.proj")
            x = x + lin(F.gelu(lin(norm(x, p + "norm2"), p + "mlp.0")), p + "mlp.2")
        return norm(x, "norm")

    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        worst = 0.0
        for length in range(1, 14):
            tokens = torch.randint(0, 11, (2, length + 3))
            mask = torch.arange(length + 3)[None] < torch.tensor([length + 3, length])[:, None]
            y = model.to(dtype)(tokens, mask)
            worst = max(worst, *((y[b][mask[b]] - slow(tokens[b][mask[b]])).abs().max().item() for b in (0, 1)))
        tokens = torch.randint(0, 11, (1, 13))
        other = tokens.clone()
        other[0, 0] = (other[0, 0] + 1) % 11
        moved = (model(other) - model(tokens)).abs().amax((0, 2)) > 1e-6
        print(dtype, f"definition {worst:.1e}, seen of position 0:", moved.long().tolist())
        assert worst < small and moved[3] and moved[5] and not moved[8:].any()
