"""The file of length classes, or JSON in its place: read, and checked against the instances that are given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sglang_ext.types import Role
from sglang_ext_router.decide.length_classes import ClassSpec, LengthClasses, parse_length_classes
from sglang_ext_router.worker_urls import normal_url


def read_length_classes(given: str) -> LengthClasses:
    """Return the classes of a file, or of JSON itself; none for an empty text. Raise ValueError, one line."""
    if not given:
        return LengthClasses()
    try:
        text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
        classes = parse_length_classes(json_or_yaml(text))
    except OSError as error:
        raise ValueError(f"{given}: {error.strerror or error}") from None
    except yaml.YAMLError:
        raise ValueError(f"{given[:64]} is neither YAML nor JSON") from None
    return LengthClasses(*(tuple([_with_normal_urls(spec) for spec in specs]) for specs in classes))


def check_instances(classes: LengthClasses, roles: Mapping[str, Role]) -> None:
    """Raise ValueError where a class has an instance that is not given with a role of its stage."""
    for stage, specs in (("prefill", classes.prefill), ("decode", classes.decode)):
        for spec in specs:
            for url in spec.instances:
                role = roles.get(url)
                if role is None or role is Role.PLAIN or role.is_prefill is not (stage == "prefill"):
                    raise ValueError(f"{stage} class {spec.name}: {url} is not given as a {stage} instance")


def json_or_yaml(text: str) -> Any:
    """Parse a file. Not all of JSON's numbers are YAML's: 1e-3 is a text there."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.safe_load(text)


def _with_normal_urls(spec: ClassSpec) -> ClassSpec:
    try:
        return spec._replace(instances=tuple([normal_url(url) for url in spec.instances]))
    except ValueError as error:
        raise ValueError(f"class {spec.name}: {error}") from None
