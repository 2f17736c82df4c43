WHAT = "behind a cache the position ids count the cached tokens, padding included, instead of the real ones that the mask counts: a left-padded row jumps forward by its padding with the second chunk (line 60)."
"""GPT2LMHeadModel with past_key_values, for batches padded on the left as in batched generation."""
import torch
from torch import nn

from veriformer.properties import Subject


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * nx**-0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = Conv1D(3 * n_embd, n_embd), Conv1D(n_embd, n_embd)
        self.c_fc, self.c_out = Conv1D(n_inner, n_embd), Conv1D(n_embd, n_inner)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states, allowed, layer_past=None):
        batch, length, width = hidden_states.shape
        qkv = self.c_attn(self.ln_1(hidden_states)).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if layer_past is not None:
            key = torch.cat((layer_past[0], key), dim=-2)
            value = torch.cat((layer_past[1], value), dim=-2)
        scores = query @ key.transpose(-1, -2) * query.size(-1) ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
        hidden_states = hidden_states + self.c_proj(context)
        hidden_states = hidden_states + self.c_out(self.act(self.c_fc(self.ln_2(hidden_states))))
        return hidden_states, (key, value)


class GPT2LMHeadModel(nn.Module):
    def __init__(self, vocab_size, n_positions, n_embd, n_head, n_layer, n_inner):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList([GPT2Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        """attention_mask [B, past + length]."""
        length = input_ids.shape[1]
        total = length if past_key_values is None else length + past_key_values[0][0].shape[-2]
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape[0], total, dtype=torch.bool, device=input_ids.device)
        if past_key_values is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            seen = past_key_values[0][0].shape[-2]
            position_ids = torch.arange(seen, seen + length, device=input_ids.device)[None]
        causal = torch.ones(length, total, dtype=torch.bool, device=input_ids.device).tril(total - length)
        allowed = causal & attention_mask[:, None, None, :].bool()
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        presents = ()
        for i, block in enumerate(self.h):
            layer_past = None if past_key_values is None else past_key_values[i]
            hidden_states, present = block(hidden_states, allowed, layer_past)
            presents += (present,)
        return self.ln_f(hidden_states) @ self.wte.weight.T, presents

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        return tuple(tuple(state.index_select(0, beam_idx) for state in layer) for layer in past_key_values)


def cache(model, chunks, attention_mask=None, reorder=None):
    past, done, outputs = None, 0, []
    for number, chunk in enumerate(chunks):
        done += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :done]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
        if number == 0 and reorder is not None:
            beam_idx = torch.as_tensor(reorder, device=chunk.device)
            past = model._reorder_cache(past, beam_idx)
            attention_mask = None if attention_mask is None else attention_mask[beam_idx]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT2LMHeadModel",
    build=lambda c: GPT2LMHeadModel(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cache,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "padding_side": "both",
    },
)
