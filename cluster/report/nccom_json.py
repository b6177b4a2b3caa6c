"""Results in the keys of nccom-test's --report-to-json-file, with what only a simulation knows.

Each result has nccom-test's keys (`size(B)`, `count(elems)`, `type`, `time:avg(us)`, `algbw(GB/s)`,
`busbw(GB/s)`, and `algorithm` and the total sizes, which it writes when asked) and ours beside
them. Several streams give `streams`, a list of such documents.
"""

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile

from ..collective import Row

GB = 1e9


def result(row: Row, dtype: str, stats: Sequence[str] = ("avg",)) -> dict[str, Any]:
    """One row. GB/s is 1e9 bytes per second, times are microseconds."""
    out: dict[str, Any] = {
        "size(B)": row.nbytes,
        "count(elems)": row.count,
        "type": dtype,
        "algbw(GB/s)": row.algbw / GB,
        "busbw(GB/s)": row.busbw / GB,
    }
    out |= {f"time:{name}(us)": row.percentile(name) / 1e6 for name in ("avg", *stats)}
    out |= {
        "algorithm": row.algorithm,
        "total_input_size(B)": row.input_bytes,
        "total_output_size(B)": row.output_bytes,
        "bound(GB/s)": None if row.bound == float("inf") else row.bound / GB,
        "limited_by": row.limited_by,
        "reason": row.reason,
        "rounds": row.rounds,
    }
    if row.alone_ps is not None:
        out["alone(us)"] = row.alone_ps / 1e6
    if row.late is not None:
        out |= {"after_last_arrival(us)": row.after_ps / 1e6, "last_rank": row.late}
    return out | ({"check": row.checked} if row.checked else {})


def write_json(path: str | Path, document: Any) -> None:
    """Raises BadFile for a file that cannot be written."""
    write_text(path, json.dumps(document, indent=4) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """In one step: a reader sees the old file or the whole new one. Raises BadFile."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise BadFile(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
