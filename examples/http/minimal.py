# SPDX-License-Identifier: Apache-2.0
"""The shortest server: ``python minimal.py 8000`` and, in 4 other terminals, client.py."""

import argparse
import asyncio

import training
from aiohttp import web

import fastagg

server = fastagg.Server("fdms", training.model(), num_clients=4, round_seconds=30.0)


async def get(request: web.Request) -> web.Response:
    found = server.task(int(request.match_info["client"]))
    if found is None:  # nothing to do now, or the end
        return web.Response(status=410 if server.closed else 204)
    return web.Response(body=found.model, headers={"Key": found.key})


async def post(request: web.Request) -> web.Response:
    client, key = int(request.match_info["client"]), request.match_info["key"]
    data = await request.read()
    reason = await asyncio.to_thread(server.submit_bytes, client, data, key)
    return web.Response(status=200 if reason is None else 409, text=reason)


async def run(port: int) -> None:
    app = web.Application(client_max_size=server.answer_limit)
    app.add_routes(
        [web.get("/{client:[0-9]{1,9}}", get), web.post("/{client:[0-9]{1,9}}/{key}", post)]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    while server.rounds < 20:
        print("; ".join((await asyncio.to_thread(server.run_round)).lines()), flush=True)
    server.close()
    await asyncio.sleep(2.0)  # so that the clients learn that the run has ended
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    asyncio.run(run(options.port))


if __name__ == "__main__":
    main()
