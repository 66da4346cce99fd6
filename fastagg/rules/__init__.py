# SPDX-License-Identifier: Apache-2.0
"""The aggregation rules, one file per rule.

Importing this package imports every module in it, which registers the rules. So adding a rule means
adding one file. The classes listed here are also exported by :mod:`fastagg`; the list is explicit
for type checkers.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg.rules.amplified import Amplified
from fastagg.rules.bucketing import Bucketing
from fastagg.rules.bulyan import Bulyan
from fastagg.rules.centered_clip import CenteredClip
from fastagg.rules.fdms import FDMS
from fastagg.rules.fdms_means import FDMSMeans
from fastagg.rules.fdms_soft import FDMSSoft
from fastagg.rules.fedau import FedAU
from fastagg.rules.fedavg import FedAvg
from fastagg.rules.fedawe_client import FedAWEClient
from fastagg.rules.fedbuff import FedBuff
from fastagg.rules.fedstale import FedStale
from fastagg.rules.fedvarp import FedVARP
from fastagg.rules.geometric_median import GeometricMedian
from fastagg.rules.krum import Krum
from fastagg.rules.meamed import Meamed
from fastagg.rules.median import Median
from fastagg.rules.mifa import MIFA
from fastagg.rules.mifa_client import MIFAClient, MIFADifferences
from fastagg.rules.mimic import MimiC
from fastagg.rules.mimic_aged import MimiCAged
from fastagg.rules.mimic_client import MimiCClient
from fastagg.rules.multi_krum import MultiKrum
from fastagg.rules.nnm import NNM
from fastagg.rules.scaffold import Scaffold
from fastagg.rules.stale import Stale
from fastagg.rules.stale_models import StaleModels
from fastagg.rules.thresholds import ReleasedThreshold, Theorem2Threshold
from fastagg.rules.trimmed_mean import TrimmedMean

__all__ = [
    "FDMS",
    "MIFA",
    "NNM",
    "Amplified",
    "Bucketing",
    "Bulyan",
    "CenteredClip",
    "FDMSMeans",
    "FDMSSoft",
    "FedAU",
    "FedAWEClient",
    "FedAvg",
    "FedBuff",
    "FedStale",
    "FedVARP",
    "GeometricMedian",
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
    "Scaffold",
    "Stale",
    "StaleModels",
    "Theorem2Threshold",
    "TrimmedMean",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
