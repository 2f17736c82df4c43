"""A ViT with registers (Darcet et al.) that pools the mean of its patches, in timm's manner (`global_pool="avg"`,
`num_prefix_tokens`); patches come as ids of a codebook and images of different sizes are padded."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The mask has been lengthened by ones for the registers, for attention, and the mean of the patches is divided by the "
    "sum of that mask: patches are summed, patches and registers are counted. The pooled state of n patches is n / (n + 3) "
    "of their mean, so that small images give smaller logits before the bias. Padding, order of batch and training are as "
    "they should be."
)
PLACE = "Wrong.count"
REGISTERS = 3


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x, mask):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.masked_fill(~mask[:, None, None], torch.finfo(attn.dtype).min).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RegisterViT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_prefix_tokens = REGISTERS
        self.patch_embed = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embed = nn.Parameter(torch.randn(1, 2048, c.d_model) * 0.02)
        self.reg_token = nn.Parameter(torch.randn(1, REGISTERS, c.d_model) * 0.02)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def count(self, patches, everything):
        return patches.sum(1, keepdim=True)

    def forward(self, patches, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(patches)
        attention_mask = attention_mask.bool()
        x = self.patch_embed(patches) + self.pos_embed[:, : patches.shape[1]]
        x = torch.cat((self.reg_token.expand(len(x), -1, -1).to(x.dtype), x), 1)
        mask = F.pad(attention_mask, (self.num_prefix_tokens, 0), value=True)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)[:, self.num_prefix_tokens :]
        count = self.count(attention_mask, mask).clamp(min=1).to(x.dtype)
        return self.head((x * attention_mask[..., None]).sum(1) / count)


class Wrong(RegisterViT):
    def count(self, patches, everything):
        return everything.sum(1, keepdim=True)


def make(cls):
    return Subject(
        kind="classifier",
        name="ViT with registers",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={
            "pooling": "mean", "extra_tokens": REGISTERS, "positions": "learned", "norm_placement": "pre",
            "final_norm": True, "activation": "gelu", "padding_side": "right", "output_bias": True,
        },
    )  # fmt: skip


right, wrong = make(RegisterViT), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.5)
    bad.load_state_dict(good.state_dict())
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        good, bad = good.to(dtype), bad.to(dtype)
        for length in (1, 2, 5, 20):
            tokens = torch.randint(0, 11, (3, length + 4))
            mask = torch.arange(length + 4)[None] < torch.tensor([length, length + 4, length + 2])[:, None]
            states = []
            handle = good.norm.register_forward_hook(lambda m, i, o: states.append(o))
            y = good(tokens, mask)
            handle.remove()
            mean = torch.stack([states[0][b, 3 : 3 + mask[b].sum()].double().mean(0) for b in range(3)])
            truth = mean @ good.head.weight.double().T + good.head.bias.double()
            z = bad(tokens, mask)
            far = (y - truth).abs().max().item(), (z - truth).abs().max().item()
            print(dtype, length, "right %.1e wrong %.2f" % far)
            assert far[0] < small and far[1] > 0.01
            shrunk = (z - bad.head.bias) * ((mask.sum(1) + 3).double() / mask.sum(1))[:, None] + bad.head.bias
            assert (shrunk - truth).abs().max() < small * 100  # n / (n + 3), nothing else
            for m in (good, bad):
                assert (m(tokens[:1, :length]) - m(tokens, mask)[:1]).abs().max() < small
