from gpt import GPT

from veriformer.properties import parametrize

test_gpt = parametrize(GPT, causal=True, profile="quick")
