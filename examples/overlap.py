"""Overlap: what a kernel's time can be between its two bounds.

A kernel needs 5 ms of the Tensor engine, 2 ms of the Vector engine and 4 ms of DMA. Run one after
the other they take 11 ms (serial). However well they overlap, they cannot take less than the
busiest engine needs, 5 ms (overlapped). In between lies a pipeline: the work is cut into chunks,
and while one chunk is in the Tensor engine the next is loaded into a second buffer and the last
one leaves through the Vector engine. Many small chunks need a third buffer to hide latencies.

Run: python examples/overlap.py
"""

from trnsim.device.chip import load_chip
from trnsim.device.memory import Memory
from trnsim.device.timeline import Timeline
from trnsim.device.units import format_time, parse_time

TENSOR, VECTOR, TRANSFER = parse_time("5ms"), parse_time("2ms"), parse_time("4ms")


def pipeline(chunks: int, buffers: int, timeline: Timeline | None = None) -> Timeline:
    """The kernel in `chunks` equal chunks, with that many buffers for each kind of tile."""
    timeline = timeline or Timeline()
    chip = load_chip("trn2")
    sbuf, psum = Memory.sbuf(chip, data=False), Memory.psum(chip, data=False)
    loaded = [sbuf.allocate((128, 512), "bf16", f"loaded{i}") for i in range(buffers)]
    product = [psum.allocate((128, 512), "f32", f"product{i}") for i in range(buffers)]
    result = [sbuf.allocate((128, 512), "bf16", f"result{i}") for i in range(buffers)]
    for chunk in range(chunks):
        tile, sums, out = (tiles[chunk % buffers] for tiles in (loaded, product, result))
        timeline.add("dma", TRANSFER // chunks, writes=[tile], name="load", queue="load")
        timeline.add("tensor", TENSOR // chunks, reads=[tile], writes=[sums], name="matmul")
        timeline.add("vector", VECTOR // chunks, reads=[sums], writes=[out], name="copy")
    return timeline


def main() -> None:
    """Prints the two bounds and what pipelines reach."""
    bounds = pipeline(chunks=1, buffers=1)
    print("busy: " + ", ".join(f"{k} {format_time(v)}" for k, v in bounds.busy.items() if v))
    print(f"overlapped bound  {format_time(bounds.overlapped)}")
    print(f"serial bound     {format_time(bounds.serial)}")
    print()
    print("                     ideal              Trn2 latencies")
    print("buffers          1          2           2           3")
    for chunks in (1, 2, 4, 10, 100, 1000):
        ideal = [pipeline(chunks, buffers) for buffers in (1, 2)]
        real = [pipeline(chunks, buffers, timeline=trn2()) for buffers in (2, 3)]
        ends = "".join(f"{format_time(timeline.end):>11s} " for timeline in ideal + real)
        print(f"{chunks:4d} chunks {ends}".rstrip())


def trn2() -> Timeline:
    """A timeline with the semaphore, DMA start and pipeline latencies of Trainium2."""
    return Timeline.of(load_chip("trn2"))


if __name__ == "__main__":
    main()
