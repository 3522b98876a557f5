"""A distilabel pipeline against the endpoint: instructions in, a JSONL file with the teacher's answers out.

    pip install 'distilabel[openai]==1.5.3'
    python examples/distill_distilabel.py prompts.jsonl answers.jsonl --endpoint http://127.0.0.1:30000/v1 --model NAME

A line of input is `{"instruction": ...}`. The low priority class lets online requests go first.

What was run: this file, distilabel 1.5.3, against a stand-in for the endpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="a JSONL file")
    parser.add_argument("output", type=Path, help="a JSONL file")
    parser.add_argument("--endpoint", default="http://127.0.0.1:30000/v1", metavar="URL", help="with /v1 at its end")
    parser.add_argument("--model", default="default", metavar="NAME", help="as the endpoint serves it")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64, help="requests in flight")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    from distilabel.models.llms import OpenAILLM
    from distilabel.pipeline import Pipeline
    from distilabel.steps import LoadDataFromDicts
    from distilabel.steps.tasks import TextGeneration

    rows = [json.loads(line) for line in options.input.read_text().splitlines()]
    with Pipeline(name="distill") as pipeline:
        teacher = OpenAILLM(
            model=options.model,
            base_url=options.endpoint,
            api_key=os.environ.get("SGLANG_EXT_API_KEY") or "none",
            default_headers={"x-sgl-priority": "low"},
            generation_kwargs={"max_new_tokens": options.max_tokens, "temperature": 0.0},
            max_retries=5,
            timeout=1800,
        )
        load = LoadDataFromDicts(data=rows, batch_size=options.batch_size)
        load >> TextGeneration(llm=teacher, input_batch_size=options.batch_size)
    dataset = pipeline.run(use_cache=True)
    dataset["default"]["train"].to_json(options.output)


if __name__ == "__main__":
    main()
