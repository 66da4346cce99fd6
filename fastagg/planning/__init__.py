# SPDX-License-Identifier: Apache-2.0
"""Estimates of a rule's memory, memory traffic and time before a run: :func:`fastagg.plan`."""
