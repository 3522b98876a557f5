"""An estimate of a prompt's tokens from its bytes, calibrated by the counts that the engines report.

tokens ≈ bytes * slope + overhead, fitted by least squares on relative errors with exponential forgetting. The
slope is one over the bytes per token of the traffic's language; the overhead is what the chat template adds.
The interval comes from the relative errors of the last predictions, so it is as wide as the traffic is mixed.
"""

from __future__ import annotations

from math import ceil, floor, sqrt

PRIOR_BYTES_PER_TOKEN = 4.0
LOWEST_BYTES_PER_TOKEN = 1.5

_MEMORY_SAMPLES = 500  # a sample's weight has fallen to 1/e after this many more
_WINDOW_SAMPLES = 256  # errors remembered for the interval
_TRUSTED_SAMPLES = 32  # from here on the interval is the observed one …
_TRUSTED_SIZE_SAMPLES = 8  # … for prompts of sizes of which this many were seen
_SIZE_MEMORY_SAMPLES = 2000  # a size not seen for this long is unknown again
_MAX_SIZE_BITS = 32
_SORT_EVERY = 16
_PRIOR_SAMPLES = 1.0  # what the prior of slope and overhead is worth
_SMALL_PROMPT_BYTES = 64.0  # relative errors below this size are mostly the template's
_SMALL_PROMPT_TOKENS = 50.0
_TAIL = 0.01  # quantile left out at each end of the window
_MARGIN = 0.1  # the interval is widened by this share of its half-widths
_LARGEST_ERROR = 0.5  # scaled errors beyond it are pulled in
_MAX_TOKENS_PER_BYTE = 1.0  # of any byte-level tokenizer
_MIN_TOKENS_PER_BYTE = 1 / 24  # rules and padding compress best


