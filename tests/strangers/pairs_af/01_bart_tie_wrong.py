WHAT = "The output projection is tied to the shared embedding through .data (line 76): two Parameters over one storage, not one; each gets its own part of the gradient, optimizers step twice, and any cast or move unties them."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class BartAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor):
        bsz, length, _ = tensor.shape
        return tensor.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        source = hidden_states if key_value_states is None else key_value_states
        query = self._shape(self.q_proj(hidden_states) * self.scaling)
        key, value = self._shape(self.k_proj(source)), self._shape(self.v_proj(source))
        weights = query @ key.transpose(-1, -2)
        if attention_mask is not None:
            weights = weights + attention_mask
        output = F.softmax(weights, dim=-1) @ value
        return self.out_proj(output.transpose(1, 2).flatten(2))


class BartLayer(nn.Module):
    def __init__(self, d_model, num_heads, ffn_dim, is_decoder):
        super().__init__()
        self.self_attn = BartAttention(d_model, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = BartAttention(d_model, num_heads) if is_decoder else None
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model) if is_decoder else None
        self.fc1 = nn.Linear(d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask=mask))
        if self.encoder_attn is not None:
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_mask))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


def additive(allowed, dtype):
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


class Bart(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, ffn_dim, max_len):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder_positions = nn.Embedding(max_len, d_model)
        self.decoder_positions = nn.Embedding(max_len, d_model)
        self.encoder = nn.ModuleList([BartLayer(d_model, num_heads, ffn_dim, False) for _ in range(num_layers)])
        self.decoder = nn.ModuleList([BartLayer(d_model, num_heads, ffn_dim, True) for _ in range(num_layers)])
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.tie_weights()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def tie_weights(self):
        self.lm_head.weight.data = self.shared.weight.data

    def embed(self, ids, positions):
        return self.shared(ids) + positions(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source, target, source_mask=None, target_mask=None):
        dtype = self.shared.weight.dtype
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            causal = causal & target_mask[:, None, None, :]
        source_bias, causal_bias = additive(source_mask[:, None, None, :], dtype), additive(causal, dtype)
        memory = self.embed(source, self.encoder_positions)
        for layer in self.encoder:
            memory = layer(memory, source_bias)
        x = self.embed(target, self.decoder_positions)
        for layer in self.decoder:
            x = layer(x, causal_bias, memory, source_bias)
        return self.lm_head(x)


subject = Subject(
    kind="encoder_decoder",
    name="bart",
    build=lambda c: Bart(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "tied": True,
        "output_bias": False,
        "padding_side": "right",
    },
)
