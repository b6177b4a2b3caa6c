"""A heat map of link load on a fabric: how long each link is busy in a step of a placement.

Tori are drawn as they are wired, one panel for each plane of the busiest server. Chips around
switches are rows, their links to and from each kind of peer columns; other fabrics are a matrix of
sources and targets of the busiest part.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from trnsim.collectives.fabric import Fabric

from ..plotting import figure, save

MOST_NODES = 160  # of a matrix
_STUB = 0.42  # how far a link that wraps around is drawn beyond the edge
_APART = 0.09  # between the two directions of a cable


def busy_ms(fabric: Fabric, load: np.ndarray) -> np.ndarray:
    """float64[wires]: milliseconds that each link between nodes needs for its bytes."""
    wires = fabric.wires
    return load[:wires] / fabric.rate[:wires] * 1e3


def draw(path: Path, fabric: Fabric, loads: dict[str, np.ndarray]) -> None:
    """Write a heat map of some placements, by title, all on one scale. load: int64[links] bytes."""
    busy = {title: busy_ms(fabric, load) for title, load in loads.items()}
    top = max((float(each.max(initial=0)) for each in busy.values()), default=0) or 1.0
    server = _busiest_server(fabric, np.maximum.reduce(list(busy.values())))
    nodes = np.flatnonzero(fabric.server == server)
    torus = bool((fabric.grid[nodes, :2] >= 0).any()) and fabric.grid.shape[1] <= 3
    panels = _planes(fabric, nodes) if torus else [nodes[:MOST_NODES]]
    paint = _paint_torus if torus else _paint_matrix
    if not torus and (fabric.kind[nodes] != 0).any():
        panels, paint = [nodes[fabric.kind[nodes] == 0][:MOST_NODES]], _paint_peers
    images = []
    with figure(3.6 * len(panels) + 1, 3.4 * len(busy) + 0.4) as drawn:
        grid = drawn.subplots(len(busy), len(panels), squeeze=False)
        for row, (title, each) in zip(grid, busy.items(), strict=True):
            for axes, panel in zip(row, panels, strict=True):
                images.append(paint(axes, fabric, panel, each, top))
            row[0].set_title(f"{title}: busiest link {each.max(initial=0):.2f} ms", loc="left")
        drawn.colorbar(images[-1], ax=grid, label="ms a link is busy in a step")
        save(drawn, path)


def _busiest_server(fabric: Fabric, busy: np.ndarray) -> int:
    """The server (node of a job) with the busiest link of its own."""
    source, target = fabric.source[: len(busy)], fabric.target[: len(busy)]
    own = fabric.server[source] == fabric.server[target]
    if not own.any():
        return 0
    return int(fabric.server[source[np.where(own, busy, -1).argmax()]])


def _planes(fabric: Fabric, nodes: np.ndarray) -> list[np.ndarray]:
    """The nodes of each plane (last two dimensions) of a server's torus."""
    placed = nodes[fabric.kind[nodes] == 0]
    if fabric.coordinates.shape[1] < 3 or fabric.extents[placed[0], 2] <= 1:
        return [placed]
    outer = fabric.coordinates[placed, 0]
    return [placed[outer == plane] for plane in np.unique(outer)]


def _paint_torus(axes: Any, fabric: Fabric, nodes: np.ndarray, busy: np.ndarray, top: float) -> Any:
    """Chips as dots, each direction of each cable as a line of its load's colour."""
    from matplotlib.collections import LineCollection

    places = {node: _place(fabric, node) for node in nodes.tolist()}
    lines, values = [], []
    for link in _leaving(fabric, nodes, len(busy)):
        ends = int(fabric.source[link]), int(fabric.target[link])
        if ends[1] in places:
            lines.append(_line(places[ends[0]], places[ends[1]]))
            values.append(busy[link])
    drawn = LineCollection(lines, cmap="viridis_r", linewidths=4)
    drawn.set_array(np.array(values))
    drawn.set_clim(0, top)
    axes.add_collection(drawn)
    x, y = np.array(list(places.values())).T
    axes.scatter(x, y, s=180, color="white", edgecolor="black", zorder=3)
    for node, (column, row) in places.items():
        label = fabric.names[node].rpartition("chip")[2]
        axes.annotate(label, (column, row), ha="center", va="center", fontsize=7, zorder=4)
    axes.set(xlim=(x.min() - 0.6, x.max() + 0.6), ylim=(y.max() + 0.6, y.min() - 0.6))
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    return drawn


