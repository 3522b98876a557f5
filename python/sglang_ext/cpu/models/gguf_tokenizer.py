"""A byte-level BPE tokenizer rebuilt from the metadata of a GGUF file.

GGUF keeps the vocabulary, the merges and the kind of every token, but only a *name* for the rule that
splits text before the merges apply; the rules behind the names are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Token kinds of the GGUF format (gguf.TokenType): control tokens never come from plain text.
CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4


class UnsupportedTokenizerError(ValueError):
    """The GGUF file names a tokenizer or a splitting rule that is not known here."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` metadata of a GGUF file, checked.

    A token's id is its position in `tokens`; each merge is "LEFT RIGHT".
    """

    model: str
    pre_tokenizer: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    bos_token_id: int
    eos_token_id: int
    unk_token_id: int
    pad_token_id: int
    chat_template: str

    def __post_init__(self) -> None:
        if self.model != "gpt2":
            raise UnsupportedTokenizerError(f"tokenizer.ggml.model is {self.model!r}, not 'gpt2'")
        if self.pre_tokenizer not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise UnsupportedTokenizerError(f"tokenizer.ggml.pre is {self.pre_tokenizer!r}; supported are: {known}")
        if len(self.tokens) != len(self.token_types):
            raise ValueError(
                f"tokenizer.ggml.tokens has {len(self.tokens)} entries, token_type {len(self.token_types)}"
            )
        if len(set(self.tokens)) != len(self.tokens):
            raise ValueError("tokenizer.ggml.tokens names a token twice")
        for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
            token_id = getattr(self, name)
            if not 0 <= token_id < len(self.tokens):
                raise ValueError(f"{name} is {token_id}, outside a vocabulary of {len(self.tokens)} tokens")


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    # Each digit by itself, then GPT-2's own pattern.
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _gpt2_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm_pre_tokenizer,
    "gpt-2": _gpt2_pre_tokenizer,
}


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer; encoding adds no special tokens of its own, decoding inverts encoding."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(vocabulary.tokens)},
            merges=[_split_merge(merge) for merge in vocabulary.merges],
        )
    )
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[vocabulary.pre_tokenizer]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED_TOKEN])
    return tokenizer


def tokenizer_config(vocabulary: GgufVocabulary, model_max_length_tokens: int) -> dict[str, object]:
    """Return the contents of `tokenizer_config.json`.

    The class is the generic fast one: transformers' GPT-2 class would put its own splitting rule in place
    of the file's.
    """
    tokens = vocabulary.tokens
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": tokens[vocabulary.bos_token_id],
        "eos_token": tokens[vocabulary.eos_token_id],
        "unk_token": tokens[vocabulary.unk_token_id],
        "pad_token": tokens[vocabulary.pad_token_id],
        "chat_template": vocabulary.chat_template,
    }


def _split_merge(merge: str) -> tuple[str, str]:
    # Byte-level tokens hold no space: the byte 0x20 is written "Ġ".
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise ValueError(f"tokenizer.ggml.merges: {merge!r} is not a pair of tokens")
    return left, right
