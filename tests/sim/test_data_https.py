# SPDX-License-Identifier: Apache-2.0
"""Downloads from a server on this machine, over HTTP and HTTPS."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fastagg_sim import cli
from fastagg_sim.data import DATASETS, CorruptDataError, DataNotFoundError, download, https
from fastagg_sim.data.cache import read_cache
from fastagg_sim.data.https import RemoteFile
from fastagg_sim.data.images import IMAGE_SETS, ImageSet
from tests.sim.made_data import Tiny

CONTENT = bytes(range(256)) * 300
FILE = RemoteFile("file", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers each path as a test says; 404 for all other paths."""

    def __init__(self, certificate: Path | None = None) -> None:
        answers: dict[str, Answer] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path in answers:
                    answers[self.path](self)
                else:
                    self.send_error(404)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                pass  # A client that refuses the certificate, or the rest of a file.

        self.answers = answers
        self.http = Quiet(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        scheme = "http" if certificate is None else "https"
        self.address = f"{scheme}://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def put(self, path: str, content: bytes, says: int | None = None) -> None:
        """Serve `content`, with the length that the header `says`."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content) if says is None else says))
            handler.end_headers()
            handler.wfile.write(content)

        self.answers[path] = answer

    def redirect(self, path: str, target: str) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", target)
            handler.end_headers()

        self.answers[path] = answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1, signed by itself, and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("making a certificate needs openssl")
    folder = tmp_path_factory.mktemp("certificate")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "certificate"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "key").read_bytes() + (folder / "certificate").read_bytes())
    return both


@pytest.fixture
def secure(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server(certificate)
    yield made
    made.stop()


def get(address: str, folder: Path, file: RemoteFile = FILE) -> None:
    https.download(f"{address}/{file.name}", file, folder / file.name)


class TestDownload:
    def test_a_file(self, server: Server, tmp_path: Path) -> None:
        server.put("/file", CONTENT)
        get(server.address, tmp_path)
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert os.listdir(tmp_path) == ["file"]

    def test_a_wrong_sum_names_both(self, server: Server, tmp_path: Path) -> None:
        wrong = CONTENT[:-1] + b"x"
        server.put("/file", wrong)
        with pytest.raises(CorruptDataError) as caught:
            get(server.address, tmp_path)
        message = str(caught.value)
        assert message.startswith(f"{server.address}/file: expected 76800 bytes with SHA-256 ")
        assert FILE.sha256 in message and hashlib.sha256(wrong).hexdigest() in message
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("says", [len(CONTENT), None])
    def test_half_a_file(self, server: Server, says: int | None, tmp_path: Path) -> None:
        server.put("/file", CONTENT[:1000], says)
        with pytest.raises(CorruptDataError, match=r"expected 76800 bytes .*, got 1000 bytes with"):
            get(server.address, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_an_endless_file_is_not_read_to_its_end(self, server: Server, tmp_path: Path) -> None:
        def endless(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while True:  # until the client hangs up
                handler.wfile.write(CONTENT)

        server.answers["/file"] = endless
        with pytest.raises(CorruptDataError, match="expected 76800 bytes, got more"):
            get(server.address, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_what_a_server_refuses(self, server: Server, tmp_path: Path) -> None:
        with pytest.raises(DataNotFoundError, match="/file: HTTP Error 404"):
            get(server.address, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_no_server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(DataNotFoundError, match=r"http://127\.0\.0\.1:1/file: .*refused"):
            get("http://127.0.0.1:1", tmp_path)

    def test_what_is_no_http(self, server: Server, tmp_path: Path) -> None:
        server.answers["/file"] = lambda handler: handler.wfile.write(b"hello\r\n")
        with pytest.raises(DataNotFoundError, match="/file: hello"):
            get(server.address, tmp_path)

    def test_silence(self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(https, "SILENCE", 0.2)
        ended = threading.Event()
        server.answers["/file"] = lambda handler: ended.wait(30.0)
        with pytest.raises(DataNotFoundError, match=r"/file: .*timed out"):
            get(server.address, tmp_path)
        ended.set()

    def test_drops(self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(https, "FILE_TIME", 0.2)

        def drops(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            for k in range(len(CONTENT)):
                handler.wfile.write(CONTENT[k : k + 1])
                time.sleep(0.02)

        server.answers["/file"] = drops
        with pytest.raises(DataNotFoundError, match="/file: took longer than"):
            get(server.address, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_redirects(self, server: Server, tmp_path: Path) -> None:
        server.put("/moved", CONTENT)
        server.redirect("/file", "/moved")
        get(server.address, tmp_path)
        assert (tmp_path / "file").read_bytes() == CONTENT
        server.redirect("/file", "ftp://127.0.0.1/file")
        with pytest.raises(DataNotFoundError, match="refused its redirect to ftp://"):
            get(server.address, tmp_path)

    def test_a_full_disk(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.put("/file", CONTENT)

        def full(self: Path, target: Path) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(DataNotFoundError, match="no space left"):
            get(server.address, tmp_path)
        assert os.listdir(tmp_path) == []


class TestHttps:
    def test_a_certificate_that_nobody_vouches_for(self, secure: Server, tmp_path: Path) -> None:
        secure.put("/file", CONTENT)
        with pytest.raises(DataNotFoundError, match=r"/file: .*CERTIFICATE_VERIFY_FAILED"):
            get(secure.address, tmp_path)
        assert os.listdir(tmp_path) == []

    def test_a_trusted_one(
        self, secure: Server, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        secure.put("/moved", CONTENT)
        secure.redirect("/file", "/moved")
        get(secure.address, tmp_path)
        assert (tmp_path / "file").read_bytes() == CONTENT

    def test_a_redirect_to_http_is_refused(
        self,
        secure: Server,
        server: Server,
        certificate: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        server.put("/file", CONTENT)
        secure.redirect("/file", f"{server.address}/file")
        with pytest.raises(DataNotFoundError, match="refused its redirect to http://"):
            get(secure.address, tmp_path)
        assert os.listdir(tmp_path) == []


def published(tiny: Tiny) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in tiny.files.items()}


def with_mirrors(tiny: Tiny, *mirrors: str) -> ImageSet:
    return replace(
        tiny.images,
        mirrors=mirrors,
        published=tuple(
            RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())
            for name, content in published(tiny).items()
        ),
    )


class TestMirrors:
    def test_the_next_one_is_tried(self, tiny: Tiny, server: Server) -> None:
        for name, content in published(tiny).items():
            server.put(f"/a/{name}", content if "train" in name else content[:-1] + b"\xff")
            server.put(f"/b/{name}", content)
        mirrors = [f"{server.address}/{folder}" for folder in ("none", "a", "b")]
        said: list[str] = []
        images = with_mirrors(tiny, *mirrors)
        path = download.fetch_images(images, root=tiny.root, progress=said.append)
        assert read_cache(images, tiny.root).sha256() == images.sha256
        assert said[1] == "mnist: failed: torchvision is not installed"
        assert said[2] == f"mnist: trying {mirrors[0]} (0 MB)"
        assert "HTTP Error 404" in said[3]
        assert f"{mirrors[1]}/t10k-images-idx3-ubyte.gz: expected" in said[5]
        assert said[-1] == f"mnist: from {mirrors[2]} (0 MB), checked; in the cache: {path}"

    def test_every_failure_is_named(self, tiny: Tiny, server: Server) -> None:
        mirrors = [f"{server.address}/{folder}" for folder in ("a", "b")]
        images = with_mirrors(tiny, *mirrors)
        with pytest.raises(DataNotFoundError) as caught:
            download.fetch_images(images, root=tiny.root, progress=lambda line: None)
        for mirror in mirrors:
            assert f"{mirror}/train-images-idx3-ubyte.gz: HTTP Error 404" in str(caught.value)
        assert not tiny.root.exists()

    def test_the_command_says_the_source(
        self,
        tiny: Tiny,
        server: Server,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for name, content in published(tiny).items():
            server.put(f"/{name}", content)
        images = with_mirrors(tiny, server.address)
        monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], images=images))
        monkeypatch.setenv("FASTAGG_DATA", str(tiny.root))
        assert cli.main(["data", "mnist"]) == 0
        out, err = capsys.readouterr()
        assert f"mnist: from {server.address} (0 MB), checked" in err
        assert out.strip() == str(tiny.root / "mnist.safetensors")

    @pytest.mark.parametrize("name", IMAGE_SETS)
    def test_what_is_published_is_readable(self, name: str) -> None:
        images = IMAGE_SETS[name]
        assert all(mirror.startswith("https://") for mirror in images.mirrors)
        assert all(len(bytes.fromhex(file.sha256)) == 32 for file in images.published)
        names = {file.name for file in images.published}
        archive = any(name.endswith(".tar.gz") for name in names)
        assert archive or any(each.choose(names) for each in images.formats)
