# SPDX-License-Identifier: Apache-2.0
"""The memory rows of rules, and where they are stored."""
