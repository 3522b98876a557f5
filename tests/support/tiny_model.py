"""A tiny random Llama with a tokenizer of its own, built once and cached, for tests on real engines."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

SPECIAL_TOKENS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Text that every Python has: modules of the standard library, small and stable in content.
CORPUS_MODULES = ("argparse.py", "ast.py", "collections/__init__.py", "datetime.py", "inspect.py", "typing.py")


@dataclass(frozen=True)
class TinyModelShape:
    """What may differ between test models."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 2048
    context_tokens: int = 2048
    seed: int = 0
    has_tied_embeddings: bool = False


STANDARD_SHAPE = TinyModelShape()


def tiny_model(shape: TinyModelShape = STANDARD_SHAPE) -> Path:
    """Folder with weights, tokenizer and chat template; built on first use.

    The cache key covers the shape, this file and the Python whose library trains the tokenizer.
    """
    source = inspect.getsource(inspect.getmodule(tiny_model))  # type: ignore[arg-type]
    key = hashlib.sha256((json.dumps(asdict(shape)) + source + sysconfig.get_python_version()).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-ext" / "test-models"
    folder = cache / key.hexdigest()[:16]
    return built_once(folder, lambda scratch: _build(shape, scratch))


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder, as `build` fills it in another place first: it is there whole, or not at all."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        build(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process built the same folder meanwhile.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _build(shape: TinyModelShape, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _train_tokenizer(shape)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_tokens,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=shape.has_tied_embeddings,
        # Ten times the usual spread: logits lie far apart, so rounding cannot change a greedy choice.
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)


def _train_tokenizer(shape: TinyModelShape):  # type: ignore[no-untyped-def]  # transformers is untyped
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train(
        [str(library / module) for module in CORPUS_MODULES],
        trainers.BpeTrainer(  # type: ignore[no-untyped-call]
            vocab_size=shape.vocabulary,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
