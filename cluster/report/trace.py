"""A run as a trace for ui.perfetto.dev: one process per rank, one track per engine and stream.

The format is the Trace Event Format (JSON); its times are microseconds, printed exactly.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..clocks import Event
from .nccom_json import write_text


def write_trace(
    path: Path, events: Iterable[Event], names: Mapping[int, str] | None = None
) -> None:
    """Writes `path` whole or not at all. names: of ranks, where `rank 3` does not say enough.

    Raises BadFile if it cannot be written.
    """
    entries = _entries(events, names or {})
    write_text(path, json.dumps({"displayTimeUnit": "ns", "traceEvents": entries}))


def _entries(events: Iterable[Event], names: Mapping[int, str]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    tracks: dict[tuple[int, str], int] = {}
    for event in events:
        place = (event.rank, event.track)
        if place not in tracks:
            tracks[place] = len(tracks) + 1
            name = names.get(event.rank, f"rank {event.rank}")
            entries += _names(event, tracks[place], name)
        entries.append(
            {
                "ph": "X",
                "pid": event.rank + 1,
                "tid": tracks[place],
                "name": event.name,
                "ts": event.start / 1e6,
                "dur": event.duration / 1e6,
                "args": event.detail,
            }
        )
    return entries


def _names(event: Event, thread: int, name: str) -> list[dict[str, object]]:
    process = event.rank + 1
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
        {"ph": "M", "pid": process, "tid": thread, "name": "thread_name",
         "args": {"name": event.track}},
        {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index",
         "args": {"sort_index": thread}},
    ]  # fmt: skip
