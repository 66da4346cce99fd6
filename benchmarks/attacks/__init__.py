# SPDX-License-Identifier: Apache-2.0
"""``attacks``: clients that lie, under every rule, and what the defences change.

Three tables, each with claims that are judged by the rule of ``fastagg_sim.verdicts``:

* **Hijack.** One client sends back the model's last change. The weight of its row in `fdms`,
  `fdms-soft` and `fdms-means`, with and without ``max_share``; K = 20, S = 5, it is active in every
  round.
* **Poison once.** One client sends one poisoned row and stays away. The distance of the model from
  that of a run without the poison after 1000 rounds, in norms of the poisoned row.
* **Accuracy.** Ten attacks by 5 to 40 % of 20 clients, 10 of them active, on two tasks: MNIST in
  five groups of clients, and Fashion-MNIST with Dirichlet proportions. The model is a softmax
  regression on images of 14 x 14. Attackers know the rows of the honest clients of the round.

Clients of all rules train together in one batched product, with the same samples and the same
absences, so that rules differ in nothing else. Finished parts are read from ``attacks.csv``.
"""

from benchmarks.attacks.command import add_options, run

__all__ = ["add_options", "run"]
