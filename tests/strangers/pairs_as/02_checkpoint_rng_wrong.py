WHAT = 'blocks are checkpointed with preserve_rng_state=False although they hold dropout: backward recomputes with other dropout masks than the forward had, so gradients are not those of the output (line 45).'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, width, heads, inner, p):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(p), nn.Linear(inner, width))
        self.drop = nn.Dropout(p)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhtk,bhsk->bhts", q, k) / (d // self.heads) ** 0.5
        s = s.masked_fill(~keep[:, None, None, :], torch.finfo(s.dtype).min)
        a = torch.einsum("bhts,bhsk->bthk", s.softmax(-1), v).reshape(b, t, d)
        x = x + self.drop(self.out(a))
        return x + self.drop(self.mlp(self.ln2(x)))


class Encoder(nn.Module):
    gradient_checkpointing = True

    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(
            EncoderBlock(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, keep, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, keep)
        return self.ln_f(x)


subject = Subject(
    kind="encoder",
    build=Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "gelu", "bias": True, "padding_side": "right"},
)
