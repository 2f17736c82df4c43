# A masked language model (pre-LN BERT), tied embeddings, its own initialisation.
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def heads(self, x):
        b, t, _ = x.shape
        return x.reshape(b, t, self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden, extended_mask):
        q, k, v = self.heads(self.query(hidden)), self.heads(self.key(hidden)), self.heads(self.value(hidden))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=extended_mask)
        return self.dense(context.permute(0, 2, 1, 3).flatten(-2))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden, extended_mask):
        hidden = hidden + self.attention(self.attention_norm(hidden), extended_mask)
        return hidden + self.output(F.gelu(self.intermediate(self.output_norm(hidden))))


class BertForMaskedLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size, max_positions):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_positions, hidden_size)
        self.layers = nn.ModuleList(
            [BertLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)]
        )
        self.final_norm = nn.LayerNorm(hidden_size)
        self.decoder = nn.Linear(hidden_size, vocab_size)
        self.decoder.weight = self.word_embeddings.weight
        self.reset_parameters()

    def reset_parameters(self, std=0.2):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std)

    def forward(self, input_ids, attention_mask=None):
        positions = torch.arange(input_ids.size(-1), device=input_ids.device)
        hidden = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        extended = None if attention_mask is None else attention_mask[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, extended)
        return self.decoder(self.final_norm(hidden))


def build(c):
    return BertForMaskedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)


subject = Subject(
    kind="encoder",
    name="pre-LN BERT",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "tied": True,
        "padding_side": "right",
    },
)
