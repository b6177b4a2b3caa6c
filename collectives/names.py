"""Names of a fabric's nodes, made when asked for: equal parts store their names once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from trnsim.device.errors import BadInput

LISTED = 64  # an error lists so many names, no more
COMPARED = 4096  # and looks for the nearest among so many


class Names:
    """Distinct names in order, by number (no slices). `find` is the inverse of indexing."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> str:
        raise NotImplementedError

    def find(self, name: str) -> int | None:
        """The index of a name, or None."""
        raise NotImplementedError

    def need(self, name: str, field: str = "node") -> int:
        """The index of a name. Raises BadInput with the nearest one."""
        found = self.find(name)
        if found is None:
            raise self._unknown(field, name)
        return found

    def _unknown(self, field: str, name: str) -> BadInput:
        if len(self) <= LISTED:
            return BadInput(field, name, self)
        some = [self[i] for i in range(min(len(self), COMPARED))]
        near = BadInput(field, name, some).args[0].rpartition("; nearest valid: ")
        allowed = f"one of {len(self)} names, {self[0]} to {self[-1]}"
        return BadInput(field, name, allowed, near[2] if near[1] else None)

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return self.find(str(name)) is not None


@dataclass(frozen=True)
class Listed(Names):
    """Names one by one."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {name: i for i, name in enumerate(self.names)})

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]

    def find(self, name: str) -> int | None:
        return self._index.get(name)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Numbered(Names):
    """`chip0`, `chip1`, ...: one stem and `size` numbers from `first`."""

    stem: str
    size: int
    first: int = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        return f"{self.stem}{self.first + range(self.size)[int(index)]}"

    def find(self, name: str) -> int | None:
        number = _number(name, self.stem)
        inside = number is not None and 0 <= number - self.first < self.size
        return number - self.first if inside and number is not None else None


@dataclass(frozen=True)
class Repeated(Names):
    """The names of `size` equal parts: `server3/chip5`.

    Tags are `{stem}{first + copy * step}`; with `step` above 1 (parts of several servers each),
    `{stem}s{a}-{b}`.
    """

    stem: str
    size: int
    inner: Names
    first: int = 0
    step: int = 1

    def __len__(self) -> int:
        return self.size * len(self.inner)

    def __getitem__(self, index: int) -> str:
        copy, within = divmod(range(len(self))[int(index)], len(self.inner))
        return f"{self._tag(copy)}/{self.inner[within]}"

    def _tag(self, copy: int) -> str:
        start = self.first + copy * self.step
        return f"{self.stem}{start}" if self.step == 1 else f"{self.stem}s{self._range(start)}"

    def _range(self, start: int) -> str:
        return f"{start}-{start + self.step - 1}"

    def find(self, name: str) -> int | None:
        tag, slash, rest = name.partition("/")
        stem = self.stem if self.step == 1 else f"{self.stem}s"
        start = _number(tag.partition("-")[0], stem) if slash else None
        within = self.inner.find(rest)
        if start is None or within is None:
            return None
        copy = (start - self.first) // self.step
        if not 0 <= copy < self.size or self._tag(copy) != tag:
            return None
        return copy * len(self.inner) + within


class Chained(Names):
    """Several sequences of names, one after another."""

    def __init__(self, pieces: Sequence[Names]) -> None:
        self.pieces = tuple(p for p in pieces if len(p))
        self.stops = tuple(accumulate(map(len, self.pieces)))

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def __getitem__(self, index: int) -> str:
        at = range(len(self))[int(index)]
        for piece, stop in zip(self.pieces, self.stops, strict=True):
            if at < stop:
                return piece[at - stop + len(piece)]
        raise IndexError(index)

    def find(self, name: str) -> int | None:
        for piece, stop in zip(self.pieces, self.stops, strict=True):
            found = piece.find(name)
            if found is not None:
                return stop - len(piece) + found
        return None


def chained(pieces: Sequence[Names]) -> Names:
    """The pieces as one sequence; a single piece stays as it is."""
    whole = Chained(pieces)
    return whole.pieces[0] if len(whole.pieces) == 1 else whole


def _number(name: str, stem: str) -> int | None:
    """The number behind a stem, if that is all there is and it has no leading zeros."""
    rest = name.removeprefix(stem) if name.startswith(stem) else ""
    plain = rest.isascii() and rest.isdigit() and str(int(rest)) == rest
    return int(rest) if plain else None
