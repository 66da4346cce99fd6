# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: get a data set with torchvision, from its mirrors, into a folder.

    python -c "$(cat torchvision_reader.py)" CLASS FOLDER

A torchvision that does not match the installed torch fails in the middle of its import and would
leave a process in an unusable state. This file imports nothing of fastagg_sim.

torchvision decodes IDX files; the images and labels become FOLDER/decoded.safetensors. It would
read CIFAR-10 with `pickle.load`, so of CIFAR-10 it only downloads the archive into FOLDER.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def main(name: str, folder: Path) -> None:
    socket.setdefaulttimeout(30.0)
    try:
        from torchvision import datasets
        from torchvision.datasets.utils import download_url
    except Exception as error:  # of any type: for example, RuntimeError for a missing operator
        sys.exit(
            f"torchvision cannot be imported with this torch ({type(error).__name__}: {error}); "
            "install the build of torchvision that matches your torch"
        )
    dataset = getattr(datasets, name)
    if name == "CIFAR10":
        download_url(dataset.url, folder, dataset.filename, dataset.tgz_md5)
        return
    arrays = {}
    for part, train in (("train", True), ("test", False)):
        images = dataset(folder, train=train, download=True)
        arrays[f"{part}_x"] = np.ascontiguousarray(images.data.numpy()[:, None])
        arrays[f"{part}_y"] = images.targets.numpy().astype(np.uint8)
    save_file(arrays, folder / "decoded.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
