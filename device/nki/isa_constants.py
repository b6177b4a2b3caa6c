"""Enumerations of `nki.isa`; `nki.isa.constants` has the same."""

from enum import Enum


class engine(Enum):
    """Engines of a NeuronCore. `unknown` leaves the choice open."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with an engine's accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who makes a DMA's descriptors: open, GpSimd, hardware, or nobody during the run."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What an address out of bounds does: an error, or nothing is moved."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """`double_row`: two rows of an fp8 contraction at once."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """NeuronCore versions; ordered, so that `version >= nc_version.gen3` works."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: "nc_version") -> bool:
        return self.value < other.value

    def __le__(self, other: "nc_version") -> bool:
        return self.value <= other.value

    def __gt__(self, other: "nc_version") -> bool:
        return self.value > other.value

    def __ge__(self, other: "nc_version") -> bool:
        return self.value >= other.value


class dma_engine(Enum):
    """Who moves the data of sendrecv."""

    dma = 1
    gpsimd_dma = 2


tensor_engine, vector_engine = engine.tensor, engine.vector
scalar_engine, gpsimd_engine, unknown_engine = engine.scalar, engine.gpsimd, engine.unknown
