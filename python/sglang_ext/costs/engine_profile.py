"""The engine profile: what `sglang-ext profile` writes, and what a simulation, planner or policy reads.

    {"format": "sglang-ext engine profile", "version": 1, "model": "...", "device": "...",
     "sp": [{"size": 1, "a_s": 0.03, "b_s_per_token": 5.6e-5, "c_s_per_token2": 2.5e-9, "d_s_per_token2": 1.3e-9}],
     "prefill": {"alpha_s": 1e-10, "token_s": 2e-5, "read_s": 0.0, "kappa_s": 0.01},
     "iteration": {...}, "gap_s": 0.001, "busy_request_s": 0.003, "front_end": {...},
     "pipelines": [{"stages": 2, "prefill": {...}, "iteration": {...}, "hop": {"fixed_s": 0.0, "token_s": 1e-9},
                    "relative": [1.0, 0.9], "kv_tokens": 400000}],
     "fit": {...}, "points": [...], "provenance": {...}}

`sp` (costs by SP size), `prefill` (LAPS's coefficients) or `pipelines` (an entry for each number of stages: what an
iteration takes on the slowest stage) is needed, so that a profile may also be written by hand; everything else next to
format, version and model may be absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from sglang_ext.costs.flow_shop import NO_HOP, Hop, Stages
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost

FORMAT = "sglang-ext engine profile"
VERSION = 1
PREFILL_FIELDS = ("alpha_s", "token_s", "read_s", "kappa_s")
_SP_FIELDS = ("a_s", "b_s_per_token", "c_s_per_token2", "d_s_per_token2")


class ProfileError(ValueError):
    """A file is no profile that can be used; the text is one line for the user."""


class IterationCost(NamedTuple):
    """Coefficients of the duration of one iteration; none of them is negative. L: new tokens, C: cached tokens."""

    fixed_s: float
    request_s: float  # per request of the batch
    token_s: float  # per L
    read_s: float  # per C
    cached2_s: float  # per C^2
    cached_new_s: float  # per C L
    new2_s: float  # per L^2

    def iteration_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Seconds of an iteration with these (new, cached) tokens of each request."""
        work = features(lengths)
        return sum(coefficient * feature for coefficient, feature in zip(self, work, strict=True))


