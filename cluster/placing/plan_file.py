"""The traffic of a plan, from the file that `trnsim plan --json` writes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile, BadInput

OPERATIONS = {"send": "sendrecv"}
"""Names of `trnsim plan` that are other ones of `--traffic`."""


def with_plan(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `trnsim place` with machine, mesh and traffic of their `plan_file`, if they have
    one. Raises BadInput where there is no mesh."""
    options = dict(asked)
    path = options.pop("plan_file", None)
    if path is not None:
        found = read_plan(Path(path))
        options |= found | {"demands": (*found["demands"], *options["demands"])}
    if options["mesh"] is None:
        raise BadInput("--mesh", "none", "axes such as dp=2,tp=32, or --plan FILE")
    return options


def read_plan(path: Path) -> dict[str, Any]:
    """Instance, nodes, lnc, mesh and demands (as texts of `--traffic`) of a priced plan.

    Exchanges of neighbours on an axis, which are no groups of the mesh, are left out. Raises
    BadFile for a file that is none.
    """
    try:
        document = json.loads(path.read_text())
        plan, exchanges = document["plan"], document["exchanges"]
        found = {name: plan[name] for name in ("instance", "nodes", "lnc", "mesh")}
        return found | {"demands": tuple(_demands(exchanges))}
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadFile(f"{path}: is not what `trnsim plan --json` writes") from None


def _demands(exchanges: list[Mapping[str, Any]]) -> Iterator[str]:
    for exchange in exchanges:
        axes, times = exchange["group"].split(" x "), round(exchange["count"])
        operation = OPERATIONS.get(exchange["operation"], exchange["operation"])
        if all(axis.isidentifier() for axis in axes) and times:
            yield f"{'+'.join(axes)}={operation}:{exchange['nbytes']}:{times}"
