"""Where tensors lie that did not all fit while the kernel ran: by what the whole trace shows.

While a kernel runs, a tensor is alive as long as Python holds it. The hardware's compiler sees the
whole kernel: there a tensor is alive from the first instruction that uses it to the last that reads
it (one that is written and never read, as long as the kernel holds it), and one that nothing uses
takes no room. So a memory that ran over its end is laid out again by that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..memory import Tensor
from .errors import at_line
from .memory import KernelMemory
from .trace import Entry


@dataclass(slots=True)
class _Life:
    tensor: Tensor
    first: int
    last: int = -1
    read: bool = False  # by the last instruction that uses it


def place(memory: KernelMemory, entries: Sequence[Entry]) -> bool:
    """Gives the tensors of an overflowing memory new addresses; whether it did.

    Raises OutOfMemory, with the line of the first allocation that did not fit; then all tensors
    are where they were.
    """
    if memory.overflow is None:
        return False
    lives = _lives(memory, entries)
    for life in lives:
        if not life.read:
            life.last = memory.released.get(id(life.tensor), len(entries))
    error, line = memory.overflow
    layout, before = memory.empty(), [(life.tensor, life.tensor.address) for life in lives]
    active: list[_Life] = []
    for life in lives:
        for dead in [one for one in active if one.last < life.first]:
            layout.free(dead.tensor)
            active.remove(dead)
        if not layout.move(life.tensor):
            for tensor, address in before:
                tensor.address = address
            raise at_line(error, line)
        active.append(life)
    memory.peak = layout.peak
    _forget_regions(entries, {id(life.tensor) for life in lives})
    return True


def _lives(memory: KernelMemory, entries: Sequence[Entry]) -> list[_Life]:
    known = {id(tensor): tensor for tensor in memory.placed}
    lives: dict[int, _Life] = {}
    for place, entry in enumerate(entries):
        for views, reads in ((entry.writes, False), (entry.reads, True)):
            for view in views:
                key = id(view.tensor)
                if key in known:
                    life = lives.setdefault(key, _Life(known[key], place))
                    life.read = reads or (life.last == place and life.read)
                    life.last = place
    return list(lives.values())


def _forget_regions(entries: Sequence[Entry], moved: set[int]) -> None:
    for entry in entries:
        for view in (*entry.reads, *entry.writes):
            if id(view.tensor) in moved:
                view._region = view.tensor._region = None
