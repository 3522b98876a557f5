"""Counts the tokens of a prompt: an estimate from its bytes, or a tokenizer's count where a decision needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sglang_ext_router.request.prepared_request import PreparedRequest
from sglang_ext_router.request.scores import NO_SCORES
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.tokenising import MIN_TEXT_BYTES, TokenisedPrompt

SAFELY_SMALL = 4  # an estimate of the tokens is hardly ever this many times too low

# Gets the tokens of the longest prompt, and those of all prompts, None where they are estimated.
OnCounted = Callable[[int, int | None], None]


def count_tokens(services: Services, request: PreparedRequest, on_counted: OnCounted) -> None:
    """Call `on_counted`, at once or later on the loop.

    A tokenizer makes the prompt's blocks for `request.prompt` where instances say which blocks of tokens they hold.
    """
    prompt, tokeniser = request.prompt, request.model.tokeniser
    if (
        tokeniser is not None
        and request.model.alike
        and prompt.text_bytes >= MIN_TEXT_BYTES
        and len(prompt.texts) == 1
        and not (prompt.images or prompt.audios or request.is_undivided or request.scores != NO_SCORES)
        and tokeniser.can_read(request.path, len(request.raw_body))
    ):
        on_tokenised = partial(_on_tokenised, services, request, on_counted)
        tokeniser.read(request.path, request.raw_body, request.model.alike, on_tokenised)
    else:
        _count_in_doubt(services, request, on_counted)


def _on_tokenised(
    services: Services, request: PreparedRequest, on_counted: OnCounted, read: TokenisedPrompt | None
) -> None:
    """The tokenizer has made the prompt's tokens, or does not know what instances make of it."""
    if read is None:
        _count_in_doubt(services, request, on_counted)
        return
    services.metrics.tokenised_for_blocks += 1
    request.prompt = request.prompt._replace(blocks=read.blocks, needs=read.needs)
    on_counted(read.blocks.tokens, read.blocks.tokens)


def _count_in_doubt(services: Services, request: PreparedRequest, on_counted: OnCounted) -> None:
    """Estimate the prompt's tokens; a tokenizer counts them where the estimate leaves the length class in doubt."""
    tokeniser, prompt = request.model.tokeniser, request.prompt
    is_undivided = request.is_undivided  # which instances hold it is theirs to say
    if tokeniser is not None and prompt.texts and not is_undivided and _needs_exact_count(services, request):
        services.metrics.tokenised += 1
        tokeniser.count(prompt.texts, partial(_on_texts_counted, services, request, on_counted))
    else:
        known_tokens = None if prompt.texts else prompt.known_tokens
        on_counted(services.planner.estimate_tokens(request.model, prompt), known_tokens)


def _needs_exact_count(services: Services, request: PreparedRequest) -> bool:
    """Return whether something is decided by the number of tokens that an estimate leaves open."""
    planner, prompt = services.planner, request.prompt
    if request.scores.entries_per_token:
        tokens = planner.estimate_tokens(request.model, prompt) * prompt.sequence_count
        if not request.scores.is_small(SAFELY_SMALL * tokens):
            return True
    return planner.needs_exact_count(request.model, prompt)


def _on_texts_counted(
    services: Services, request: PreparedRequest, on_counted: OnCounted, counts: list[int] | None
) -> None:
    """The tokenizer has counted the texts, or cannot."""
    model, prompt = request.model, request.prompt
    if counts:
        # The chat template's own tokens are what the estimator adds to an empty prompt.
        tokens = max(counts) + int(model.estimator.overhead_tokens)
        on_counted(tokens, (prompt.known_tokens or 0) + sum(counts))
    else:
        on_counted(services.planner.estimate_tokens(model, prompt), None)
