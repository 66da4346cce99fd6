# SPDX-License-Identifier: Apache-2.0
"""One aggregator on many machines: columns are spread over the ranks of ``torch.distributed``.

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    agg = ShardedAggregator("fdms", num_clients=K, num_params=d)
    params = agg.own(model)  # this rank's columns
    report = agg.step(params, updates, clients)  # updates: [S, agg.num_own]

docs/distributed.md describes what is sent, what it costs and what happens when a rank dies.
"""

from fastagg.distributed.aggregator import ShardedAggregator
from fastagg.distributed.ranks import RankError
from fastagg.distributed.shards import shard_bounds

__all__ = ["RankError", "ShardedAggregator", "shard_bounds"]
