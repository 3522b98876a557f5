"""A tiny random model with a tokenizer and a chat template: one ASCII character is one token.

What it says is noise; it is there for benchmarks whose subject is the traffic and not the computation.
"""

from __future__ import annotations

import string
from pathlib import Path

from support.random_model import RandomLlama, build_random_llama

_SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
_ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = len(_SPECIAL) + len(_ALPHABET)
TEXT_MODEL = RandomLlama(layers=2, hidden=64, heads=4, kv_heads=2, vocabulary=VOCABULARY, context_tokens=4096)


def build_text_model(folder: Path, shape: RandomLlama = TEXT_MODEL) -> Path:
    """Write model and tokenizer into `folder` and return it; `shape.vocabulary` must be `VOCABULARY`."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    assert shape.vocabulary == VOCABULARY
    build_random_llama(shape, folder)
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_ALPHABET))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return folder
