# SPDX-License-Identifier: Apache-2.0
"""Replace the shadow runs of Su et al.'s adversary, which take minutes to half an hour."""

from __future__ import annotations

from collections.abc import Sequence

from fastagg_sim.dropout.shadow import Candidates
from fastagg_sim.shadow_runs import Shadow


def any_candidates(_: Shadow, seeds: Sequence[int], **__: object) -> dict[int, Candidates]:
    """Replace ``Shadow.candidates``: return the same candidates always."""
    return {seed: Candidates((0, 1), (2,)) for seed in seeds}
