from dataclasses import dataclass
from typing import Optional
import torch
from torch import nn, Tensor


@dataclass
class Output:
    loss: Optional[Tensor]
    logits: Tensor
    hidden: Tensor


class CausalTransformer(nn.Module):
    def __init__(self, n_tokens: int, model_dim: int = 256, n_heads: int = 4, n_layers: int = 4, ff_dim: int = 1024,
                 max_seq: int = 128, drop: float = 0.1):
        super().__init__()
        self.emb = nn.Embedding(n_tokens, model_dim)
        self.pe = nn.Embedding(max_seq, model_dim)
        layer = nn.TransformerEncoderLayer(model_dim, n_heads, ff_dim, drop, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, n_layers, norm=nn.LayerNorm(model_dim), enable_nested_tensor=False)
        self.proj = nn.Linear(model_dim, n_tokens)

    def forward(self, tokens: Tensor, targets: Optional[Tensor] = None) -> Output:
        T = tokens.shape[1]
        x = self.emb(tokens) + self.pe(torch.arange(T, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=tokens.device).to(x.dtype)
        h = self.blocks(x, mask=mask, is_causal=True)
        logits = self.proj(h)
        loss = None if targets is None else nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        return Output(loss, logits, h)
