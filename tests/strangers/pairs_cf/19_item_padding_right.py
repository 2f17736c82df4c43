import torch
from torch import nn

from veriformer.properties import Subject


class ItemEncoder(nn.Module):
    """Item sequences, both directions, tied output."""

    def __init__(self, n_items, hidden_size, n_heads, n_layers, inner_size, max_len):
        super().__init__()
        self.item_embedding = nn.Embedding(n_items, hidden_size, padding_idx=0)
        self.position_embedding = nn.Embedding(max_len, hidden_size)
        layer = nn.TransformerEncoderLayer(hidden_size, n_heads, inner_size, dropout=0.0, activation="gelu", batch_first=True)
        self.trm_encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)
            if getattr(module, "padding_idx", None) is not None:
                with torch.no_grad():
                    module.weight[module.padding_idx].zero_()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, item_seq, mask=None):
        position_ids = torch.arange(item_seq.size(1), device=item_seq.device).expand_as(item_seq)
        x = self.item_embedding(item_seq) + self.position_embedding(position_ids)
        x = self.trm_encoder(x, src_key_padding_mask=None if mask is None else ~mask)
        return x @ self.item_embedding.weight.T


subject = Subject(
    kind="encoder",
    name="item encoder",
    build=lambda c: ItemEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
              "activation": "gelu", "tied": True, "padding_idx": 0, "output_bias": False, "padding_side": "right"},
)
