# SPDX-License-Identifier: Apache-2.0
"""A Flower app whose server stands in for absent clients, and whose clients are often absent."""
