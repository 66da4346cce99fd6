# SPDX-License-Identifier: Apache-2.0
"""Frameworks that fastagg can work with but does not depend on."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, extra: str, what: str) -> None:
    """Say how to install a package if it is missing.

    Args:
        package: its name when imported.
        extra: the extra of fastagg that brings it.
        what: the module that needs it.

    Raises:
        ImportError: it is missing.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install 'fastagg[{extra}]'",
            name=package,
        )
