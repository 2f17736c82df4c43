WHAT = "The model's own loss shifts labels by roll, which brings the first label behind the last token: the last position is trained to predict the first token (line 32)"
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class GPTNeoStyle(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.h = c.num_heads
        self.wte, self.wpe = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(c.num_layers)])
        self.out = nn.ModuleList([nn.Linear(d, d) for _ in range(c.num_layers)])
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(approximate="tanh"), nn.Linear(c.d_ff, d))
                                 for _ in range(c.num_layers)])
        self.ln = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1)])
        self.lm_head = nn.Linear(d, c.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        B, T = input_ids.shape
        x = self.wte(input_ids) + self.wpe(torch.arange(T, device=input_ids.device))[None]
        for i, (qkv, out, ff) in enumerate(zip(self.qkv, self.out, self.ff)):
            q, k, v = (z.view(B, T, self.h, -1).transpose(1, 2) for z in qkv(self.ln[2 * i](x)).chunk(3, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).reshape(B, T, -1))
            x = x + ff(self.ln[2 * i + 1](x))
        logits = self.lm_head(self.ln[-1](x))
        loss = None
        if labels is not None:
            shifted = labels.roll(-1, dims=1)
            loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


subject = Subject(
    kind="decoder", name="neo", build=GPTNeoStyle, forward=lambda m, tokens: m(tokens)["logits"],
    loss=lambda m, tokens, labels: m(tokens, labels)["loss"],
    declares={"shifts_labels": True, "ignore_index": -100, "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu_tanh"},
)
