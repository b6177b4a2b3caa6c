"""Files of nccom-test: replica groups, source-target pairs, counts, streams, and its results.

Formats: AWS Neuron documentation, tools/neuron-sys-tools/nccom-test.rst (SDK 2.32). Results are the
JSON of --report-to-json-file, or the table that older releases print.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile, BadInput, CollectiveMismatch

from . import nccom

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]


def read_json(path: str | Path) -> Any:
    """The JSON document in a file. Raises BadFile for a file that is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not JSON: {error}") from None


def read_groups(path: str | Path, ranks: int) -> Groups:
    """`{"replica_groups": [[[0, 1], [2, 3]]]}`, or without the outermost list, for a job.

    Raises BadFile for another form, BadInput for a rank outside the job or in two groups.
    """
    found = _lists(path, "replica_groups", depth=2)
    check_groups(found, ranks, f"{path}: replica_groups")
    return found


def check_groups(groups: Groups, ranks: int, field: str) -> None:
    """Raises BadInput for an empty list or group, a rank outside the job or a rank twice."""
    if not groups or not all(groups):
        raise BadInput(field, "an empty list", "groups of one rank or more")
    home: dict[int, int] = {}
    for number, group in enumerate(groups):
        for rank in group:
            if not 0 <= rank < ranks:
                raise BadInput(f"{field}: rank", rank, f"0 to {ranks - 1}, the ranks of the job")
            if rank in home:
                where = f"groups {home[rank]} and {number}"
                where = f"group {number} twice" if home[rank] == number else where
                raise BadInput(
                    f"{field}: rank", rank, f"groups that do not overlap; it is in {where}"
                )
            home[rank] = number


def read_pairs(path: str | Path, ranks: int) -> Pairs:
    """`{"src_target_pairs": [[[0, 1], [1, 0]]]}` (or without the outermost list).

    Raises BadFile for another form, BadInput for a rank outside the job or twice at one end.
    """
    found = _lists(path, "src_target_pairs", depth=2)
    for pair in found:
        if len(pair) != 2:
            raise BadFile(f"{path}: src_target_pairs: {list(pair)} is not a pair of ranks")
    for end, name in enumerate(("source", "target")):
        seen: set[int] = set()
        for pair in found:
            rank = pair[end]
            if not 0 <= rank < ranks:
                raise BadInput(f"{path}: {name}", rank, f"0 to {ranks - 1}, the ranks of the job")
            if rank in seen:
                raise BadInput(f"{path}: {name}", rank, "each rank at most once")
            seen.add(rank)
    return tuple((pair[0], pair[1]) for pair in found)


def _lists(path: str | Path, key: str, depth: int) -> Groups:
    """Lists of ints under `key`; an outermost list of one (the guide's form) is unwrapped."""
    document = read_json(path)
    value = document.get(key) if isinstance(document, Mapping) else document
    if value is None:
        raise BadFile(f"{path}: has no {key}")
    levels = _depth(value)
    if levels == depth + 1 and len(value) == 1:
        value, levels = value[0], depth
    if levels != depth or not all(_plain(row) for row in value):
        raise BadFile(f"{path}: {key} is not a list of lists of whole numbers")
    return tuple(tuple(row) for row in value)


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _plain(row: Any) -> bool:
    return isinstance(row, list) and all(type(item) is int for item in row)


def read_shares(path: str | Path, op: nccom.Operation, ranks: int) -> nccom.Shares:
    """The counts of --variable-size-op-metadata: one entry for all ranks, or one per rank.

    Raises BadFile for another form, CollectiveMismatch for receive counts that differ from the
    send counts of the pair.
    """
    document = read_json(path)
    entries = document.get("metadata") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise BadFile(f"{path}: has no list of objects named metadata")
    if len(entries) not in (1, ranks):
        raise BadInput(
            f"{path}: metadata", f"{len(entries)} entries", f"1 or {ranks}, one per rank"
        )
    sends = [_counts(path, entry, "send_counts") for entry in entries]
    receives = [_counts(path, entry, "recv_counts") for entry in entries]
    if op.kind == "all_to_all":
        return _pair_shares(path, op, ranks, sends, receives)
    return _piece_shares(path, op, ranks, sends, receives)


def _counts(path: str | Path, entry: Mapping[str, Any], key: str) -> list[int]:
    row = entry.get(key, [])
    if not _plain(row) or min(row, default=0) < 0:
        raise BadFile(f"{path}: {key} is not a list of counts of 0 or more")
    return row


def _pair_shares(path, op, ranks: int, sends: list, receives: list) -> nccom.Shares:
    for row in sends:
        _check_length(path, "send_counts", row, ranks)
    for target, row in enumerate(receives):
        if not row:
            continue
        _check_length(path, "recv_counts", row, ranks)
        for source, count in enumerate(row):
            sent = sends[source % len(sends)][target]
            if count != sent:
                raise CollectiveMismatch(
                    f"{path}: {op.name}: rank {source} sends {sent} elements to rank {target}, "
                    f"which expects {count}"
                )
    return nccom.Shares(tuple(map(tuple, sends)))