class TokenEstimator:
    """Calibrates itself by `observe`; state is bounded. One per model.

    `template_tokens` is what a chat template may add to any prompt; it only enters the upper bound, and grows
    when more is seen.
    """

    def __init__(self, template_tokens: int = 256) -> None:
        if template_tokens < 0:
            raise ValueError(f"template_tokens must be at least 0, got {template_tokens}")
        self._template_tokens = template_tokens
        self._slope = 1 / PRIOR_BYTES_PER_TOKEN
        self._overhead = 0.0
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0  # of the weighted least squares
        self._samples = 0
        self._errors: list[float] = []  # ring of the last scaled errors, unclipped
        self._low_error = 0.0
        self._high_error = 0.0
        # By the size's power of two, with a neighbour at each end: samples seen, number of the last one.
        self._size_counts = [0] * (_MAX_SIZE_BITS + 2)
        self._size_last = [0] * (_MAX_SIZE_BITS + 2)

    @property
    def samples(self) -> int:
        """Observations taken in."""
        return self._samples

    @property
    def bytes_per_token(self) -> float:
        return 1 / self._slope

    @property
    def overhead_tokens(self) -> float:
        """Tokens that a prompt has beyond those of its bytes."""
        return self._overhead

    def estimate(self, prompt_bytes: int) -> int:
        """Expected tokens, at least 1."""
        return max(1, round(prompt_bytes * self._slope + self._overhead))

    def interval(self, prompt_bytes: int) -> tuple[int, int]:
        """Tokens that it may plausibly be, low and high, both included; the estimate lies within."""
        upper = self.upper_bound(prompt_bytes)
        if not self._is_size_known(prompt_bytes):
            low = prompt_bytes * _MIN_TOKENS_PER_BYTE  # a table with padded columns, say
            high = prompt_bytes / LOWEST_BYTES_PER_TOKEN + self._template_tokens
            estimate = prompt_bytes * self._slope + self._overhead
            return max(1, floor(min(low, estimate))), min(upper, ceil(max(high, estimate)))
        estimate = max(1.0, prompt_bytes * self._slope + self._overhead)
        scale = sqrt(estimate * (estimate + _SMALL_PROMPT_TOKENS))
        low = estimate + scale * self._low_error
        high = estimate + scale * self._high_error
        return max(1, floor(low)), max(1, min(upper, ceil(high)))

    def upper_bound(self, prompt_bytes: int) -> int:
        """Tokens that a byte-level tokenizer cannot exceed: one per byte, and the template's."""
        return prompt_bytes + self._template_tokens

    def observe(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """An engine has counted a prompt's tokens. Impossible counts are ignored, odd ones weigh little."""
        excess = prompt_tokens - prompt_bytes
        if prompt_bytes < 1 or prompt_tokens < 1 or excess > 4 * max(self._template_tokens, 64):
            return
        if excess > self._template_tokens:
            self._template_tokens = excess
        self._samples += 1
        self._count_size(prompt_bytes)
        estimate = max(1.0, prompt_bytes * self._slope + self._overhead)
        scale = sqrt(estimate * (estimate + _SMALL_PROMPT_TOKENS))
        error = (prompt_tokens - estimate) / scale
        self._remember(error)
        # Pulled in, an absurd sample weighs no more than an odd one; a change of traffic still gets through.
        clipped = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
        self._add(float(prompt_bytes), estimate + clipped * scale)
        self._fit()

    def _is_size_known(self, prompt_bytes: int) -> bool:
        """Return whether prompts of about this size are among the recent samples: a fit does not reach beyond them."""
        if self._samples < _TRUSTED_SAMPLES:
            return False
        bits = min(prompt_bytes.bit_length(), _MAX_SIZE_BITS)
        counts, last, oldest = self._size_counts, self._size_last, self._samples - _SIZE_MEMORY_SAMPLES
        if counts[bits] >= _TRUSTED_SIZE_SAMPLES and last[bits] >= oldest:
            return True
        seen = sum(counts[near] for near in (bits - 1, bits, bits + 1) if last[near] >= oldest)
        return seen >= _TRUSTED_SIZE_SAMPLES

    def _count_size(self, prompt_bytes: int) -> None:
        bits = min(prompt_bytes.bit_length(), _MAX_SIZE_BITS)
        if self._size_last[bits] < self._samples - _SIZE_MEMORY_SAMPLES:
            self._size_counts[bits] = 0
        self._size_counts[bits] += 1
        self._size_last[bits] = self._samples

    def _remember(self, error: float) -> None:
        errors = self._errors
        if len(errors) < _WINDOW_SAMPLES:
            errors.append(error)
        else:
            errors[self._samples % _WINDOW_SAMPLES] = error
        if self._samples % _SORT_EVERY == 0:
            ordered = sorted(errors)
            left_out = int(len(ordered) * _TAIL)
            self._low_error = min(0.0, ordered[left_out]) * (1 + _MARGIN)
            self._high_error = max(0.0, ordered[-1 - left_out]) * (1 + _MARGIN)

    def _add(self, size_bytes: float, tokens: float) -> None:
        weight = 1 / (size_bytes + _SMALL_PROMPT_BYTES) ** 2
        keep = 1 - 1 / _MEMORY_SAMPLES
        self._w = self._w * keep + weight
        self._wx = self._wx * keep + weight * size_bytes
        self._wxx = self._wxx * keep + weight * size_bytes * size_bytes
        self._wy = self._wy * keep + weight * tokens
        self._wxy = self._wxy * keep + weight * size_bytes * tokens

    def _fit(self) -> None:
        # Prompts of one size cannot separate slope from overhead. The prior decides then: it counts as a sample that
        # has the prior's slope, and as one of the size seen that has no overhead.
        w = self._w * (1 + _PRIOR_SAMPLES / min(self._samples, _MEMORY_SAMPLES))
        wxx = self._wxx + _PRIOR_SAMPLES
        wxy = self._wxy + _PRIOR_SAMPLES / PRIOR_BYTES_PER_TOKEN
        determinant = w * wxx - self._wx * self._wx  # above 0, by Cauchy-Schwarz and the prior
        slope = (w * wxy - self._wx * self._wy) / determinant
        overhead = (wxx * self._wy - self._wx * wxy) / determinant
        if overhead < 0:  # templates only add
            slope, overhead = wxy / wxx, 0.0
        self._slope = min(max(slope, _MIN_TOKENS_PER_BYTE), _MAX_TOKENS_PER_BYTE)
        self._overhead = overhead
