#!/usr/bin/env python3
"""Restarts the processes of the `replicas` overlay one after the other under load, as Kubernetes does. No call may fail.

Usage: scripts/rolling_restart.py [--pods N] [--seconds N] [--upgrade FILE] [BIN]

BIN is a folder with expertd and expertd-loadtest (default target/release). With --upgrade, the first round of restarts replaces
expertd by FILE, an expertd of another version, the second one rolls back, and so on.

The processes have the arguments and the environment of the rendered overlay, TLS and tokens included; only folders and
addresses are those of this machine (127.0.0.2, 127.0.0.3, …). Each is ended by the overlay's preStop command and SIGTERM, within
its grace period, and the next one follows when its readiness probe succeeds. Needs kubectl, openssl and PyYAML.
"""

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import yaml

import recorded_checkpoints

ROOT = pathlib.Path(__file__).resolve().parent.parent
OVERLAY = ROOT / "deploy/kubernetes/overlays/replicas"
MODEL = recorded_checkpoints.folder("golden/qwen3_next")


def rendered() -> dict:
    """The pod of the overlay's StatefulSet."""
    text = subprocess.run(["kubectl", "kustomize", str(OVERLAY)], check=True, capture_output=True, text=True).stdout
    sets = [document for document in yaml.safe_load_all(text) if document["kind"] == "StatefulSet"]
    return sets[0]["spec"]["template"]["spec"]


class Pod:
    def __init__(self, number: int, spec: dict, folder: pathlib.Path, binary: pathlib.Path) -> None:
        self.address = f"127.0.0.{number + 2}"
        self.container, self.grace = spec["containers"][0], spec["terminationGracePeriodSeconds"]
        self.binary = binary
        run = folder / f"run-{number}"
        run.mkdir()
        places = {"/run/expertd": run, "/etc/expertd/tls": folder, "/etc/expertd/tokens": folder, "0.0.0.0": self.address}
        self.environment = {"PATH": os.environ["PATH"], "EXPERTD_LOG": "warn"}
        for variable in self.container["env"]:
            value = str(MODEL) if variable["value"] == "/model" else variable["value"]
            for inside, here in places.items():
                value = value.replace(inside, str(here))
            self.environment[variable["name"]] = value
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([self.binary, *self.container["args"]], env=self.environment, stdout=subprocess.DEVNULL)

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            sys.exit(f"the process at {self.address} ended with status {self.process.returncode}")
        probe = self.container["readinessProbe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://{self.address}:{ports[probe['port']]}{probe['path']}", timeout=10)
            return True
        return False

    def until_ready(self) -> None:
        end = time.monotonic() + 300
        while not self.is_ready():
            if time.monotonic() > end:
                sys.exit(f"the process at {self.address} is not ready after 300 s")
            time.sleep(self.container["readinessProbe"]["periodSeconds"] / 4)

    def stop(self) -> None:
        end = time.monotonic() + self.grace
        hook = self.container["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run([self.binary, *hook[1:]], env=self.environment, stdout=subprocess.DEVNULL, timeout=self.grace, check=True)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(max(0.1, end - time.monotonic()))
        if status:
            sys.exit(f"the process at {self.address} ended with status {status} instead of 0")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def secrets_in(folder: pathlib.Path, addresses: list[str]) -> None:
    """A certificate for the addresses, and a token."""
    names = ",".join(f"IP:{address}" for address in addresses)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
                    "-subj", "/CN=expertd", "-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE",
                    "-keyout", folder / "tls.key", "-out", folder / "tls.crt"], check=True, capture_output=True)
    token = secrets.token_hex(16)
    (folder / "tokens").write_text(f"engine {token}\n")
    (folder / "token").write_text(token + "\n")
    for name in ("tls.key", "tokens", "token"):
        (folder / name).chmod(0o600)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("binaries", nargs="?", type=pathlib.Path, default=ROOT / "target/release", metavar="BIN")
    options.add_argument("--pods", type=int, default=2)
    options.add_argument("--seconds", type=float, default=30, help="length of the load")
    options.add_argument("--upgrade", type=pathlib.Path, metavar="FILE", help="expertd of another version")
    given = options.parse_args()
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
    spec = rendered()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secrets_in(folder, [f"127.0.0.{number + 2}" for number in range(given.pods)])
        pods = []
        for number in range(given.pods):
            pods.append(Pod(number, spec, folder, given.binaries / "expertd"))
            stack.callback(pods[-1].kill)
        for pod in pods:
            pod.until_ready()
        addresses = ",".join(f"{pod.address}:50051" for pod in pods)
        # Calls may last longer than a busy machine pauses.
        command = [given.binaries / "expertd-loadtest", "--address", addresses, "--tls-ca", folder / "tls.crt", "--token-file", folder / "token",
                   "--quiet", "--no-echo", "--connections", "2", "--outstanding", "2", "--tokens", "uniform:1-64", "--deadline-ms", "60000",
                   "--check-golden", MODEL / "golden.safetensors", "--check", "0.1", "--duration", str(given.seconds), "--json", folder / "report.json"]
        restarts = failed = 0
        versions = [given.binaries / "expertd", given.upgrade or given.binaries / "expertd"]
        # On a busy machine each pod may be restarted in several loads only.
        while restarts < given.pods and not failed:
            before = restarts
            load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(lambda load=load: (load.kill(), load.wait()))
            time.sleep(2)
            while load.poll() is None:
                # As a StatefulSet does: from the last to the first.
                pod = pods[-1 - restarts % len(pods)]
                pod.stop()
                pod.binary = versions[(restarts // len(pods) + 1) % 2]
                pod.start()
                pod.until_ready()
                restarts += 1
            report = json.loads((folder / "report.json").read_text())
            (folder / "report.json").unlink()
            of_statuses = sum(status["count"] for status in report["statuses"].values())
            failed = of_statuses + report["lost"] + report["wrong"]
            print(f"{restarts - before} restarts of {given.pods} pods: {report['requests']} requests, {of_statuses} failed, {report['lost']} lost, "
                  f"{report['wrong']} wrong; p99 {report['latency']['p99_seconds'] * 1e3:.1f} ms, "
                  f"longest {report['latency']['max_seconds'] * 1e3:.0f} ms")
            if restarts == before:
                sys.exit("no pod was restarted while the load ran")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
