import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, mask):
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim ** -0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).masked_fill(~mask, 0.0)
        return self.o_proj(torch.matmul(probs, v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.self_attn = Attention(hidden_size, num_heads)
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, mask):
        x = x + self.self_attn(self.input_layernorm(x), mask)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class ForCausalLM(nn.Module):
    chunk = 4  # positions whose logits are in memory at a time

    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(DecoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def hidden(self, input_ids, attention_mask=None):
        T = input_ids.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[:T]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)

    def forward(self, input_ids, attention_mask=None):
        return self.lm_head(self.hidden(input_ids, attention_mask))

    def loss(self, input_ids, labels):
        h = self.hidden(input_ids)
        T = h.shape[1]
        total, count = h.new_zeros(()), labels.new_zeros(())
        for a in range(0, T, self.chunk):
            b = min(a + self.chunk, T - 1)
            logits = self.lm_head(h[:, a:b])
            target = labels[:, a + 1:b + 1]
            total = total + F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100)
            count = count + (target != -100).sum()
        return total / count.clamp(min=1)


subject = Subject(
    kind="decoder",
    build=ForCausalLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "swiglu", "bias": False, "output_bias": False, "tied": False,
              "shifts_labels": True, "ignore_index": -100, "plain_loss": True, "empty_loss": "zero",
              "padding_side": "right"},
)
