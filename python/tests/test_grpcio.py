"""Clients that are not ours (grpcio): the example, and one over TLS with client certificates and tokens."""

import importlib
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import threading

import grpc
import grpc_tools
import numpy as np
import pytest
import trustme
from conftest import recorded
from grpc_tools import protoc

import expertd

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """The generated modules of the protocol: messages and stubs."""
    out = tmp_path_factory.mktemp("generated")
    files = sorted(str(path) for path in (PROTO / "expertd").rglob("*.proto"))
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTO}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}", *files]
    assert protoc.main(arguments) == 0
    # The generated package is called expertd.v1.
    expertd.__path__.append(str(out / "expertd"))
    yield importlib.import_module("expertd.v1.moe_pb2"), importlib.import_module("expertd.v1.moe_pb2_grpc")
    expertd.__path__.pop()


class Certificates:
    """Two authorities in a folder, and what they signed for this host and for a client."""

    def __init__(self, folder):
        self.folder = folder
        self.server_authority, self.client_authority = trustme.CA(), trustme.CA()
        self.server_authority.cert_pem.write_to_path(folder / "server-ca.pem")
        self.client_authority.cert_pem.write_to_path(folder / "client-ca.pem")
        client = self.client_authority.issue_cert("engine.example")
        client.private_key_pem.write_to_path(folder / "client.key")
        client.cert_chain_pems[0].write_to_path(folder / "client.pem")
        self.sign_server()

    def sign_server(self):
        """Replaces the server's certificate and its key."""
        server = self.server_authority.issue_cert("127.0.0.1", "localhost")
        server.private_key_pem.write_to_path(self.folder / "server.key")
        server.cert_chain_pems[0].write_to_path(self.folder / "server.pem")

    def read(self, name):
        return (self.folder / name).read_bytes()


@pytest.fixture
def certificates(tmp_path):
    (tmp_path / "tokens").write_text(f"engine {TOKEN}\n")
    return Certificates(tmp_path)


def serve(certificates, **settings):
    folder = certificates.folder
    return expertd.serve(
        recorded("mixtral"),
        ranks=1,
        listen="127.0.0.1:0",
        tls_cert=folder / "server.pem",
        tls_key=folder / "server.key",
        **settings,
    )


def call(moe, channel, metadata=()):
    """One row through the first MoE layer."""
    messages, stubs = moe
    stub = stubs.MoeStub(channel)
    model = stub.GetModel(messages.GetModelRequest(), timeout=60, metadata=metadata)
    layer = model.moe_layers[0].layer
    rows = np.ones((1, model.hidden), np.float32).tobytes()
    request = messages.ForwardRequest(layer=layer, tokens=1, dtype=messages.DTYPE_F32, inline=rows)
    answer = stub.Forward(request, timeout=60, metadata=metadata)
    assert len(answer.rows) == len(rows)


def test_a_client_certificate_or_a_token_is_needed(moe, certificates):
    settings = {"tls_client_ca": certificates.folder / "client-ca.pem", "token_file": certificates.folder / "tokens"}
    with serve(certificates, **settings) as service:
        address = service.address.removeprefix("https://")
        authority = certificates.read("server-ca.pem")
        anonymous = grpc.ssl_channel_credentials(authority)
        named = grpc.ssl_channel_credentials(
            authority, certificates.read("client.key"), certificates.read("client.pem")
        )
        with grpc.secure_channel(address, named) as channel:
            call(moe, channel)
        with grpc.secure_channel(address, anonymous) as channel:
            call(moe, channel, [("authorization", f"Bearer {TOKEN}")])
            for metadata in [(), [("authorization", "Bearer 00000000000000000000")]]:
                with pytest.raises(grpc.RpcError) as caught:
                    call(moe, channel, metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            call(moe, channel)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("listen", [{}, {"listen": "127.0.0.1:0"}])
def test_the_example_client_over_a_socket_and_over_tcp(tmp_path, listen):
    example = PROTO.parent / "examples" / "python" / "client.py"
    shutil.copy(example, tmp_path)
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"-I{PROTO}", f"-I{well_known}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main(["protoc", *arguments, str(PROTO / "expertd/v1/moe.proto")]) == 0
    # The installed package of the same name would hide the generated modules.
    (tmp_path / "expertd" / "__init__.py").touch()
    with expertd.serve(recorded("mixtral"), ranks=1, **listen) as service:
        address = service.address.removeprefix("http://")
        assert address.startswith("127." if listen else "unix:")
        command = [sys.executable, "client.py", "--address", address]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_example_waits_as_long_as_the_service_asks(moe, monkeypatch):
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2

    path = PROTO.parent / "examples" / "python" / "client.py"
    spec = importlib.util.spec_from_file_location("example_client", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Refusal(grpc.RpcError, grpc.Call):
        """What grpcio raises for a call that ended with this code, and with RetryInfo if `delay` is given."""

        def __init__(self, code, delay=None):
            self._code, self.delay = code, delay

        def code(self):
            return self._code

        def details(self):
            return "refused"

        def trailing_metadata(self):
            if self.delay is None:
                return ()
            info = error_details_pb2.RetryInfo()
            info.retry_delay.FromMilliseconds(self.delay)
            detail = any_pb2.Any()
            detail.Pack(info)
            status = status_pb2.Status(code=self._code.value[0], message="refused", details=[detail])
            return (("grpc-status-details-bin", status.SerializeToString()),)

        initial_metadata = is_active = time_remaining = cancel = add_callback = None

    class Stub:
        def __init__(self, *results):
            self.results = list(results)

        def Forward(self, request, timeout):
            assert timeout <= 30
            result = self.results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

    slept = []
    monkeypatch.setattr(example.time, "sleep", slept.append)
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, 200)
    gone = Refusal(grpc.StatusCode.UNAVAILABLE)
    assert example.forward(Stub(full, gone, "answer"), None) == "answer"
    assert 0.2 <= slept[0] <= 0.3 and 0.5 <= slept[1] <= 0.75
    for final in [Refusal(grpc.StatusCode.INTERNAL, 200), Refusal(grpc.StatusCode.UNAVAILABLE, 60_000)]:
        with pytest.raises(Refusal):
            example.forward(Stub(final), None)
    assert len(slept) == 2


def test_no_call_fails_while_certificates_are_replaced(moe, certificates):
    with serve(certificates) as service:
        address = service.address.removeprefix("https://")
        credentials = grpc.ssl_channel_credentials(certificates.read("server-ca.pem"))
        first = service_certificate(address)
        over, calls, failures = threading.Event(), [0], []

        def callers():
            with grpc.secure_channel(address, credentials) as kept:
                while not over.is_set():
                    try:
                        call(moe, kept)
                        with grpc.secure_channel(address, credentials) as fresh:
                            call(moe, fresh)
                        calls[0] += 2
                    except grpc.RpcError as error:
                        failures.append(error)

        threads = [threading.Thread(target=callers) for _ in range(4)]
        for thread in threads:
            thread.start()
        seen = {first}
        for _ in range(3):
            certificates.sign_server()
            # Files are looked at once a second.
            for _ in range(2000):
                now = service_certificate(address)
                if now not in seen:
                    break
                over.wait(0.05)
            seen.add(now)
        over.set()
        for thread in threads:
            thread.join()
        assert len(seen) == 4, "the service presents each new certificate"
        assert not failures and calls[0] > 0, failures[:1]


def service_certificate(address):
    """The certificate that the service presents now."""
    import ssl

    host, port = address.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)))
