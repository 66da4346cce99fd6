# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules inside the servers that people already have.

``fastagg.integrations.flower`` and ``fastagg.integrations.pfl`` need those frameworks; what they
share does not, and none of it is imported by ``import fastagg``.
"""
