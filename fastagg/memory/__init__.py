# SPDX-License-Identifier: Apache-2.0
"""What rules remember of their clients: rows, and where these are stored."""
