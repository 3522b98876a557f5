"""Settings of a command by section, read from a YAML file and from `--set SECTION.KEY=VALUE`.

What an operator changes at every start is a flag of the command; the rest is a setting. A table of `Setting` is the one
declaration of both: `add_arguments` adds the file and `--set` to a parser, `read` returns the values by attribute.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REQUIRED = object()
"""The default of a setting that must be given."""
UNSET = object()
"""The default of a setting that has no value where it is not given."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `section.key` in the file, `dest` in the program (the key, where it is empty)."""

    section: str
    key: str
    kind: type
    default: Any
    help: str
    choices: Sequence[str] = ()
    is_list: bool = False
    dest: str = ""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    def convert(self, value: Any, where: str) -> Any:
        """Return `value` of a file as the setting's kind. SettingsError names `where` it stands."""
        if self.is_list:
            return [self._convert(entry, where) for entry in (value if isinstance(value, list) else [value])]
        return self._convert(value, where)

    def parse(self, text: str, where: str) -> Any:
        """Return the value that the text after `--set NAME=` stands for; entries of a list have commas between them."""
        if self.is_list:
            return [self._convert(_parsed(entry, self.kind), where) for entry in text.split(",")]
        return self._convert(_parsed(text, self.kind), where)

    def _convert(self, value: Any, where: str) -> Any:
        wanted = self.kind
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if wanted is str and value is None:
            value = ""
        if wanted is Path and isinstance(value, str) and value:
            value = Path(value)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise SettingsError(f"{where} must be {_KINDS[wanted]}, not {value!r}")
        if self.choices and value not in self.choices:
            raise SettingsError(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        return value


def add_arguments(
    parser: argparse.ArgumentParser, settings: Sequence[Setting], *, file: str | None = "--config"
) -> None:
    """Add the file of settings, an option or a positional argument called `file`, and `--set` to `parser`.

    Without a file `--set` is the only way to give them.
    """
    known = ", ".join(sections(settings))
    what = f"a setting of {known} (docs/reference/command-line.md); repeat for more"
    if file is None:
        pass
    elif file.startswith("-"):
        parser.add_argument(file, metavar="FILE", help=f"YAML file of further settings, by section: {known}")
    else:
        parser.add_argument(file, nargs="?", metavar="FILE", help=f"YAML file of settings, by section: {known}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help=what if file is None else "one of those settings, which wins over the file; repeat for more",
    )


def sections(settings: Sequence[Setting]) -> dict[str, dict[str, Setting]]:
    """Return the settings of each section by their keys in the file."""
    by_section: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        by_section.setdefault(setting.section, {})[setting.key] = setting
    return by_section


def read(
    settings: Sequence[Setting], file: str | Path | None, assignments: Sequence[str], option: str = "--config"
) -> dict[str, Any]:
    """Return the value of every setting by `dest`: of `--set`, else of the file, else its default.

    SettingsError names what is wrong; `option` is what the file is called in its messages.
    """
    known = sections(settings)
    values: dict[str, Any] = {}
    for section, content in ({} if file is None else _content(Path(file), known, option)).items():
        if not isinstance(content, dict):
            raise SettingsError(f"{option}: {section} must be a section of settings")
        for key, value in content.items():
            setting = _find(known, f"{section}.{key}", f"{option}: {section}.{key}")
            values[setting.name] = setting.convert(value, f"{option}: {setting.name}")
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise SettingsError(f"--set: {assignment!r} is not of the form SECTION.KEY=VALUE")
        setting = _find(known, name, f"--set {name}")
        values[name] = setting.parse(text, f"--set {name}")
    for setting in settings:
        if setting.default is REQUIRED and setting.name not in values:
            raise SettingsError(f"{setting.name} is needed")
    return {
        setting.dest or setting.key: values.get(setting.name, setting.default)
        for setting in settings
        if setting.name in values or setting.default is not UNSET
    }


def with_settings(
    arguments: argparse.Namespace, settings: Sequence[Setting], file: str | Path | None = None, option: str = "--config"
) -> argparse.Namespace:
    """Return `arguments` of a parser of `add_arguments` with the value of every setting. Raises as `read`."""
    return argparse.Namespace(**{**vars(arguments), **read(settings, file, arguments.set, option)})


def _content(file: Path, known: Mapping[str, Mapping[str, Setting]], option: str) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{option}: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{option}: {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{option}: {file} must hold sections: {', '.join(known)}")
    return content


def _find(known: Mapping[str, Mapping[str, Setting]], name: str, where: str) -> Setting:
    section, _, key = name.partition(".")
    if section not in known:
        raise SettingsError(f"{where}: there is no section {section!r}; known are {', '.join(known)}")
    if key not in known[section]:
        raise SettingsError(f"{where}: {section} has no {key!r}; known are {', '.join(known[section])}")
    return known[section][key]


def _parsed(text: str, wanted: type) -> Any:
    """Return the value that a text stands for, or the text itself where it has another type."""
    if wanted is bool:
        return {"true": True, "false": False}.get(text, text)
    try:
        return wanted(text)
    except ValueError:
        return text