def _place(fabric: Fabric, node: int) -> tuple[float, float]:
    """(column, row) of a chip: its last two dimensions."""
    dims = fabric.extents.shape[1]
    extents, coordinates = fabric.extents[node], fabric.coordinates[node]
    used = [d for d in range(dims) if extents[d] > 0]
    row = coordinates[used[-2]] if len(used) > 1 else 0
    return float(coordinates[used[-1]]), float(row)


def _line(a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float]]:
    """From chip to chip, beside the other direction; a cable around the torus as a stub."""
    (ax, ay), (bx, by) = a, b
    dx, dy = bx - ax, by - ay
    if abs(dx) > 1 or abs(dy) > 1:
        dx, dy = -np.sign(dx) * _STUB, -np.sign(dy) * _STUB
    length = float(np.hypot(dx, dy)) or 1.0
    across = (-dy / length * _APART, dx / length * _APART)
    start = (ax + across[0], ay + across[1])
    return [start, (start[0] + dx, start[1] + dy)]


def _leaving(fabric: Fabric, nodes: np.ndarray, wires: int) -> list[int]:
    return np.flatnonzero(np.isin(fabric.source[:wires], nodes)).tolist()


def _paint_matrix(
    axes: Any, fabric: Fabric, nodes: np.ndarray, busy: np.ndarray, top: float
) -> Any:
    """Sources down, targets across; empty where there is no link."""
    place = {node: i for i, node in enumerate(nodes.tolist())}
    table = np.full((len(nodes), len(nodes)), np.nan)
    for link in _leaving(fabric, nodes, len(busy)):
        source, target = int(fabric.source[link]), int(fabric.target[link])
        if target in place:
            table[place[source], place[target]] = busy[link]
    image = axes.imshow(table, cmap="viridis_r", vmin=0, vmax=top)
    step = max(1, len(nodes) // 20)
    names = [fabric.names[node].rpartition("/")[2] for node in nodes[::step].tolist()]
    axes.set_xticks(range(0, len(nodes), step), names, rotation=90, fontsize=6)
    axes.set_yticks(range(0, len(nodes), step), names, fontsize=6)
    axes.set(xlabel="to", ylabel="from")
    axes.grid(False)
    return image


def _paint_peers(axes: Any, fabric: Fabric, nodes: np.ndarray, busy: np.ndarray, top: float) -> Any:
    """Chips down; across, the busiest of a chip's links to (and from) each kind of peer."""
    place = {node: i for i, node in enumerate(nodes.tolist())}
    cells: dict[tuple[str, int], float] = {}
    for link in _leaving(fabric, np.arange(len(fabric.names)), len(busy)):
        source, target = int(fabric.source[link]), int(fabric.target[link])
        for chip, peer, way in ((source, target, "to"), (target, source, "from")):
            if chip in place:
                key = (f"{way} {_family(fabric.names[peer])}", place[chip])
                cells[key] = max(cells.get(key, 0.0), float(busy[link]))
    columns = sorted({column for column, _ in cells}, key=lambda name: name.split()[::-1])
    table = np.full((len(nodes), len(columns)), np.nan)
    for (column, row), value in cells.items():
        table[row, columns.index(column)] = value
    image = axes.imshow(
        table, cmap="viridis_r", vmin=0, vmax=top, aspect="auto", interpolation="nearest"
    )
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=7)
    step = max(1, len(nodes) // 16)
    names = [fabric.names[node].rpartition("/")[2] for node in nodes[::step].tolist()]
    axes.set_yticks(range(0, len(nodes), step), names, fontsize=7)
    axes.grid(False)
    return image


def _family(name: str) -> str:
    """`rack-switch` of `node0/rack-switch1`."""
    return re.sub(r"[0-9]+$", "", name.rpartition("/")[2])
