# SPDX-License-Identifier: Apache-2.0
"""A server over HTTP: ``python server.py --rounds 20``. It continues a run that was stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import training
from aiohttp import web

import fastagg


def application(server: fastagg.Server) -> web.Application:
    async def get(request: web.Request) -> web.Response:
        """Return the model if the client is to train, 204 if not yet, 410 after the run."""
        found = server.task(int(request.match_info["client"]))
        if found is not None:
            return web.Response(body=found.model, headers={"Key": found.key})
        return web.Response(status=410 if server.closed else 204)

    async def post(request: web.Request) -> web.Response:
        client, key = int(request.match_info["client"]), request.match_info["key"]
        data = await request.read()  # aiohttp answers 413 if it is larger than client_max_size
        reason = await asyncio.to_thread(server.submit_bytes, client, data, key)
        return web.Response(status=200 if reason is None else 409, text=reason)

    app = web.Application(client_max_size=server.answer_limit)
    app.add_routes(
        [web.get("/{client:[0-9]{1,9}}", get), web.post("/{client:[0-9]{1,9}}/{key}", post)]
    )
    return app


async def run(server: fastagg.Server, port: int, rounds: int, folder: Path) -> None:
    log, model = folder / "rounds.jsonl", folder / "model.safetensors"
    runner = web.AppRunner(application(server))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    while server.rounds < rounds:
        report = await asyncio.to_thread(server.run_round)
        print("; ".join(report.lines()), flush=True)
        with log.open("a") as file:
            line = {"round": report.round, "active": report.active, "ignored": report.ignored}
            line["late"] = report.late
            file.write(json.dumps(line) + "\n")
    model.write_bytes(server.model_bytes())
    server.close()  # may raise OSError: there is no room for the last checkpoint, say
    await asyncio.sleep(2.0)  # so that the clients learn that the run has ended
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", default="fdms")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="a round lasts at most")
    parser.add_argument("--late", type=int, default=0, help="answers of at most this age count")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "run.safetensors"
    late = {"staleness": "constant", "max_staleness": options.late} if options.late else {}
    server = fastagg.Server(
        options.rule,
        training.model(),
        num_clients=options.clients,
        round_seconds=options.seconds,
        checkpoint_path=checkpoint,
        **late,
    )
    if checkpoint.exists():
        server.resume(checkpoint)
    asyncio.run(run(server, options.port, options.rounds, options.folder))


if __name__ == "__main__":
    main()
