"""GPT-2 as in Hugging Face, with a cache object; beam search got a reorder of the cache that saves memory."""
import torch
from torch import nn

from veriformer.properties import Subject


class LayerCache:
    def __init__(self):
        self.key = self.value = None

    def update(self, key, value):
        self.key = key if self.key is None else torch.cat([self.key, key], dim=-2)
        self.value = value if self.value is None else torch.cat([self.value, value], dim=-2)
        return self.key, self.value

    def reorder(self, beam_idx):
        """Row b of the cache becomes what row beam_idx[b] was."""
        self.key = self.key.index_select(0, beam_idx)
        self.value = self.value.index_select(0, beam_idx)


class GPT2Attention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def _split(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, hidden_states, layer_past=None):
        query, key, value = (self._split(t) for t in self.c_attn(hidden_states).chunk(3, dim=-1))
        if layer_past is not None:
            key, value = layer_past.update(key, value)
        t, s = query.size(-2), key.size(-2)
        weights = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5
        causal = torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)
        weights = torch.where(causal, weights, torch.finfo(weights.dtype).min).softmax(dim=-1)
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).flatten(2)
        return self.c_proj(context)


class GPT2Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = GPT2Attention(c.d_model, c.num_heads)
        self.c_fc, self.c_proj = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states, layer_past=None):
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), layer_past)
        return hidden_states + self.c_proj(self.act(self.c_fc(self.ln_2(hidden_states))))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([GPT2Block(c) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, past_key_values=None):
        past = 0
        if past_key_values is not None and past_key_values[0].key is not None:
            past = past_key_values[0].key.size(-2)
        position_ids = torch.arange(past, past + input_ids.size(1), device=input_ids.device)
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        for i, block in enumerate(self.h):
            hidden_states = block(hidden_states, None if past_key_values is None else past_key_values[i])
        return self.lm_head(self.ln_f(hidden_states))


@torch.no_grad()
def decode(model, chunks, reorder=None):
    past_key_values = [LayerCache() for _ in model.h]
    outputs = []
    for step, chunk in enumerate(chunks):
        if step == 1 and reorder is not None:
            beam_idx = torch.as_tensor(reorder, device=chunk.device)
            for layer_past in past_key_values:
                layer_past.reorder(beam_idx)
        outputs.append(model(chunk, past_key_values))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="gpt2 with beams",
    build=GPT2LMHeadModel,
    forward=lambda model, tokens: model(tokens),
    cache=decode,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "residual": True,
    },
)
