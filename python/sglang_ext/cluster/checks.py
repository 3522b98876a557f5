"""Checks of single settings: each failure is one line that starts with the setting's path."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that starts with the setting's path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def parse_id_set(text: str, path: str) -> frozenset[int]:
    """Parse a set such as "0-3,8" into its numbers; ConfigError names `path` otherwise."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(path, f"{text!r} is not a set of numbers such as 0-3,8")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def check_at_least(path: str, value: int, minimum: int) -> None:
    """Refuse a number below `minimum`."""
    if value < minimum:
        raise ConfigError(path, f"must be at least {minimum}, not {value}")


def check_positive(path: str, value: float) -> None:
    """Refuse zero, negative, infinite and undefined durations."""
    if not 0 < value < float("inf"):
        raise ConfigError(path, f"must be greater than 0, not {value}")


def check_port(path: str, value: int) -> None:
    """Refuse what is no TCP port; 0 stands for any free one."""
    if not 0 <= value <= 65535:
        raise ConfigError(path, f"{value} is not a port (0 to 65535)")


def check_choice(path: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not among `choices`."""
    if value not in choices:
        raise ConfigError(path, f"{value!r} is not one of {', '.join(choices)}")
