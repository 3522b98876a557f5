"""DataTrove's inference runner against the endpoint: JSONL documents in, JSONL with completions out.

    pip install 'datatrove[inference]==0.10.1'
    python examples/distill_datatrove.py prompts.jsonl out --endpoint http://127.0.0.1:30000 --model NAME

A document is a line `{"id": ..., "text": ...}`. DataTrove resumes by chunk (`checkpoints_local_dir`). Give the endpoint
as `http://127.0.0.1:PORT` or `http://localhost:PORT` (a port forward does): for any other address, DataTrove 0.10.1
asks `URL/v1/models` whether the server is there, but sends to `URL/chat/completions`, so no URL fits both; and to
localhost it sends no API key.

What was run: this file, DataTrove 0.10.1, against a stand-in for the endpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="a JSONL file or a folder of them")
    parser.add_argument("output", type=Path, help="a folder")
    parser.add_argument("--endpoint", default="http://127.0.0.1:30000", metavar="URL")
    parser.add_argument("--model", default="default", metavar="NAME", help="as the endpoint serves it")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight")
    return parser.parse_args()


async def complete(document: Any, generate: Any) -> Any:
    """One completion of one document."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def main() -> None:
    options = parse_arguments()
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    folder = options.input if options.input.is_dir() else options.input.parent
    runner = InferenceRunner(
        rollout_fn=complete,
        config=InferenceConfig(
            server_type="endpoint",
            endpoint_url=options.endpoint,
            model_name_or_path=options.model,
            use_chat=True,
            default_generation_params={"max_tokens": options.max_tokens, "temperature": 0},
            max_concurrent_generations=options.concurrency,
        ),
        output_writer=JsonlWriter(str(options.output), output_filename="${rank}_chunk_${chunk_index}.jsonl"),
        checkpoints_local_dir=str(options.output / "checkpoints"),
        records_per_chunk=1000,
        skip_bad_requests=True,
    )
    reader = JsonlReader(str(folder), glob_pattern=None if options.input.is_dir() else options.input.name)
    LocalPipelineExecutor([reader, runner], logging_dir=str(options.output / "logs"), tasks=1).run()


if __name__ == "__main__":
    main()
