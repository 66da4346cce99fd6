# SPDX-License-Identifier: Apache-2.0
"""A Flower app whose server substitutes absent clients, and whose clients are often absent."""
