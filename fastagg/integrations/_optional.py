# SPDX-License-Identifier: Apache-2.0
"""Check for frameworks that are not dependencies of fastagg."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, extra: str, what: str) -> None:
    """Check that a package is installed.

    Args:
        package: name under which the package is imported.
        extra: the extra of fastagg that installs it.
        what: the module that needs it.

    Raises:
        ImportError: the package is missing; the message says how to install it.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install 'fastagg[{extra}]'",
            name=package,
        )
