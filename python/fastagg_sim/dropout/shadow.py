# SPDX-License-Identifier: Apache-2.0
"""The candidates: the clients that the adversary of Su et al. may silence (section 6.1).

They are chosen from two shadow runs. In a shadow run every client is active in every round, and the
data are drawn anew from the same distributions (option `redraw` of the partition dirichlet and of
the data set synthetic), so the adversary does not use the data of the real run. The first shadow
run is FedAvg. The second is centered clipping, whose clients send their momentum. The caller
computes the runs and records one norm per round and client (`fastagg_sim.shadow_runs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastagg_sim.files import write_atomically


@dataclass(frozen=True)
class Candidates:
    """Two disjoint lists of client ids, each sorted by decreasing change.

    fedavg: the num_fedavg clients whose gradient sums change most.
    clipping: among the others, the num_clipping clients whose momentum changes most.
    """

    fedavg: tuple[int, ...]
    clipping: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """All candidates, ascending, for the option `candidates` of the process adversarial."""
        return sorted(self.fedavg + self.clipping)

    def write(self, path: str | Path) -> None:
        """Write a CSV file (columns client, shadow) that the process adversarial can read."""
        lines = ["client,shadow"]
        lines += (f"{client},fedavg" for client in self.fedavg)
        lines += (f"{client},clipping" for client in self.clipping)
        write_atomically(Path(path), "\n".join(lines) + "\n")


def choose_candidates(
    fedavg_norms: torch.Tensor,
    clipping_norms: torch.Tensor,
    *,
    first_round: int = 5,
    last_round: int = 150,
    num_fedavg: int = 25,
    num_clipping: int = 10,
    absolute: bool = True,
) -> Candidates:
    """Choose the candidates from the norms recorded in the two shadow runs.

    fedavg_norms: float [T, M]; entry (t, i) is the norm of the sum of the gradients of client i's
        local steps in round t, that is, of its model difference divided by the local learning rate
        of the round.
    clipping_norms: float [T, M]; entry (t, j) is the norm of client j's momentum in round t.
    first_round, last_round: T_1 and T_2 of the paper, counted from 0.
    num_fedavg, num_clipping: K'_1 and K'_2 of the paper.
    absolute: rank by the change | |a(T_2)| - |a(T_1)| |, as in the released code; in the paper the
        outer bars are hard to distinguish from those of the norms. False: rank by the growth
        |a(T_2)| - |a(T_1)|.

    Clients with equal change are ranked by id.

    Raises ValueError, naming the argument, for mismatched shapes, rounds outside the runs, norms
    that are not finite, or more candidates than clients.
    """
    if fedavg_norms.ndim != 2 or clipping_norms.ndim != 2:
        raise ValueError(
            f"fedavg_norms, clipping_norms: expected [rounds, clients], got "
            f"{tuple(fedavg_norms.shape)} and {tuple(clipping_norms.shape)}"
        )
    clients = fedavg_norms.shape[1]
    if clipping_norms.shape[1] != clients:
        raise ValueError(
            f"clipping_norms: expected {clients} clients as in fedavg_norms, "
            f"got {clipping_norms.shape[1]}"
        )
    if num_fedavg < 0 or num_clipping < 0 or num_fedavg + num_clipping > clients:
        raise ValueError(
            f"num_fedavg, num_clipping: expected at most {clients} clients together, "
            f"got {num_fedavg} and {num_clipping}"
        )
    changes = []
    for name, norms in (("fedavg_norms", fedavg_norms), ("clipping_norms", clipping_norms)):
        if not 0 <= first_round < last_round < len(norms):
            raise ValueError(
                f"first_round, last_round: expected 0 <= first_round < last_round < {len(norms)}, "
                f"the rounds of {name}, got {first_round} and {last_round}"
            )
        change = norms[last_round].double() - norms[first_round].double()
        if not change.isfinite().all():
            raise ValueError(f"{name}: expected finite norms in rounds {first_round}, {last_round}")
        changes.append(change.abs() if absolute else change)
    fedavg = _largest(changes[0], range(clients), num_fedavg)
    others = [client for client in range(clients) if client not in fedavg]
    return Candidates(fedavg, _largest(changes[1], others, num_clipping))


def _largest(change: torch.Tensor, clients: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the `count` clients with the largest `change`; ties are broken by the lower id."""
    ranked = sorted(clients, key=lambda client: (-float(change[client]), client))
    return tuple(ranked[:count])
