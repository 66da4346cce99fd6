# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules in servers: one without a framework, and those of other frameworks.

``fastagg.integrations.server`` has :class:`fastagg.Server`.
``fastagg.integrations.flower``, ``.pfl`` and ``.nvflare`` need the framework of that name.
The private modules need no framework, except for the ``_flower_*`` ones. ``import fastagg`` imports
none of them.
"""
