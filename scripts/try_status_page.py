#!/usr/bin/env python3
"""Opens the status page of a service under load in headless Chromium and reads what it shows; then the page of a recorded
service on GPUs, of which it can take a picture.

Usage: scripts/try_status_page.py [BIN] [PICTURE]     BIN is a folder with expertd and expertd-loadtest (default
                                                      target/release); PICTURE is a PNG file to write

Fails if the page shows no numbers, runs or loads anything but its own, or reports an error.
"""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import addresses
import recorded_checkpoints
from recorded_service import Recording

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = recorded_checkpoints.folder("golden/qwen3_next")
# A name that would run a script if the page made markup of it.
NAME = "tiny <img src=x onerror=alert(1)>"
LISTEN, METRICS, RECORDED = addresses.free(3)
RECORDING = ROOT / "tests/fixtures/telemetry/two-gpus.tar.xz"
TOKEN = "engine-token-0123456789abcdef"


class Browser:
    """Chromium, spoken to through pipes in the protocol of its developer tools."""

    def __init__(self, folder: str) -> None:
        program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
        if not program:
            sys.exit("Chromium was not found (Debian: chromium)")
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()

        def pipes() -> None:
            # The protocol uses descriptors 3 and 4.
            read, write = os.dup(commands), os.dup(answers)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.buffer, self.number, self.session = b"", 0, None
        self.events: list[dict] = []
        end, page = time.monotonic() + 180, None
        # Chromium answers before it has opened its first page.
        while not page:
            if time.monotonic() > end:
                sys.exit("Chromium opened no page")
            pages = self.call("Target.getTargets")["targetInfos"]
            page = next((target["targetId"] for target in pages if target["type"] == "page"), None)
            time.sleep(0.05)
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def receive(self) -> dict:
        while b"\0" not in self.buffer:
            part = os.read(self.answers, 1 << 20)
            if not part:
                sys.exit("Chromium ended")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **parameters: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def value(self, expression: str) -> object:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            sys.exit(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str, what: str, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        # Elements are not there before the page has loaded.
        while not self.value(f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"):
            if time.monotonic() > end:
                sys.exit(f"the page never showed {what}; it shows: {self.value('document.body.innerText')}")
            time.sleep(0.3)

    def picture(self, file: pathlib.Path) -> None:
        height = self.value("document.body.getBoundingClientRect().bottom")
        clip = {"x": 0, "y": 0, "width": self.value("innerWidth"), "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))


def ready() -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://{METRICS}/readyz", timeout=2).status == 200
    return False


def check(browser: Browser, address: str = METRICS) -> None:
    """What must hold whatever the page of the listener at `address` shows."""
    for event in browser.events:
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = details["request"]["url"]
            if not url.startswith(f"http://{address}/"):
                sys.exit(f"the page asked for {url}")
        elif method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and details["entry"]["level"] == "error"
                                                     and "favicon" not in details["entry"].get("url", "")):
            sys.exit(f"the page reported {details}")
    if browser.value("document.images.length") != 0:
        sys.exit("a name became markup")
    wide = browser.value("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    if wide:
        sys.exit("the page is wider than its window")


def point_at_an_expert(browser: Browser) -> None:
    browser.until("!document.getElementById('experts').hidden && document.getElementById('heat').width > 1", "rows per expert")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved",
                 **browser.value("(b => ({x: b.x + b.width / 2, y: b.y + b.height / 2}))(document.getElementById('heat').getBoundingClientRect())"))
    browser.until("/layer \\d+, expert \\d+: \\d+ rows/.test(document.getElementById('cell').textContent)", "the rows of one expert")


def recorded(browser: Browser, picture: pathlib.Path | None) -> None:
    """The page of a service on two GPUs, as it was under load and after a fault."""
    recording = Recording(RECORDING, RECORDED)
    recording.play()
    # The page before asks no more once it is gone.
    browser.call("Page.navigate", url="about:blank")
    browser.until("location.href === 'about:blank'", "an empty page")
    browser.events.clear()
    browser.call("Page.navigate", url=f"http://{RECORDED}/")
    browser.until("document.getElementById('state').textContent === 'serving'", "that the recorded service serves")
    browser.until("[...document.querySelectorAll('#ranks tr')].slice(1).every(r => /GiB of \\d+/.test(r.cells[4].textContent) && /%/.test(r.cells[5].textContent))"
                  " && document.querySelectorAll('#ranks tr').length === 3", "memory and utilisation of two GPUs")
    if picture:
        time.sleep(recording.seconds)
    point_at_an_expert(browser)
    check(browser, RECORDED)
    if browser.value("(card => card.scrollWidth > card.clientWidth)(document.getElementById('ranks').parentElement)"):
        sys.exit("the table of ranks on GPUs is wider than its card")
    if picture:
        browser.value("document.getElementById('note').textContent = ''; true")
        browser.picture(picture)


def main() -> None:
    binaries = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release")
    picture = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tokens").write_text(f"engine {TOKEN}\n")
        (folder / "token").write_text(TOKEN + "\n")

        def start(*command: object) -> subprocess.Popen:
            process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
            stack.callback(lambda: (process.kill(), process.wait()))
            return process

        service = start(binaries / "expertd", "--log", "error", "serve", "--model", MODEL, "--model-name", NAME, "--device", "cpu",
                        "--ranks", "2", "--listen", LISTEN, "--metrics-listen", METRICS, "--token-file", folder / "tokens",
                        "--admin-listen", f"unix:{folder}/admin.sock")
        for _ in range(900):
            if ready():
                break
            time.sleep(0.2)
        else:
            sys.exit("the service was not ready within three minutes")
        start(binaries / "expertd-loadtest", "--address", LISTEN, "--token-file", folder / "token", "--quiet", "--no-echo",
              "--connections", "1", "--outstanding", "3", "--tokens", "uniform:1-48", "--duration", "3600")
        browser = Browser(str(folder / "browser"))
        stack.callback(lambda: (browser.process.kill(), browser.process.wait()))
        for domain in ("Page", "Network", "Log", "Runtime"):
            browser.call(f"{domain}.enable")
        window = {"width": 1180, "height": 1600, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **window)
        browser.call("Page.navigate", url=f"http://{METRICS}/")
        browser.until("document.getElementById('state').textContent === 'serving'", "that the service serves")
        browser.until("document.querySelectorAll('#tiles b').length && [...document.querySelectorAll('#tiles b')].every(b => !b.textContent.includes('–'))",
                      "a number in every tile")
        browser.until("document.querySelectorAll('#ranks tr').length === 3", "two ranks")
        browser.until("document.querySelector('#clients td')?.textContent === 'engine'", "the client's name")
        browser.until("document.querySelectorAll('polyline').length >= 6 && [...document.querySelectorAll('polyline')].some(l => l.getAttribute('points').split(' ').length > 12)", "lines")
        point_at_an_expert(browser)
        if browser.value("document.getElementById('model').textContent") != NAME:
            sys.exit("the page does not show the model's name as it is")
        check(browser)
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        color = "getComputedStyle(document.body).backgroundColor"
        if browser.value(color) != "rgb(17, 21, 26)":
            sys.exit(f"dark is {browser.value(color)}")
        browser.call("Emulation.setDeviceMetricsOverride", **{**window, "width": 400, "mobile": True})
        check(browser)
        service.kill()
        browser.until("document.getElementById('state').textContent === 'no answer'", "that the service is gone")
        browser.call("Emulation.setEmulatedMedia", features=[])
        browser.call("Emulation.setDeviceMetricsOverride", **window)
        recorded(browser, picture)
    print("the status page showed a service under load, in light and dark, wide and narrow, its end, and a recorded service on GPUs")


if __name__ == "__main__":
    main()
