"""Child processes with time limits: engines, a service, and a daemon of NVIDIA's MPS, which alone outlives a killed program."""

import contextlib
import ctypes
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import expertd

# What can happen to a service while an engine generates.
FAULTS = ("kill", "stop", "reload")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
# Variables that a service or an engine must not inherit: an engine with its own experts would get remote ones.
_OURS = ("EXPERTD_ADDRESS", "EXPERTD_SESSION", "EXPERTD_GATE")


def note(text):
    print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _end_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _begin(pid):
    """When a process began, in the kernel's ticks, so that another one with its number is not taken for it. None if there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def children_of(pid):
    """Process numbers of the direct children."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return sorted(found)


def tree(pid):
    """`{number: begin}` of a process and all its descendants."""
    found, todo = {}, [pid]
    while todo:
        one = todo.pop()
        begin = _begin(one)
        if begin is not None and one not in found:
            found[one] = begin
            todo += children_of(one)
    return found


class Child:
    """A process in a session and process group of its own, whose output goes to a file."""

    def __init__(self, name, command, log, environment):
        self.name, self.log = name, log
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.pid = self.process.pid

    def has_ended(self):
        """Leaves the process to be reaped by `end`, so that its number stays that of its group."""
        return self.status() is not None

    def status(self):
        """The exit status, or the negative number of the signal that ended it; None while it runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def text(self, most=3000):
        """The end of its output, at most `most` characters."""
        return self.log.read_text(errors="replace")[-most:]

    def wait(self, seconds):
        """Waits at most `seconds` until it has ended by itself."""
        until = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.05)

    def end(self, grace=0.0):
        """Asks it to end, waits `grace` seconds, and kills it and all its descendants."""
        if self.process.returncode is not None:
            return
        found = tree(self.pid)
        if grace and not self.has_ended():
            self.process.send_signal(signal.SIGTERM)
            self.wait(grace)
        found |= tree(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid, begin in found.items():
            if pid != self.pid and _begin(pid) == begin:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            # A driver can hold a killed process.
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            note(f"{self.name} (process {self.pid}) was killed and has not ended within 20 s")


class Children:
    """The processes of a run. Leaving the `with` block ends all of them, the last one first, whatever the reason."""

    def __init__(self, logs):
        self.logs = logs
        self.all = []

    def start(self, name, command, **variables):
        """Starts a process with some variables changed; its output goes to NAME.log. None as a value removes a variable."""
        environment = {key: value for key, value in os.environ.items() if key not in _OURS} | variables
        environment = {key: str(value) for key, value in environment.items() if value is not None}
        child = Child(name, command, self.logs / f"{name}.log", environment)
        self.all.append(child)
        return child

    def run(self, name, command, limit, **variables):
        """Runs a command to its end. SystemExit with the end of its output if it fails or takes longer than `limit` seconds."""
        child = self.start(name, command, **variables)
        child.wait(limit)
        late = not child.has_ended()
        self.end(child)
        if late or child.process.returncode:
            why = f"did not end within {limit:.0f} s" if late else f"failed with {child.process.returncode}"
            raise SystemExit(f"{shlex.join(map(str, command))} {why}:\n{child.text()}")
        return child.text()

    def end(self, child, grace=0.0):
        child.end(grace)
        if child in self.all:
            self.all.remove(child)

    def __enter__(self):
        def stop(number, _frame):
            raise SystemExit(128 + number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        return self

    def end_all(self):
        """Ends all of them, the last one first. From now on signals do not interrupt this program."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while self.all:
            self.all.pop().end()

    def __exit__(self, *_):
        self.end_all()


class Service:
    """A running `expertd serve`. `gpu` is the number of its GPU; None: CPU ranks."""

    def __init__(self, children, name, checkpoint, sockets, gpu, flags, limit):
        self.children, self.sockets = children, sockets
        self.session_address = f"unix:{sockets}/session.sock"
        self.admin_address = f"unix:{sockets}/admin.sock"
        device = ["--device", "cpu", "--ranks", 1] if gpu is None else ["--gpus", gpu]
        command = [expertd.command(), "serve", "--model", checkpoint, *device, "--session-listen", self.session_address]
        command += ["--listen", f"unix:{sockets}/api.sock", "--admin-listen", self.admin_address]
        self.child = children.start(name, [*command, "--metrics-listen", "127.0.0.1:0", *flags])
        until = time.monotonic() + limit
        while (ready := re.search(r"^ready: .*metrics on (http://[^\s,]+)", self.child.text(100_000), re.M)) is None:
            status = self.child.status()
            if status is not None or time.monotonic() > until:
                why = f"was not ready within {limit:.0f} s" if status is None else f"ended with status {status}"
                text = self.child.text().strip()
                children.end(self.child)
                raise RuntimeError(f"the service {why}: {text}")
            time.sleep(0.1)
        self.metrics_url = ready[1]

    @property
    def pid(self):
        return self.child.pid

    def end(self):
        self.children.end(self.child, grace=20.0)


def figures_of(metrics_url):
    """The rows that a service's steps have computed, the number of steps, and its generation."""
    names = {"rows": "expertd_step_tokens_sum", "steps": "expertd_steps_total", "generation": "expertd_generation"}
    with urllib.request.urlopen(metrics_url, timeout=10) as page:
        text = page.read().decode()
    found = {key: re.search(rf"^{name} (\S+)$", text, re.M) for key, name in names.items()}
    # A histogram is absent until its first value.
    return {key: int(float(match[1])) if match else 0 for key, match in found.items()}


def rank_of(service_pid, rank=0):
    """Process number of a service's rank, or None."""
    for pid in children_of(service_pid):
        try:
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:4] == [b"rank", b"--rank", str(rank).encode()]:
            return pid
    return None


@contextlib.contextmanager
def mps(folder):
    """A daemon of NVIDIA's MPS for all processes of the run; yields how there is one: `ours`, `found`, or None.

    One that runs already is used and left alone.
    """
    pipes = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    control = shutil.which("nvidia-cuda-mps-control")
    if (pipes / "control").exists():
        yield "found"
        return
    if control is None:
        note("there is no nvidia-cuda-mps-control: a service and an engine on one GPU take turns, and figures of mode shared say little")
        yield None
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for place in places.values():
        os.mkdir(place)
    # It has all GPUs, so that its clients' CUDA_VISIBLE_DEVICES means the same with and without it.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | places
    options = dict(env=environment, timeout=60, capture_output=True, text=True, check=True)
    daemon = None
    try:
        try:
            subprocess.run([control, "-d"], stdin=subprocess.DEVNULL, **options)
            os.environ.update(places)
            daemon = "ours"
        except (OSError, subprocess.SubprocessError) as error:
            note(f"there is no MPS daemon, and none can be started: {error}; {getattr(error, 'stderr', None) or ''}")
        yield daemon
    finally:
        try:
            subprocess.run([control], input="quit -t 5\n", **options)
        except (OSError, subprocess.SubprocessError):
            if daemon:
                note(f"the MPS daemon did not end: echo quit | CUDA_MPS_PIPE_DIRECTORY={folder / 'mps'} nvidia-cuda-mps-control")