def features(lengths: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Return what each coefficient of `IterationCost` is multiplied by."""
    return (
        1.0,
        float(len(lengths)),
        float(sum(new for new, _ in lengths)),
        float(sum(cached for _, cached in lengths)),
        float(sum(cached * cached for _, cached in lengths)),
        float(sum(cached * new for new, cached in lengths)),
        float(sum(new * new for new, _ in lengths)),
    )


class FrontEnd(NamedTuple):
    """Time of a request outside of the scheduler's iterations, on an idle instance, which it does not occupy.

    Linear in the prompt's tokens P: HTTP, queues between processes and the scheduler's intake before its first
    iteration; the way of the first token to the client after its last one, the KV transfer to decode included where
    that was measured. No coefficient is negative.
    """

    before_s: float
    before_token_s: float  # per P
    after_s: float
    after_token_s: float  # per P

    def entry_delay_s(self, prompt_tokens: int) -> float:
        """Seconds from the client's sending to the request being in the scheduler's queue."""
        return self.before_s + self.before_token_s * prompt_tokens

    def return_delay_s(self, prompt_tokens: int) -> float:
        """Seconds from the end of the last iteration to the first token at the client."""
        return self.after_s + self.after_token_s * prompt_tokens


class PipelineCosts(NamedTuple):
    """An instance of several stages: what an iteration takes on the slowest one, and the way from stage to stage."""

    stages: Stages
    coefficients: CostCoefficients
    iteration: IterationCost | None
    kv_tokens: int | None = None  # that the instance holds, each stage for its layers

    def stage_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds of a lone chunk on the slowest stage."""
        if self.iteration is not None:
            return self.iteration.iteration_s([(new_tokens, cached_tokens)])
        return self.coefficients.chunk_s(new_tokens, cached_tokens)


class BadFit(NamedTuple):
    """A form that does not describe what was measured, in a profile that was written all the same."""

    form: str  # `sp 1`, `prefill`, `iteration`
    error_p90: float


class EngineProfile(NamedTuple):
    """Costs of one model on one device, as far as the profile has them.

    `candidates`, `coefficients` or `pipelines` are there.
    """

    model: str
    device: str | None
    candidates: tuple[SpCandidate, ...]  # by SP size; may be empty
    coefficients: CostCoefficients | None
    iteration: IterationCost | None
    gap_s: float  # between two iterations while work waits
    busy_request_s: float  # of a request, in addition to its share of iterations, while others wait
    front_end: FrontEnd | None
    bad_fits: tuple[BadFit, ...]
    pipelines: tuple[PipelineCosts, ...] = ()  # by the number of stages


def _content(path: Path) -> object:
    """The file's JSON. ProfileError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ProfileError(f"{path} is not JSON") from None


def load_profile(path: Path) -> EngineProfile:
    """Read and check a profile. ProfileError, in one line that names the file and the field."""
    content = _content(path)
    try:
        return _profile(content)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


class MeasuredServer(NamedTuple):
    """The server that a profile was measured on, as far as the profile says: None where it does not."""

    tp: int | None
    chunk_tokens: int | None  # most tokens of an iteration
    kv_tokens: int | None  # that the instance holds
    is_cpu: bool  # SGLang's CPU engine
    pp: int | None = None
    hidden_size: int | None = None  # of the model
    layers: int | None = None


def load_measured_server(path: Path) -> MeasuredServer:
    """Return what stands in the profile's `provenance`. ProfileError names the file and the field."""
    content = _content(path)
    provenance = content.get("provenance") if isinstance(content, dict) else None
    arguments = provenance.get("server_arguments") if isinstance(provenance, dict) else None
    shape = provenance.get("model_shape") if isinstance(provenance, dict) else None

    def count(entries: object, part: str, field: str) -> int | None:
        value = entries.get(field) if isinstance(entries, dict) else None
        if value is None or value == -1:  # -1: SGLang's word for "not limited"
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProfileError(f'{path}: "provenance": {part}{field} must be a whole number of at least 1')
        return value

    return MeasuredServer(
        count(arguments, "server_arguments, ", "tp_size"),
        count(arguments, "server_arguments, ", "chunked_prefill_size"),
        count(provenance, "", "kv_tokens"),
        isinstance(arguments, dict) and arguments.get("device") == "cpu",
        count(arguments, "server_arguments, ", "pp_size"),
        count(shape, "model_shape, ", "hidden_size"),
        count(shape, "model_shape, ", "num_hidden_layers"),
    )


def write_profile(path: Path, content: Mapping[str, object]) -> None:
    """Write a profile, whole or not at all; format and version are added."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1, allow_nan=False)
    try:
        scratch.write_text(text + "\n", encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def sp_entry(size: int, cost: SpCost) -> dict[str, float]:
    """One SP size as it stands in the file."""
    return {"size": size, **{field: getattr(cost, field) for field in _SP_FIELDS}}


def pipeline_entry(costs: PipelineCosts) -> dict[str, object]:
    """One number of stages as it stands in the file."""
    entry: dict[str, object] = {
        "stages": costs.stages.count,
        "prefill": {field: getattr(costs.coefficients, field) for field in PREFILL_FIELDS},
    }
    if costs.iteration is not None:
        entry["iteration"] = costs.iteration._asdict()
    entry["hop"] = costs.stages.hop._asdict()
    if costs.stages.relative:
        entry["relative"] = list(costs.stages.relative)
    if costs.kv_tokens is not None:
        entry["kv_tokens"] = costs.kv_tokens
    return entry


def read_for_adding(path: Path, model: str) -> Mapping[str, object]:
    """A profile as it is, for another number of stages to be added. ProfileError if it is none, or of another model."""
    profile = load_profile(path)
    if PurePath(profile.model).name != PurePath(model).name:
        raise ProfileError(f"{path}: the profile is of model {profile.model}, the instance serves {model}")
    content = _content(path)
    assert isinstance(content, dict)  # load_profile has read it
    return content


def _profile(content: object) -> EngineProfile:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ProfileError(f'no engine profile: "format" is not "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ProfileError(f"version {content.get('version', 'missing')} is not the one this program reads, {VERSION}")
    model, device = content.get("model"), content.get("device")
    if not isinstance(model, str) or not model:
        raise ProfileError('"model" is missing')
    if not ("sp" in content or "prefill" in content or "pipelines" in content):
        raise ProfileError('a profile has "sp", "prefill" or "pipelines"')
    coefficients = _coefficients(content) if "prefill" in content else None
    iteration = _iteration(content) if "iteration" in content else None
    front_end = FrontEnd(*_numbers(content, "front_end", FrontEnd._fields)) if "front_end" in content else None
    return EngineProfile(
        model,
        str(device) if device is not None else None,
        _candidates(content["sp"]) if "sp" in content else (),
        coefficients,
        iteration,
        _number(content, None, "gap_s") if "gap_s" in content else 0.0,
        _number(content, None, "busy_request_s") if "busy_request_s" in content else 0.0,
        front_end,
        _bad_fits(content) if "fit" in content else (),
        _pipelines(content["pipelines"]) if "pipelines" in content else (),
    )


def _coefficients(content: Mapping[str, object]) -> CostCoefficients:
    alpha_s, token_s, read_s, kappa_s = _numbers(content, "prefill", PREFILL_FIELDS)
    if token_s == 0 and alpha_s == 0:
        raise ProfileError('"prefill": a token costs nothing')
    return CostCoefficients(alpha_s, token_s, read_s, kappa_s)


def _iteration(content: Mapping[str, object]) -> IterationCost:
    iteration = IterationCost(*_numbers(content, "iteration", IterationCost._fields))
    if iteration.iteration_s([(1, 0)]) <= 0:
        raise ProfileError('"iteration": a token costs nothing')
    return iteration


def _pipelines(entries: object) -> tuple[PipelineCosts, ...]:
    if not isinstance(entries, list) or not entries:
        raise ProfileError('"pipelines" is a list of at least one number of stages')
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise ProfileError('"pipelines": an entry is no object')
        count = _number(entry, "pipelines", "stages")
        if count != int(count) or count < 2:
            raise ProfileError(f'"pipelines": {count:g} stages are not a whole number of at least 2')
        where = f'"pipelines", {count:g} stages: '
        if "prefill" not in entry:
            raise ProfileError(f'{where}"prefill" is missing')
        try:
            coefficients = _coefficients(entry)
            iteration = _iteration(entry) if "iteration" in entry else None
            hop = Hop(*_numbers(entry, "hop", Hop._fields)) if "hop" in entry else NO_HOP
            relative = entry.get("relative", [])
            if not isinstance(relative, list):
                raise ProfileError('"relative" is no list')
            stages = Stages(
                int(count), hop, tuple(_number({"relative": share}, None, "relative") for share in relative)
            )
            kv_tokens = int(_number(entry, None, "kv_tokens")) if "kv_tokens" in entry else None
        except ValueError as error:
            raise ProfileError(f"{where}{error}") from None
        found.append(PipelineCosts(stages, coefficients, iteration, kv_tokens))
    counts = [choice.stages.count for choice in found]
    if len(set(counts)) < len(counts):
        raise ProfileError('"pipelines" has a number of stages twice')
    return tuple(sorted(found, key=lambda pipeline: pipeline.stages.count))


def _bad_fits(content: Mapping[str, object]) -> tuple[BadFit, ...]:
    forms, bound = content["fit"], _number(content, None, "max_error")
    if not isinstance(forms, dict):
        raise ProfileError('"fit" is no object')
    fits = [BadFit(form, _number(errors, f"fit, {form}", "error_p90")) for form, errors in forms.items()]
    return tuple(fit for fit in fits if fit.error_p90 > bound)


def _candidates(entries: object) -> tuple[SpCandidate, ...]:
    if not isinstance(entries, list) or not entries:
        raise ProfileError('"sp" is a list of at least one SP size')
    candidates = []
    for entry in entries:
        values = [_number(entry, "sp", field) for field in _SP_FIELDS]
        size = _number(entry, "sp", "size")
        if size != int(size) or size < 1:
            raise ProfileError(f'"sp": size {size:g} is not a whole number of at least 1')
        if not any(values):
            raise ProfileError(f'"sp": a chunk on size {size:g} costs nothing')
        candidates.append(SpCandidate(int(size), SpCost(*values)))
    if len({candidate.size for candidate in candidates}) < len(candidates):
        raise ProfileError('"sp" has a size twice')
    return tuple(candidates)


def _numbers(content: Mapping[str, object], part: str, fields: tuple[str, ...]) -> list[float]:
    return [_number(content[part], part, field) for field in fields]


def _number(entry: object, part: str | None, field: str) -> float:
    value = entry.get(field) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        where = f'"{part}": ' if part else ""
        raise ProfileError(f"{where}{field} must be a number of at least 0")
    return float(value)
