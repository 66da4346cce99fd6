# SPDX-License-Identifier: Apache-2.0
"""What a rule will need, before a run: :func:`fastagg.plan`."""
