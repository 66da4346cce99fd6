# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules in the servers of other federated-learning frameworks.

``fastagg.integrations.flower`` and ``fastagg.integrations.pfl`` need the framework of that name.
The private modules need no framework, except for the ``_flower_*`` ones. ``import fastagg`` imports
none of them.
"""
