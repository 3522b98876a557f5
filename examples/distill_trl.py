"""On-policy distillation with TRL: the endpoint is the teacher that scores what the student writes.

    pip install 'trl[vllm]==1.16.0'
    python examples/distill_trl.py prompts.jsonl out --student MODEL --endpoint http://127.0.0.1:30000

A line of input is `{"prompt": ...}`. TRL's client for a teacher asks the endpoint as it would ask vLLM
(`POST /v1/completions` with `prompt: [[ids]], max_tokens: 1, prompt_logprobs: K`), and knows no API key. Teacher and
student must have the same vocabulary. The endpoint's log-probabilities are those at temperature 1.

What was run: TRL's client (`trl.generation.vllm_client.VLLMClient`), unmodified, against the router
(`tests/integration/test_scoring_clients.py`). A whole training run was not: it needs a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="a JSONL file")
    parser.add_argument("output", type=Path, help="a folder for the student")
    parser.add_argument("--student", required=True, metavar="MODEL", help="a folder or a name")
    parser.add_argument("--endpoint", default="http://127.0.0.1:30000", metavar="URL", help="without /v1")
    parser.add_argument("--top-k", type=int, default=64, help="log-probabilities per position")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    from datasets import load_dataset
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    trainer = ServerDistillationTrainer(
        model=options.student,
        args=ServerDistillationConfig(
            output_dir=str(options.output),
            teacher_model_server_url=options.endpoint,
            beta=0.0,  # forward KL over the teacher's top k
            loss_top_k=options.top_k,
            temperature=1.0,
            per_device_train_batch_size=4,
            use_vllm=False,
        ),
        train_dataset=load_dataset("json", data_files=str(options.input), split="train"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
