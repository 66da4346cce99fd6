# SPDX-License-Identifier: Apache-2.0
"""Server-side aggregation for federated learning with unreliable clients.

    agg = fastagg.make("fdms", num_clients=K, num_params=d)
    report = agg.step(params, updates, clients)  # params [d] changed in place

``fastagg.available()`` lists the rules, ``fastagg.plan`` estimates the memory and time of a rule,
``fastagg.ops`` holds the functional layer, and ``python -m fastagg`` describes and checks this
build.
"""

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastagg._extension import _C

if _isa := os.environ.get("FASTAGG_ISA"):
    try:
        _C.set_isa(_isa)
    except ValueError as error:
        _wrong = f"FASTAGG_ISA={_isa}: {error}"
        if sys.argv[:1] == ["-m"] and "fastagg" in sys.orig_argv:  # python -m fastagg
            print(f"error: {_wrong}", file=sys.stderr)
            raise SystemExit(2) from None
        raise ValueError(_wrong) from None

from fastagg import ops
from fastagg.aggregator import Aggregator
from fastagg.checkpoint import CheckpointError
from fastagg.clipping import AdaptiveClip
from fastagg.inbox import Inbox
from fastagg.loading import load
from fastagg.making import make
from fastagg.norm_bound import AdaptiveNorm
from fastagg.ops import bits, reference
from fastagg.planning.plan import RoundPlan, plan
from fastagg.registry import RuleName, available
from fastagg.report import StepReport
from fastagg.rules import (
    FDMS,
    MIFA,
    NNM,
    Amplified,
    Bucketing,
    Bulyan,
    CenteredClip,
    FDMSMeans,
    FDMSSoft,
    FedAU,
    FedAvg,
    FedAWEClient,
    FedBuff,
    FedStale,
    FedVARP,
    GeometricMedian,
    Krum,
    Meamed,
    Median,
    MIFAClient,
    MIFADifferences,
    MimiC,
    MimiCAged,
    MimiCClient,
    MultiKrum,
    ReleasedThreshold,
    Scaffold,
    Stale,
    StaleModels,
    Theorem2Threshold,
    TrimmedMean,
)
from fastagg.rules.enqueued_fdms import EnqueuedFDMS
from fastagg.server_optimizer import ServerOptimizer
from fastagg.staleness import Staleness
from fastagg.updates import columns, files, streams
from fastagg.updates.buffer import UpdateBuffer
from fastagg.updates.files import ClientFiles
from fastagg.updates.layout import FlatLayout
from fastagg.updates.streams import ColumnBlocks, TensorRows

__all__ = [
    "FDMS",
    "MIFA",
    "NNM",
    "AdaptiveClip",
    "AdaptiveNorm",
    "Aggregator",
    "Amplified",
    "Bucketing",
    "Bulyan",
    "CenteredClip",
    "CheckpointError",
    "ClientFiles",
    "ColumnBlocks",
    "EnqueuedFDMS",
    "FDMSMeans",
    "FDMSSoft",
    "FedAU",
    "FedAWEClient",
    "FedAvg",
    "FedBuff",
    "FedStale",
    "FedVARP",
    "FlatLayout",
    "GeometricMedian",
    "Inbox",
    "Krum",
    "MIFAClient",
    "MIFADifferences",
    "Meamed",
    "Median",
    "MimiC",
    "MimiCAged",
    "MimiCClient",
    "MultiKrum",
    "ReleasedThreshold",
    "RoundPlan",
    "RuleName",
    "Scaffold",
    "Server",
    "ServerOptimizer",
    "Stale",
    "StaleModels",
    "Staleness",
    "StepReport",
    "TensorRows",
    "Theorem2Threshold",
    "TrimmedMean",
    "UpdateBuffer",
    "available",
    "build_info",
    "load",
    "make",
    "ops",
    "plan",
]

# Public module paths that differ from where the modules are, such as
# `from fastagg.streaming import ColumnSource`. Type checkers read the stub of each, fastagg/*.pyi.
for _old, _module in {
    "bits": bits,
    "reference": reference,
    "robust_ops": ops,
    "columns": columns,
    "streaming": streams,
    "client_files": files,
}.items():
    sys.modules[f"{__name__}.{_old}"] = globals()[_old] = _module

try:
    __version__ = version("fastagg")
except PackageNotFoundError:  # built in place in a checkout, not installed
    __version__ = "0+unknown"


# Imported at first use: they take time or need packages that a server may lack.
_LAZY = frozenset({"distributed", "integrations", "privacy", "robust"})

if TYPE_CHECKING:  # which would take any name for an attribute if they saw __getattr__
    from fastagg import distributed as distributed
    from fastagg import integrations as integrations
    from fastagg import privacy as privacy
    from fastagg import robust as robust
    from fastagg.integrations.server import Server
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "Server":
            return importlib.import_module(f"{__name__}.integrations.server").Server
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, "__version__", "__doc__", "__file__", "__name__", "__path__"})


def build_info() -> dict[str, object]:
    """Return how the extension was built and which CPU instructions it uses.

    Returns:
        A dict with the keys ``compiler``, ``cxx`` (the C++ standard),
        ``torch`` (the version it was built against), ``cuda_archs`` (empty for a CPU-only build),
        ``isa_detected`` (the best instruction set of this processor) and ``isa`` (the one in use;
        the environment variable FASTAGG_ISA = portable, avx2 or avx512 can lower it; it is always
        neon on ARM64).
    """
    return {**_C.build_info(), "isa": _C.isa()}
