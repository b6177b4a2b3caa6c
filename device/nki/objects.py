"""NKIObject: the base of kernels' own dataclasses and configuration objects."""

from dataclasses import MISSING
from typing import Any, ClassVar, get_origin


class _Record(type):
    """Calls the synthesised `__init__` also where `@dataclass` has put its own in its place."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        init = cls.__init__
        if "__dataclass_fields__" in vars(cls) and init.__code__.co_filename == "<string>":
            instance: Any = object.__new__(cls)
            NKIObject.__init__(instance, *args, **kwargs)
            return instance
        return super().__call__(*args, **kwargs)


class NKIObject(metaclass=_Record):
    """A record: `__init__` takes the annotated names and the plain class attributes.

    Arguments may come by position, in the order of the definition, bases first. A missing one is
    its class attribute or default, or None. `__post_init__` runs last. A class with an `__init__`
    of its own keeps that one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        names = _fields(cls)
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} takes {len(names)} arguments, not {len(args)}")
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            raise TypeError(f"{cls.__name__} has no field {', '.join(unknown)}")
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in names:
            value = given[name] if name in given else _default(cls, name)
            object.__setattr__(self, name, value)
        post = getattr(self, "__post_init__", None)
        if post is not None:
            post()


def _fields(cls: type) -> list[str]:
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base is object or base is NKIObject:
            continue
        for name, kind in vars(base).get("__annotations__", {}).items():
            if get_origin(kind) is not ClassVar and not str(kind).startswith("ClassVar"):
                names[name] = None
        for name, value in vars(base).items():
            if not name.startswith("_") and not _is_code(value):
                names[name] = None
    return list(names)


def _default(cls: type, name: str) -> Any:
    field = getattr(cls, "__dataclass_fields__", {}).get(name)
    if field is not None and field.default_factory is not MISSING:
        return field.default_factory()
    return getattr(cls, name, None)


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)
