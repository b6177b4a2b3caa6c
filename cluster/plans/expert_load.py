"""How unevenly tokens choose experts, and what that does to ranks whose kernels skip empty slots.

Experts' shares of all assignments are drawn once for all layers and microbatches from a symmetric
Dirichlet distribution, by a seed, with a given coefficient of variation: its variance is
(E - 1) / (E² (E α + 1)) for E experts.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trnsim.device.errors import BadInput

from .experts import local_tokens, slots_of_expert
from .plan import Plan


@dataclass(frozen=True)
class ExpertLoad:
    """used: of the slots of a rank's experts, by place on ep. dropped: of all assignments."""

    used: tuple[float, ...]
    dropped: float

    def note(self, imbalance: float) -> str:
        """A sentence for reports."""
        return (
            f"Expert load with a coefficient of variation of {imbalance:g}: kernels skip empty"
            f" slots, {min(self.used):.0%} to {max(self.used):.0%} of a rank's are used;"
            f" {self.dropped:.1%} of the assignments find no room."
        )


def expert_load(plan: Plan, imbalance: float, seed: int) -> ExpertLoad:
    """What ranks of ep have to do. Raises BadInput for a plan without experts, or an imbalance that
    shares of this many experts cannot have."""
    count = plan.model.experts
    if not count:
        raise BadInput("imbalance", imbalance, f"none: {plan.model.name} has no experts")
    most = (count - 1) ** 0.5
    if not 0 <= imbalance < most:
        raise BadInput("imbalance", imbalance, f"0 to less than {most:.4g} for {count} experts")
    wanted = shares(count, imbalance, seed) * local_tokens(plan) * plan.model.top_k
    room = slots_of_expert(plan)
    taken = np.minimum(wanted, room)
    used = taken.reshape(plan.ep, -1).mean(1) / room
    return ExpertLoad(tuple(used.tolist()), float(1 - taken.sum() / wanted.sum()))


def shares(count: int, imbalance: float, seed: int) -> np.ndarray:
    """f64 [count]: each expert's share of all assignments."""
    if imbalance == 0:
        return np.full(count, float(Fraction(1, count)))
    alpha = ((count - 1) / imbalance**2 - 1) / count
    return np.random.default_rng([seed, count]).dirichlet(np.full(count, alpha))
