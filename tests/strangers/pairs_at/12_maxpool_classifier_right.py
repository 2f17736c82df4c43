import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class TextClassifier(nn.Module):
    """A Flax text classifier, ported: kernels are [in, out], heads live in the kernel's axes, max over the sequence."""

    def __init__(self, vocab, dim, heads, layers, hidden, classes, max_len):
        super().__init__()
        self.layers = layers
        head = dim // heads
        p = {"embedding": (vocab, dim), "pos_embedding": (max_len, dim), "out_kernel": (dim, classes)}
        for i in range(layers):
            p |= {f"{i}_{n}_kernel": (dim, heads, head) for n in ("query", "key", "value")}
            p |= {f"{i}_attn_out_kernel": (heads, head, dim), f"{i}_wi_kernel": (dim, hidden)}
            p |= {f"{i}_wo_kernel": (hidden, dim)}
        self.kernels = nn.ParameterDict({n: nn.Parameter(torch.empty(s)) for n, s in p.items()})
        for name, kernel in self.kernels.items():
            fan_in = heads * head if "attn_out" in name else kernel.shape[0]
            nn.init.normal_(kernel, std=1.0 if "embedding" in name else fan_in**-0.5)
        self.out_bias = nn.Parameter(torch.zeros(classes))
        self.norms = nn.ModuleList([nn.LayerNorm(dim, eps=1e-6) for _ in range(2 * layers + 1)])

    def attend(self, i, x, mask):
        q, k, v = (einsum("btd,dhk->bhtk", x, self.kernels[f"{i}_{n}_kernel"]) for n in ("query", "key", "value"))
        scores = einsum("bhqk,bhsk->bhqs", q * q.shape[-1] ** -0.5, k)
        if mask is not None:
            scores = torch.where(mask[:, None, None, :], scores, torch.finfo(scores.dtype).min)
        return einsum("bhqs,bhsk,hkd->bqd", scores.softmax(-1), v, self.kernels[f"{i}_attn_out_kernel"])

    def features(self, tokens, mask):
        x = self.kernels["embedding"][tokens] + self.kernels["pos_embedding"][: tokens.shape[1]]
        for i in range(self.layers):
            x = x + self.attend(i, self.norms[2 * i](x), mask)
            h = F.gelu(self.norms[2 * i + 1](x) @ self.kernels[f"{i}_wi_kernel"])
            x = x + h @ self.kernels[f"{i}_wo_kernel"]
        return self.norms[-1](x)

    def forward(self, tokens, mask=None):
        x = self.features(tokens, mask)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min)
        return x.amax(dim=1) @ self.kernels["out_kernel"] + self.out_bias


def build(c):
    return TextClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.max_len)


subject = Subject(
    kind="classifier",
    name="max-pooled classifier",
    build=build,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "pooling": "max",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
