"""The converted SmolLM2 answers a question sensibly on the CPU, and its tokenizer is the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.cpu.models.smollm2 import ensure_smollm2

pytestmark = [
    pytest.mark.integration,
    # transformers imports sentencepiece, which would crash Python at its end if these were errors
    pytest.mark.filterwarnings("ignore:builtin type swig:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_smollm2()


@pytest.mark.full
def test_answers_a_question(folder: Path) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    with torch.no_grad():
        output = model.generate(prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def test_tokenizer_round_trips_and_splits_digits(folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("Hello 2024 again  x\n\n y", "naïve café — 日本語 don't I'll", "\ttab\r\nline "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("2024")["input_ids"]) == ["2", "0", "2", "4"]
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 5)
