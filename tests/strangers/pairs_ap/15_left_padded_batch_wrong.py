WHAT = "In cached steps the position is the length of the cache, padding included, while the prompt's are counted over real tokens: behind left padding positions jump by the number of pads (line 59, the arange below it)."
"""OPT-like decoder; generation was batched, so that prompts of different lengths are padded on the left."""
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class OPTAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scaling = (embed_dim // num_heads) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.q_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, visible: Tensor, saved: dict | None) -> Tensor:
        def heads(z: Tensor) -> Tensor:
            return z.view(z.shape[0], z.shape[1], self.num_heads, -1).transpose(1, 2)

        q, k, v = heads(self.q_proj(x) * self.scaling), heads(self.k_proj(x)), heads(self.v_proj(x))
        if saved is not None:
            if "k" in saved:
                k, v = torch.cat([saved["k"], k], dim=2), torch.cat([saved["v"], v], dim=2)
            saved["k"], saved["v"] = k, v
        scores = (q @ k.transpose(2, 3)).masked_fill(~visible[:, None], float("-inf"))
        context = F.softmax(scores, dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))


class OPTLayer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn = OPTAttention(c.d_model, c.num_heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor, visible: Tensor, saved: dict | None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), visible, saved)
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class OPT(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(OPTLayer(c) for _ in range(c.num_layers))
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, state: list[dict] | None = None) -> Tensor:
        """`attention_mask` [B, past + T]: of all tokens so far, these included."""
        batch, length = tokens.shape
        past = state[0]["k"].shape[2] if state and "k" in state[0] else 0
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + length, dtype=torch.bool, device=tokens.device)
        attention_mask = attention_mask.bool()
        if past:
            positions = torch.arange(past, past + length, device=tokens.device).expand(batch, -1)
        else:
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        query = torch.arange(past, past + length, device=tokens.device)[:, None]
        key = torch.arange(past + length, device=tokens.device)[None, :]
        # a padded query sees itself, so that no row of the softmax is empty
        visible = ((key <= query) & attention_mask[:, None, :]) | (key == query)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, visible, None if state is None else state[i])
        return self.lm_head(self.final_layer_norm(x))


def incremental(model, chunks, attention_mask=None):
    state = [{} for _ in model.layers]
    outputs, done = [], 0
    for chunk in chunks:
        done += chunk.shape[1]
        outputs.append(model(chunk, None if attention_mask is None else attention_mask[:, :done], state))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="OPT, batched generation",
    build=OPT,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=incremental,
    mask_forms=("padding",),
    declares={
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
    },
)
