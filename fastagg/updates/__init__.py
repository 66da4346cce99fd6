# SPDX-License-Identifier: Apache-2.0
"""What a step is given: flat rows, in memory or read piece by piece, and whose they are."""
