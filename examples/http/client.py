# SPDX-License-Identifier: Apache-2.0
"""A client over HTTP: ``python client.py http://127.0.0.1:8000 --client 0``; without fastagg."""

from __future__ import annotations

import argparse
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

import safetensors.torch
import torch
import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--client", type=int, default=0)
    parser.add_argument("--absent", default="", help="rounds without an answer: 2,5")
    options = parser.parse_args()
    absent = {int(number) for number in options.absent.split(",") if number}
    torch.set_num_threads(1)
    print(f"client {options.client} asks {options.url}", flush=True)
    while True:
        try:
            with urlopen(f"{options.url}/{options.client}", timeout=10) as reply:
                key, model = reply.headers["Key"], reply.read()
            number = int(key.split("-")[0]) if key else 0
            if key and number not in absent:
                weights = training.train(safetensors.torch.load(model), options.client, number)
                data = safetensors.torch.save(weights)
                urlopen(f"{options.url}/{options.client}/{key}", data, timeout=60).close()
        except HTTPError as error:
            if error.code == 410:  # the run has ended
                return
            print(f"refused: {error.code} {error.read().decode()}", flush=True)
        except (OSError, HTTPException):
            pass  # the server does not run now, or ended while it sent: try again
        time.sleep(0.1)


if __name__ == "__main__":
    main()
