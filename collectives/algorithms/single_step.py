"""Single-step mesh: everybody sends the whole buffer to everybody, and reduces locally.

One round, for all_reduce, where latency is worth more than n times the bytes. Every rank adds the
contributions in rank order, its own among them, so that all ranks end with the same bits.
"""

import numpy as np

from trnsim.device.errors import BadInput

from ..schedule import Collective, Schedule, block

KINDS = ("all_reduce", "barrier")


def schedule(collective: Collective) -> Schedule:
    """Raises BadInput for kinds other than KINDS."""
    if collective.kind not in KINDS:
        raise BadInput("collective of algorithm single_step_mesh", collective.kind, KINDS)
    n = collective.ranks
    if n == 1:
        return Schedule("single_step_mesh", 1, 1, ())
    target, source = np.divmod(np.arange(n * n), n)
    # Rank 0's buffer comes first: it replaces the rank's own, which is then added in its turn.
    moving = (target > 0) | (source > 0)
    source, target = source[moving], target[moving]
    one = block(source, target, 0, modulus=1, reduce=(source > 0))
    return Schedule("single_step_mesh", n, 1, (one,))
