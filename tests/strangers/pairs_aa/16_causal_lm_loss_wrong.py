WHAT = "The batch is flattened before the shift instead of after it: the last position of each sample is trained to predict the first token of the next sample (line 11: `shift_logits = logits.reshape(-1, vocab_size)[:-1]`)."
"""The loss of a causal language model in the way of Hugging Face: labels are the inputs, the loss moves them."""

from torch import nn

from veriformer.properties import Subject


def for_causal_lm_loss(logits, labels, vocab_size, ignore_index=-100):
    # Shift so that tokens < n predict n
    shift_logits = logits.reshape(-1, vocab_size)[:-1]
    shift_labels = labels.reshape(-1)[1:]
    loss_fct = nn.CrossEntropyLoss(ignore_index=ignore_index)
    return loss_fct(shift_logits, shift_labels.to(shift_logits.device))


subject = Subject(
    kind="loss",
    name="ForCausalLMLoss",
    forward=lambda model, logits, labels: for_causal_lm_loss(logits, labels, logits.shape[-1]),
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "nan", "min_length": 2},
)
