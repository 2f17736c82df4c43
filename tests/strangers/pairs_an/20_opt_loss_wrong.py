WHAT = 'the shift is the wrong way round: logits of t + 1 are held against the label of t, so the model is trained to repeat the token before instead of the next (line 74: shift_logits = logits[..., 1:, :].contiguous())'
"""OPT with the loss that it gives itself: labels are the tokens, and the model moves them by one."""
import torch
from torch import nn

from veriformer.properties import Subject


class OPTLearnedPositionalEmbedding(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim):
        self.offset = 2
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, attention_mask):
        mask = attention_mask.long()
        positions = torch.cumsum(mask, dim=1) * mask - 1
        return super().forward(positions + self.offset)


class OPTDecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim, dropout):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (embed_dim // num_heads) ** -0.5
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def _shape(self, tensor):
        return tensor.view(*tensor.shape[:2], self.num_heads, -1).transpose(1, 2)

    def attend(self, hidden_states, allowed):
        query = self._shape(self.q_proj(hidden_states) * self.scaling)
        key, value = self._shape(self.k_proj(hidden_states)), self._shape(self.v_proj(hidden_states))
        weights = query @ key.transpose(-1, -2)
        weights = torch.where(allowed, weights, torch.finfo(weights.dtype).min).softmax(dim=-1)
        weights = torch.where(allowed, weights, torch.zeros_like(weights))
        return self.out_proj((weights @ value).transpose(1, 2).reshape(hidden_states.shape))

    def forward(self, hidden_states, allowed):
        hidden_states = hidden_states + self.dropout(self.attend(self.self_attn_layer_norm(hidden_states), allowed))
        inner = torch.relu(self.fc1(self.final_layer_norm(hidden_states)))
        return hidden_states + self.dropout(self.fc2(inner))


class OPTForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.vocab_size = c.vocab_size
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = OPTLearnedPositionalEmbedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            [OPTDecoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        allowed = causal & attention_mask[:, None, None, :].bool()
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, allowed)
        logits = self.lm_head(self.final_layer_norm(hidden_states))
        loss = None
        if labels is not None:
            # tokens < n predict n
            shift_logits = logits[..., 1:, :].contiguous()
            shift_labels = labels[..., :-1].contiguous()
            loss = nn.functional.cross_entropy(shift_logits.view(-1, self.vocab_size), shift_labels.view(-1))
        return loss, logits


subject = Subject(
    kind="decoder",
    name="OPT",
    build=OPTForCausalLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[1],
    loss=lambda m, tokens, labels: m(tokens, labels=labels)[0],
    declares={
        "shifts_labels": True, "ignore_index": -100, "positions": "learned", "position_offset": 2, "norm": "layer",
        "norm_placement": "pre", "final_norm": True, "activation": "relu", "tied": True, "bias": True,
        "output_bias": False, "padding_side": "both", "empty_loss": "nan",
    },
)
