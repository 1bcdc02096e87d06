"""What a service's metrics listener said, second by second: recorded to a file, and served again from it.

A recording is a tar archive of folders 0000, 0001, … (seconds since its start), each with the documents of `DOCUMENTS`
as the listener sent them; `experts.json`, which is large, only in every fourth.
"""

import contextlib
import http.server
import io
import pathlib
import tarfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "server/grpc/src/metrics_port/page/status.html"
# The documents of a listener, with the seconds from one reading to the next.
DOCUMENTS = {"metrics": 1, "status.json": 1, "experts.json": 4}
TYPES = {"metrics": "text/plain; version=0.0.4", "status.json": "application/json", "experts.json": "application/json"}


class Recorder:
    """Reads the documents of the listener at `address` until it is saved."""

    def __init__(self, address: str) -> None:
        self.address, self.texts = address, {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        begun, second = time.monotonic(), 0
        while not self.ended.wait(max(0, begun + second - time.monotonic())):
            for name, every in DOCUMENTS.items():
                if second % every == 0:
                    # The recording has no document for a second in which the service does not answer.
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.address}/{name}", timeout=1) as answer:
                        self.texts[second, name] = answer.read()
            second += 1

    def save(self, file: pathlib.Path) -> int:
        """Writes the recording and returns how many scrapes it has."""
        self.ended.set()
        self.thread.join()
        with tarfile.open(file, "w:xz") as archive:
            for (second, name), text in self.texts.items():
                entry = tarfile.TarInfo(f"{second:04}/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
        return sum(name == "metrics" for _, name in self.texts)


class Recording:
    """A listener that says at `address` what was recorded, and serves the status page. Nothing answers before `play`; after
    the last second its answers stay the same."""

    def __init__(self, file: pathlib.Path, address: str) -> None:
        self.texts: dict[str, dict[int, bytes]] = {name: {} for name in DOCUMENTS}
        with tarfile.open(file) as archive:
            for entry in archive:
                second, name = entry.name.split("/")
                self.texts[name][int(second)] = archive.extractfile(entry).read()
        self.seconds = max(self.texts["metrics"])
        self.begun: float | None = None
        recording = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, text = recording.answer(self.path)
                self.send_response(200 if text else 503)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        host, port = address.split(":")
        self.server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def play(self) -> None:
        self.begun = time.monotonic()

    def answer(self, path: str) -> tuple[str, bytes]:
        if path == "/":
            return "text/html; charset=utf-8", PAGE.read_bytes()
        name = path.lstrip("/")
        if self.begun is None or name not in self.texts:
            return "text/plain", b""
        second = min(self.seconds, int(time.monotonic() - self.begun))
        last = max(at for at in self.texts[name] if at <= second)
        return TYPES[name], self.texts[name][last]
