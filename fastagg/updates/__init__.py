# SPDX-License-Identifier: Apache-2.0
"""The input of a step: rows, in memory or read in pieces, and the clients they belong to."""
