"""The clients that judge scores, unmodified, in processes of their own: TRL's client for a teacher, and lm-eval.

    python tests/support/score_clients.py trl < arguments.json
    python tests/support/score_clients.py lm-eval < arguments.json

Started by `run_client` with the folder of `make judges-env` on their path. The arguments
are those of `_trl` and `_lm_eval`; the last line of output is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JUDGES = ROOT / ".venv/judges"


def is_installed() -> bool:
    """Whether `make judges-env` was run."""
    return (JUDGES / "trl").is_dir() and (JUDGES / "lm_eval").is_dir()


def run_client(name: str, home: Path, **parameters: Any) -> Any:
    """What a client says. AssertionError with the end of its output when it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(JUDGES),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, __file__, name],
        input=json.dumps(parameters),
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def _trl(url: str, **arguments: Any) -> Any:
    # TRL's client wants vLLM to be installed, to update its weights, which scoring does not need: a package of
    # that name is enough. Its neighbours in `trl.generation` run vLLM itself; they are left out.
    sys.path.insert(0, str(Path(__file__).parent / "vllm_stand_in"))
    import trl

    package = ModuleType("trl.generation")
    package.__path__ = [str(Path(trl.__file__).parent / "generation")]
    sys.modules["trl.generation"] = package
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=url, connection_timeout=30.0).get_sequence_logprobs(**arguments)


def _lm_eval(url: str, tokenizer: str, tasks: str, task: str, batch_size: int, concurrent: int) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    evaluated = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "default",
            "base_url": f"{url}/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": concurrent,
            "max_retries": 1,
        },
        batch_size=batch_size,
        tasks=[task],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return {
        "figures": {name: value for name, value in evaluated["results"][task].items() if isinstance(value, float)},
        "samples": {str(one["doc_id"]): one["filtered_resps"] for one in evaluated["samples"][task]},
    }


if __name__ == "__main__":
    clients = {"trl": _trl, "lm-eval": _lm_eval}
    print(json.dumps(clients[sys.argv[1]](**json.loads(sys.stdin.read()))))
