"""A released decoder that sees later tokens; the README shows what `veriformer check` says of it."""

import torch
from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

torch.manual_seed(0)
model = ProphetNetForConditionalGeneration(
    ProphetNetConfig(
        vocab_size=50,
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.5,
    )
)
