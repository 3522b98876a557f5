"""Refuses requests before their prompts are counted: for a model that is not served, or for what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ext_router.http.replies import MODEL_NOT_FOUND, shown_names, unknown_model
from sglang_ext_router.request.prepared_request import PreparedRequest, ReadBody

if TYPE_CHECKING:
    from sglang_ext_router.instances.registry import ModelPools, WorkerRegistry


class RefusedError(Exception):
    """A request is answered by the router: `status` over HTTP, `reason` in the metrics, the rest in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, reason: str = "bad_request", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.code = code


def find_model(registry: WorkerRegistry, body: ReadBody) -> ModelPools:
    """Return the instances of the model that a body names, or of the only one. Raises RefusedError."""
    name = body.model or ""
    model = registry.find_model(body.model)
    if model is None:
        names = registry.served_names()
        if not names or (name and not registry.is_complete):
            raise RefusedError(503, "no instance that is ready serves this model yet; try again later", "no_instance")
        if name:
            raise RefusedError(404, unknown_model(name, names), "model_not_found", "model", MODEL_NOT_FOUND)
        raise RefusedError(400, f"name a model in `model`: {shown_names(names)}", "no_model", "model")
    if body.target is not None and name and registry.names_adapter(name):
        # SGLang's own way of scoring knows no such names.
        message = f"log-probabilities of the prompt by an adapter: name it in lora_path, not in model {name!r}"
        raise RefusedError(400, message, param="model")
    return model


def check_request(registry: WorkerRegistry, request: PreparedRequest, max_sequences: int) -> None:
    """Refuse what the model's instances cannot do: generate, serve the path, or make so many sequences.

    Only undivided instances serve some paths, and an instance of a model that embeds ends when it is asked to generate.
    Raises RefusedError.
    """
    model = request.model
    shown = f"the model {model.name!r}" if model.name else "the model"
    if request.is_undivided:
        if not registry.may_be_undivided(model):
            message = f"it needs an undivided instance (--plain URL), and {shown} has prefill and decode instances only"
            raise RefusedError(404, f"{request.path.decode()} of SGLang is not served here: {message}")
        return  # its inputs take no rooms
    if not model.generates:
        message = f"{shown} does not generate: ask /v1/embeddings, /v1/rerank, /v1/score or /v1/classify"
        raise RefusedError(400, message, param="model")
    sequences = request.prompt.sequence_count
    if sequences > max_sequences:
        field = "n" if request.prompt.samples_per_prompt > max_sequences else None
        message = (
            f"the request makes {sequences} sequences (prompts × n), more than the {max_sequences} that are allowed"
        )
        raise RefusedError(400, message, "too_many_sequences", field)
