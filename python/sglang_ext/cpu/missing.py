"""Names of a package that is not installed: harmless to define, an error to use."""

from __future__ import annotations

from typing import Any, NoReturn


class MissingDependencyError(RuntimeError):
    """Something of a package that is not installed was used at run time."""


def raise_missing(name: str) -> NoReturn:
    """Raise MissingDependencyError for the dotted name `name`."""
    package = name.split(".", 1)[0]
    raise MissingDependencyError(
        f"{name} was called, but {package} is not installed and sglang-ext has no CPU implementation of it; "
        f"install {package}, or turn off the SGLang option that needs it"
    )


class MissingObject:
    """A function, constant or submodule of an absent package, known only by its dotted name.

    It can be passed around, compared by identity and asked for attributes (which are missing too), because
    SGLang does so while it is imported; calling or indexing it raises MissingDependencyError.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> MissingObject:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MissingObject(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise_missing(self._name)

    def __getitem__(self, key: Any) -> NoReturn:
        raise_missing(self._name)

    def __bool__(self) -> NoReturn:
        raise_missing(self._name)

    def __repr__(self) -> str:
        return f"<missing {self._name}>"


class MissingKernel(MissingObject):
    """A Triton kernel that was defined but cannot be launched."""

    def __init__(self, function: Any) -> None:
        super().__init__(f"triton kernel {function.__module__}.{function.__qualname__}")
        self.fn = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MissingDependencyError(
            f"{self._name} was called, but triton is not installed and the CPU path has no replacement for it; "
            "turn off the SGLang option that needs it"
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self()


class _MissingClassMeta(type):
    """Class attributes (enum members, mostly used as default arguments) are missing objects."""

    def __getattr__(cls, attribute: str) -> MissingObject:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MissingObject(f"{cls.__module__}.{cls.__qualname__}.{attribute}")


def missing_class(module: str, name: str) -> type:
    """A class that can be subclassed and tested with isinstance, but not instantiated.

    Names of errors become exception types, so that `except package.SomeError` stays valid.
    """
    if name.endswith(("Error", "Exception", "OutOfResources")):
        return type(name, (Exception,), {"__module__": module})

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise_missing(f"{module}.{name}")

    return _MissingClassMeta(name, (), {"__module__": module, "__new__": refuse})
