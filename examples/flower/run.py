# SPDX-License-Identifier: Apache-2.0
"""A whole federation on this machine: a Flower server and its clients in separate processes.

    python run.py --api message --faults "2.0=crash 3.1=late 3.2=error 4.3=nan"

starts Flower's SuperLink and one SuperNode per client, runs the app in this folder, and restarts
clients that have died. With ``--authenticate`` they use TLS, and a SuperNode proves by a key who it
is, so it is the same node after a restart. ``--api legacy`` does the same with gRPC streams between
``legacy_server.py`` and ``legacy_client.py``. ``--stop-after`` stops the server by a signal, upon
which it writes its only checkpoint, and starts another server that resumes from it. At the end
fastagg's own simulation computes the same rounds from the list of active clients alone; the models
have the same bits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path

import security
from fastagg_flower import faults, rounds, task

from fastagg import Server
from fastagg_sim.config import Dropout
from fastagg_sim.dropout.trace import write_trace
from fastagg_sim.simulation import Simulation

HERE = Path(__file__).resolve().parent


def free_ports(count: int) -> list[int]:
    """Return unused ports of the loopback interface."""
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def command(name: str) -> str:
    """Return the path of a command of Flower, next to this Python or on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not installed: pip install 'fastagg[flower,sim]'")
    return found


class Federation:
    """The processes, each in its own process group, with their logs in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self._running: dict[str, tuple[list[str], subprocess.Popen[bytes]]] = {}

    def start(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=HERE,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = (list(argv), process)
        return process

    def restart_clients(self) -> None:
        """Start clients that have died again."""
        for name, (argv, process) in list(self._running.items()):
            if process.poll() is not None and name.startswith("client"):
                self.start(name, *argv)

    def supervise(
        self,
        main: subprocess.Popen[bytes],
        deadline: float,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Restart clients until ``main`` has ended, or ``until()`` is true.

        Raises SystemExit if ``main`` fails, or at the ``deadline``.
        """
        while main.poll() is None:
            if until():
                return
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"--deadline: the run took too long; the logs are in {self.folder}"
                )
            self.restart_clients()
            time.sleep(0.2)
        if main.returncode != 0:
            raise SystemExit(
                f"the server ended with status {main.returncode}; the logs are in {self.folder}"
            )

    def stop(self) -> None:
        """Kill all process groups."""
        for _, process in self._running.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def run_legacy(federation: Federation, options: argparse.Namespace, out: Path) -> None:
    """Run server and clients of Flower's legacy API, over gRPC."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    shared = [f"--address={address}", f"--clients={options.clients}"]
    shared.append(f"--timeout={options.timeout}")
    serve = [sys.executable, "legacy_server.py", *shared, f"--rule={options.rule}"]
    serve += [f"--rounds={options.rounds}", f"--out={out}"]
    if options.stop_after:
        serve.append(f"--checkpoint={federation.folder / 'checkpoint'}")
        serve.append(f"--checkpoint-every={options.rounds + 1}")
    server = federation.start("server", *serve)
    for client in range(options.clients):
        federation.start(
            f"client{client}",
            sys.executable,
            "legacy_client.py",
            *shared,
            f"--partition={client}",
            f"--faults={options.faults}",
        )
    deadline = time.monotonic() + options.deadline
    for stop in stops(options):
        stop_server(federation, *stop, server, out, deadline)
        server = federation.start("server", *serve, "--resume")
    federation.supervise(server, deadline)


def stops(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return after which rounds, and by which signals, the server is stopped."""
    return list(zip(sorted(options.stop_after), cycle(options.stop_signal), strict=False))


