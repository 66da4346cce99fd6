# SPDX-License-Identifier: Apache-2.0
"""Speed and accuracy of fastagg, compared with the alternatives that a user has.

    python -m benchmarks --help

docs/benchmarks.md explains how the measurements are made and what the columns mean.
"""
