"""AROUND `get_tokenizer`: the processes of an engine share the tokenizer that its first process has loaded.

SGLang loads the tokenizer in the server's process, in the detokenizer's and twice in the scheduler's, for a second each
where its file has 49,000 tokens. Processes that are forked find here what `load` has read before; processes that are
spawned load it once each.
"""

from __future__ import annotations

from typing import Any

_ARGUMENTS = ("tokenizer_mode", "trust_remote_code", "revision", "tokenizer_backend")
_loaded: dict[object, Any] = {}


def get_tokenizer(original: Any, path: str, **arguments: Any) -> Any:
    """Return the tokenizer of an earlier call with these arguments, or load it."""
    key = (path, *sorted(arguments.items()))
    if key not in _loaded:
        _loaded[key] = original(path, **arguments)
    return _loaded[key]


def load(server_args: Any) -> None:
    """Load the tokenizer of an engine before its processes are forked; leave what cannot be loaded to SGLang."""
    if server_args.skip_tokenizer_init:
        return
    from sglang.srt.utils import hf_transformers_utils

    arguments = {name: getattr(server_args, name) for name in _ARGUMENTS if hasattr(server_args, name)}
    try:
        hf_transformers_utils.get_tokenizer(server_args.tokenizer_path or server_args.model_path, **arguments)
    except Exception:  # what a process of the engine needs, it asks for again, and reports what is wrong
        _loaded.clear()