def stop_server(
    federation: Federation,
    stop_after: int,
    stop_signal: str,
    main: subprocess.Popen[bytes],
    out: Path,
    deadline: float,
) -> None:
    """Send the signal once enough rounds are done, and wait until ``main`` has ended."""
    federation.supervise(main, deadline, lambda: lines_of(out) >= stop_after)
    os.kill(rounds.read(out)[-1]["pid"], signal.Signals[stop_signal])
    main.wait(60.0)
    print(f"the server was stopped by {stop_signal} after round {lines_of(out)}")


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def run_message(federation: Federation, options: argparse.Namespace, out: Path) -> None:
    """Run Flower's SuperLink, the SuperNodes and ``flwr run``."""
    port, *ports = free_ports(1 + options.clients)
    address = f"127.0.0.1:{port}"
    home = federation.folder / "flwr"
    home.mkdir()
    keys: list[security.Key] = []
    if options.authenticate:
        certificate, private = security.make_certificate(home)
        keys = [security.make_key(home, f"client{client}") for client in range(options.clients)]
        connection = f'root-certificates = "{certificate}"'
        node_security = [f"--root-certificates={certificate}"]
        link_security = [f"--ssl-certfile={certificate}", f"--ssl-keyfile={private}"]
        link_security += [f"--ssl-ca-certfile={certificate}", "--enable-supernode-auth"]
    else:
        connection = "insecure = true"
        link_security = node_security = ["--insecure"]
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "loopback"\n\n'
        f'[superlink.loopback]\naddress = "{address}"\n{connection}\n'
    )
    deadline = time.monotonic() + options.deadline
    superlink = federation.start(
        "superlink",
        command("flower-superlink"),
        *link_security,
        f"--port={port}",
        "--disable-runtime-dependency-installation",
    )
    wait_for_port(port, superlink, deadline)
    register = [command("flwr"), "supernode", "register"]
    registrations = [
        federation.start(f"register{client}", *register, str(key.public), "loopback")
        for client, key in enumerate(keys)
    ]
    for registration in registrations:  # the SuperLink knows the keys before the SuperNodes come
        federation.supervise(registration, deadline)
    for client, own in enumerate(ports):
        federation.start(
            f"client{client}",
            command("flower-supernode"),
            *node_security,
            *([f"--auth-supernode-private-key={keys[client].private}"] if keys else []),
            f"--superlink={address}",
            f"--port={own}",
            f"--node-config=partition-id={client}",
        )
    config = {
        "rule": f"'{options.rule}'",
        "rounds": options.rounds,
        "clients": options.clients,
        "timeout": options.timeout,
        "faults": f"'{options.faults}'",
        "out": f"'{out}'",
        "authenticated": str(options.authenticate).lower(),
    }
    if options.stop_after:
        config["checkpoint"] = f"'{federation.folder / 'checkpoint'}'"
        config["checkpoint-every"] = options.rounds + 1
    main = start_run(federation, config)
    for stop in stops(options):
        stop_server(federation, *stop, main, out, deadline)
        main = start_run(federation, config | {"resume": "true"})
    federation.supervise(main, deadline)


def start_run(federation: Federation, config: Mapping[str, str | float]) -> subprocess.Popen[bytes]:
    text = " ".join(f"{key}={value}" for key, value in config.items())
    return federation.start("run", command("flwr"), "run", ".", "--stream", "--run-config", text)


def wait_for_port(port: int, server: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until ``server`` listens on the port."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def compare(options: argparse.Namespace, folder: Path, out: Path) -> bool:
    """Repeat the rounds in fastagg's simulation; print them; return whether all models agree."""
    lines = rounds.read(out)
    if len(lines) != options.rounds:
        print(f"only {len(lines)} of {options.rounds} rounds were done; the logs are in {folder}")
        return False
    trace = folder / "active.csv"
    write_trace(trace, [line["active"] for line in lines])
    dropout = Dropout("trace", {"path": str(trace), "rounds": len(lines)})
    simulation = Simulation(task.job(options.rule, options.clients, options.rounds, dropout))
    agree = True
    for line in lines:
        simulation.run_round()
        same = rounds.digest(simulation.params) == line["params"]
        agree = agree and same
        absent = [str(s if k is None else k) for s, k in line["absent"].items()]
        stood_in = ", ".join(f"{i} for {k}" for k, i in line["friends"].items())
        print(
            f"round {line['round']}: active {line['active']}, absent [{', '.join(absent)}], "
            f"rejected {len(line['rejected'])}, stood in [{stood_in}], "
            f"accuracy {line['accuracy']:.3f}, "
            + ("the simulation's bits" if same else "NOT the simulation's bits")
        )
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--api", choices=("message", "legacy"), default="message")
    parser.add_argument(
        "--authenticate",
        action="store_true",
        help="TLS, and a key for each SuperNode (message API only)",
    )
    parser.add_argument("--rule", default="fdms")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="time limit of a round, in seconds"
    )
    parser.add_argument(
        "--faults", default="", help="faults of clients, ROUND.CLIENT=KIND ... (see faults.py)"
    )
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="time limit of the whole run, in seconds"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for logs and rounds; default: a new temporary folder"
    )
    parser.add_argument(
        "--stop-after",
        type=int,
        nargs="+",
        default=[],
        metavar="ROUND",
        help="stop the server after each of these rounds and start one that resumes the run",
    )
    parser.add_argument(
        "--stop-signal",
        nargs="+",
        choices=("SIGTERM", "SIGINT"),
        default=["SIGTERM"],
        help="the signals of --stop-after, in turn; default: SIGTERM",
    )
    options = parser.parse_args()
    try:  # before any process starts
        Simulation(task.job(options.rule, options.clients, options.rounds))
        Server(options.rule, task.model(), num_clients=options.clients)
        outside = [place for place in faults.parse(options.faults) if place[1] >= options.clients]
        if outside:
            raise ValueError(f"--faults: there are {options.clients} clients, got {outside}")
        if options.authenticate and options.api != "message":
            raise ValueError("--authenticate: expected --api message, got legacy")
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fastagg-flower-"))
    folder.mkdir(parents=True, exist_ok=True)
    out = (folder / "rounds.jsonl").resolve()
    federation = Federation(folder.resolve())
    try:
        (run_legacy if options.api == "legacy" else run_message)(federation, options, out)
    finally:
        federation.stop()
    return 0 if compare(options, folder, out) else 1


if __name__ == "__main__":
    sys.exit(main())
