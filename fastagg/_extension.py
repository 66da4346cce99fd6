# SPDX-License-Identifier: Apache-2.0
"""Load the extension fastagg._C, if it was built for the installed torch."""

import torch  # must come before _C, which links to torch's libraries

__all__ = ["_C", "check_torch"]


def check_torch(built_for: str, installed: str) -> None:
    """Raise ImportError unless both versions of torch have the same binary interface."""
    if built_for.split(".")[:2] == installed.split(".")[:2]:
        return
    minor = ".".join(built_for.split(".")[:2])
    raise ImportError(
        f"this fastagg was built for torch {built_for}, and torch {installed} is installed. "
        f"Install that torch with `pip install 'torch=={minor}.*'`, or build fastagg for the "
        "installed one with `pip install --no-build-isolation --no-deps --force-reinstall "
        "--no-binary fastagg fastagg` (in a checkout, with `.` in place of the last word)."
    )


try:
    from fastagg._built_for import TORCH

    check_torch(TORCH, torch.__version__)
    from fastagg import _C
except ImportError as error:
    if "this fastagg was built for" in str(error):
        raise
    raise ImportError(
        "fastagg's compiled extension (fastagg._C) is missing or was built for another Python or "
        f"torch: {error}. Build it in a checkout with `make build`, or with "
        "`pip install --no-build-isolation .` where torch is already installed."
    ) from error