def _piece_shares(path, op, ranks: int, sends: list, receives: list) -> nccom.Shares:
    for row in sends:
        _check_length(path, "send_counts", row, 1)
    own = [row[0] for row in sends]
    given = [row for row in receives if row]
    for row in given:
        _check_length(path, "recv_counts", row, ranks)
    if len(own) == 1:
        own = given[0] if given else own * ranks
    for rank, row in enumerate(receives):
        for source, count in enumerate(row):
            if count != own[source]:
                raise CollectiveMismatch(
                    f"{path}: {op.name}: rank {source} sends {own[source]} elements, "
                    f"rank {rank} expects {count}"
                )
    return nccom.Shares((tuple(own),))


def _check_length(path: str | Path, key: str, row: Sequence[int], length: int) -> None:
    if len(row) != length:
        raise BadInput(f"{path}: {key}", f"{len(row)} counts", f"{length}")


STREAM_KEYS = (
    "operation", "datatype", "minbytes", "maxbytes", "stepbytes", "stepfactor", "ops_per_iter",
    "custom_replica_groups", "custom_src_target_pairs", "variable_size_op_metadata",
)  # fmt: skip


def read_streams(path: str | Path) -> list[dict[str, Any]]:
    """The operations of --streams-json, one per stream; keys as its long options, `-` as `_`.

    Raises BadFile for another form, BadInput for an unknown key.
    """
    document = read_json(path)
    streams = document.get("streams") if isinstance(document, Mapping) else document
    if not isinstance(streams, list) or not streams:
        raise BadFile(f"{path}: has no list named streams")
    for number, stream in enumerate(streams):
        if not isinstance(stream, Mapping):
            raise BadFile(f"{path}: stream {number} is not an object")
        for key in stream:
            if key not in STREAM_KEYS:
                raise BadInput(f"{path}: stream {number}", key, STREAM_KEYS)
            if not isinstance(stream[key], str | int | float):
                raise BadFile(f"{path}: stream {number}: {key} is neither text nor a number")
    return [dict(stream) for stream in streams]


@dataclass(frozen=True)
class Result:
    """One row of results: bytes, microseconds, and the bandwidths as the file prints them."""

    nbytes: int
    count: int | None
    dtype: str
    time_us: float
    algbw: float | None
    busbw: float | None
    algorithm: str = ""


@dataclass(frozen=True)
class Results:
    """A file of results. simulated: whether trnsim wrote it; header: of a printed table."""

    path: str
    rows: tuple[Result, ...]
    simulated: bool
    header: str = ""
    about: Mapping[str, Any] | None = None


def read_results(path: str | Path) -> Results:
    """Results of nccom-test or of `trnsim collective`: JSON, or a table as printed.

    Raises BadFile for a file with neither, or with rows that miss a size or a time.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: is neither JSON nor a table: not text") from None
    if text.lstrip()[:1] in ("{", "["):
        return _from_json(path, read_json(path))
    return _from_table(path, text)


def _from_json(path: str | Path, document: Any) -> Results:
    streams = document.get("streams") if isinstance(document, Mapping) else None
    if isinstance(streams, list) and streams:
        documents = [s for s in streams if isinstance(s, Mapping)]
    else:
        documents = [document] if isinstance(document, Mapping) else []
    lists = [d.get("results") for d in documents]
    rows = [row for own in lists if isinstance(own, list) for row in own]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise BadFile(f"{path}: has no results: neither of nccom-test nor of trnsim")
    about = documents[0].get("trnsim")
    about = about if isinstance(about, Mapping) else None
    results = tuple(_row(path, number, row) for number, row in enumerate(rows))
    return Results(str(path), results, about is not None, about=about)


def _row(path: str | Path, number: int, row: Mapping[str, Any]) -> Result:
    time_key = next((key for key in row if str(key).startswith("time")), "time:avg(us)")
    time_key = "time:avg(us)" if "time:avg(us)" in row else time_key
    missing = [key for key in ("size(B)", time_key) if not _number(row.get(key))]
    if missing:
        raise BadFile(f"{path}: result {number} has no number {missing[0]}")
    count, algbw, busbw = (_or_none(row, k) for k in ("count(elems)", "algbw(GB/s)", "busbw(GB/s)"))
    return Result(
        nbytes=int(row["size(B)"]),
        count=None if count is None else int(count),
        dtype=str(row.get("type", "")),
        time_us=float(row[time_key]),
        algbw=algbw,
        busbw=busbw,
        algorithm=str(row.get("algorithm", "")),
    )


def _number(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 <= value < float("inf")


def _or_none(row: Mapping[str, Any], key: str) -> float | None:
    return float(row[key]) if _number(row.get(key)) else None


def _from_table(path: str | Path, text: str) -> Results:
    """A table as nccom-test prints it; lines that are no rows (averages, logs) are passed over."""
    header: list[str] = []
    rows = []
    for line in text.splitlines():
        words = line.split()
        if "size(B)" in words:
            header = words[words.index("size(B)") :]
        elif header and len(words) == len(header) and re.fullmatch(r"[0-9]+", words[0]):
            values = {key: _value(word) for key, word in zip(header, words, strict=True)}
            rows.append(_row(path, len(rows), values))
    if not rows:
        raise BadFile(f"{path}: has no results: neither JSON nor a table with size(B) and time(us)")
    time = next((word for word in header if word.startswith("time")), "")
    return Results(str(path), tuple(rows), False, header=time)


def _value(word: str) -> float | int | str:
    try:
        return int(word) if word.isdigit() else float(word)
    except ValueError:
        return word
