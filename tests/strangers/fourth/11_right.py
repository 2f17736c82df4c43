"""BART: one table of embeddings for source, target and output, norms behind the sums, learned positions from 2 on."""

from typing import Optional

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class BartLearnedPositionalEmbedding(nn.Embedding):
    """The first two rows are not used: in fairseq they belong to ids up to that of padding."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        self.offset = 2
        super().__init__(num_embeddings + self.offset, embedding_dim)

    def forward(self, input_ids: torch.Tensor):
        length = input_ids.shape[1]
        if length + self.offset > self.num_embeddings:
            raise ValueError(f"{length} positions of {self.num_embeddings - self.offset}")
        positions = torch.arange(length, dtype=torch.long, device=input_ids.device)
        return super().forward(positions + self.offset)


class BartAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(tensor.shape[0], -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, key_value_states=None, attention_mask: Optional[torch.Tensor] = None):
        """attention_mask: added to the scores, [batch, 1, target or 1, source]."""
        source = hidden_states if key_value_states is None else key_value_states
        query = self._shape(self.q_proj(hidden_states) * self.scaling)
        key, value = self._shape(self.k_proj(source)), self._shape(self.v_proj(source))
        attn_weights = torch.matmul(query, key.transpose(2, 3))
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = F.softmax(attn_weights, dim=-1).to(value.dtype)
        attn_probs = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.matmul(attn_probs, value).transpose(1, 2).flatten(2)
        return self.out_proj(attn_output)


class BartEncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config["dropout"]
        self.self_attn = BartAttention(config["d_model"], config["heads"], config["dropout"])
        self.self_attn_layer_norm = nn.LayerNorm(config["d_model"])
        self.fc1 = nn.Linear(config["d_model"], config["ffn_dim"])
        self.fc2 = nn.Linear(config["ffn_dim"], config["d_model"])
        self.final_layer_norm = nn.LayerNorm(config["d_model"])

    def forward(self, x, attention_mask):
        residual = x
        x = F.dropout(self.self_attn(x, attention_mask=attention_mask), p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = F.dropout(self.fc2(F.gelu(self.fc1(x))), p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class BartDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config["dropout"]
        self.self_attn = BartAttention(config["d_model"], config["heads"], config["dropout"])
        self.self_attn_layer_norm = nn.LayerNorm(config["d_model"])
        self.encoder_attn = BartAttention(config["d_model"], config["heads"], config["dropout"])
        self.encoder_attn_layer_norm = nn.LayerNorm(config["d_model"])
        self.fc1 = nn.Linear(config["d_model"], config["ffn_dim"])
        self.fc2 = nn.Linear(config["ffn_dim"], config["d_model"])
        self.final_layer_norm = nn.LayerNorm(config["d_model"])

    def forward(self, x, memory, attention_mask, memory_mask):
        residual = x
        x = F.dropout(self.self_attn(x, attention_mask=attention_mask), p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = self.encoder_attn(x, key_value_states=memory, attention_mask=memory_mask)
        x = self.encoder_attn_layer_norm(residual + F.dropout(x, p=self.dropout, training=self.training))
        residual = x
        x = F.dropout(self.fc2(F.gelu(self.fc1(x))), p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class BartStack(nn.Module):
    def __init__(self, config, shared, layer):
        super().__init__()
        self.dropout = config["dropout"]
        self.embed_tokens = shared
        self.embed_positions = BartLearnedPositionalEmbedding(config["max_position"], config["d_model"])
        self.layernorm_embedding = nn.LayerNorm(config["d_model"])
        self.layers = nn.ModuleList([layer(config) for _ in range(config["layers"])])

    def forward(self, ids, *context):
        x = self.layernorm_embedding(self.embed_tokens(ids) + self.embed_positions(ids))
        x = F.dropout(x, p=self.dropout, training=self.training)
        for layer in self.layers:
            x = layer(x, *context)
        return x


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
        ~allowed, torch.finfo(dtype).min
    )


class BartForConditionalGeneration(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        shared = nn.Embedding(config["vocab_size"], config["d_model"])
        self.encoder = BartStack(config, shared, BartEncoderLayer)
        self.decoder = BartStack(config, shared, BartDecoderLayer)
        self.lm_head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
        self.lm_head.weight = shared.weight

    def forward(self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None, labels=None):
        dtype = self.lm_head.weight.dtype
        source_allowed = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        source_mask = additive(source_allowed[:, None, None, :], dtype)
        length = decoder_input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if decoder_attention_mask is not None:
            causal = causal & decoder_attention_mask[:, None, None, :]

        memory = self.encoder(input_ids, source_mask)
        x = self.decoder(decoder_input_ids, memory, additive(causal, dtype), source_mask)
        logits = self.lm_head(x)
        if labels is None:
            return logits
        # summed up in single precision, however the model is kept
        wide = logits if logits.dtype == torch.float64 else logits.float()
        token_loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return token_loss.sum() / (labels != -100).sum(), logits


def build(c):
    return BartForConditionalGeneration(
        {
            "vocab_size": c.vocab_size,
            "d_model": c.d_model,
            "heads": c.num_heads,
            "ffn_dim": c.d_ff,
            "layers": c.num_layers,
            "max_position": c.max_len,
            "dropout": c.dropout,
        }
    )


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=build,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    loss=lambda model, source, target, labels: model(source, target, labels=labels)[0],
    declares={
        "causal": True,
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "structure": "other",
        "padding_side": "right",
        "beyond_max_len": "error",
        "shifts_labels": False,
        "ignore_index": -100,
        "empty_loss": "nan",
        "memory": "quadratic",
    },
)
