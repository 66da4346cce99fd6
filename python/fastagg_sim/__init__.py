# SPDX-License-Identifier: Apache-2.0
"""Simulation of federated learning under client dropout, built on `fastagg`.

Importing this package is cheap: heavy dependencies (torch, matplotlib, data sets) are imported by
the modules that use them.
"""
