"""TLS for real: a scheduler and workers as processes, certificates of make-certs, and strangers who are refused."""

from __future__ import annotations

import contextlib
import datetime
import importlib.machinery
import importlib.util
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import pytest

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.cluster.tasks import map_tasks
from och_dist.errors import ClusterError, OchError, UsageError
from tests.support import cluster_tasks as work
from tests.support.cluster_help import (
    CODE_CHUNK,
    LOOPBACK,
    ROWS,
    Processes,
    Reference,
    Separate,
    listening,
    tree,
    wait_until,
)

pytest.importorskip("cryptography")
MAKE_CERTS = Path(__file__).parents[2] / "cluster" / "tls" / "make-certs"
PATIENCE = 60.0


def make_certs(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, MAKE_CERTS, *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )


def load_maker() -> ModuleType:
    """The functions of make-certs."""
    loader = importlib.machinery.SourceFileLoader("make_certs", str(MAKE_CERTS))
    spec = importlib.util.spec_from_loader("make_certs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_maker()


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certs"
    made = make_certs(folder, "--hosts", "scheduler.example", "10.1.2.3")
    assert made.returncode == 0, made.stderr
    return folder


def options(folder: Path, role: str = "client") -> dict[str, str]:
    return {"tls_ca": f"{folder}/ca.pem", "tls_cert": f"{folder}/{role}.pem", "tls_key": f"{folder}/{role}.key"}


def words(folder: Path, role: str = "client") -> list[str]:
    return [word for name, path in options(folder, role).items() for word in (f"--{name.replace('_', '-')}", path)]


def start_secured(running: Processes, folder: Path, certs: Path, *, workers: int) -> Separate:
    file = folder / "scheduler.json"
    local = ("--dashboard-address", "127.0.0.1:0", "--scheduler-file", file)

    def tls(role: str) -> tuple[str, ...]:
        return ("--tls-ca-file", f"{certs}/ca.pem", "--tls-cert", f"{certs}/{role}.pem", "--tls-key",
                f"{certs}/{role}.key", "--host", "tls://127.0.0.1")  # fmt: skip

    scheduler = running.dask("scheduler", "--port", "0", *local, *tls("scheduler"))
    wait_until(lambda: file.exists() and file.read_text().endswith("}"))
    started = [
        running.dask("worker", "--nthreads", "1", "--no-nanny", "--local-directory", folder / str(number), *local,
                     *tls("worker"))
        for number in range(workers)
    ]  # fmt: skip
    return Separate(file, scheduler, started)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[Separate]:
    """A scheduler and two workers that speak TLS only."""
    folder = tmp_path_factory.mktemp("secured")
    running = Processes(folder)
    try:
        yield start_secured(running, folder, certs, workers=2)
    finally:
        running.stop()


# make-certs


def test_keys_are_private_and_nothing_is_overwritten(certs: Path) -> None:
    before = tree(certs)
    assert set(before) == {"ca.pem", "authority/ca.key", *(f"{role}.{end}" for role in ("scheduler", "worker", "client")
                                                           for end in ("pem", "key"))}  # fmt: skip
    for path in certs.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((certs / "authority").stat().st_mode) == 0o700
    assert len({content for name, content in before.items() if name.endswith(".key")}) == 4
    again = make_certs(certs)
    assert (again.returncode, again.stderr) == (0, "")
    assert "nothing to do" in again.stdout
    assert tree(certs) == before


def test_certificates_begin_an_hour_ago_and_name_their_hosts(certs: Path) -> None:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    for role in ("ca", "scheduler", "worker", "client"):
        found = x509.load_pem_x509_certificate((certs / f"{role}.pem").read_bytes())
        assert datetime.timedelta(minutes=59) < now - found.not_valid_before_utc < datetime.timedelta(minutes=70)
        assert datetime.timedelta(days=364) < found.not_valid_after_utc - now <= datetime.timedelta(days=365)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "scheduler.example"} <= set(names.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "10.1.2.3"} <= {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_make_certs_refuses(certs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    (tmp_path / "file").write_text("kept")
    before = tree(tmp_path)
    for words, message in (
        ([tmp_path], "is no complete set of certificates; give another folder"),
        ([tmp_path / "half"], "is no complete set of certificates"),
        ([tmp_path / "file"], "is no complete set of certificates"),
        ([tmp_path / "new", "--days", "0"], "use more than 0"),
        ([tmp_path / "new", "--days", "nan"], "use more than 0"),
        ([tmp_path / "file" / "below"], "cannot be made"),
    ):
        ended = make_certs(*words)
        assert ended.returncode in (1, 2)
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
    assert tree(tmp_path) == before


# Those who belong


def test_encode_over_tls(
    secured: Separate, certs: Path, processes: Processes, reference: Reference, tmp_path: Path
) -> None:
    assert secured.address.startswith("tls://127.0.0.1:")
    common = (reference.corpus, tmp_path / "index", "--model", reference.model, "--chunk-rows", CODE_CHUNK)
    report = processes.report("encode", *common, "--scheduler", secured.address, *words(certs))
    assert (report["new_rows"], report["version"]) == (ROWS, 1)
    assert tree(tmp_path / "index" / "segments") == tree(reference.index / "segments")


@pytest.mark.parametrize("source", ["och", "dask"])
def test_certificates_of_the_environment(
    secured: Separate, certs: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    with contextlib.ExitStack() as stack:
        if source == "och":
            for name, path in options(certs).items():
                monkeypatch.setenv(f"OCH_{name.upper()}", path)
        else:
            tls = {
                "ca-file": f"{certs}/ca.pem",
                "client.cert": f"{certs}/client.pem",
                "client.key": f"{certs}/client.key",
            }
            settings = {f"distributed.comm.tls.{name}": path for name, path in tls.items()}
            stack.enter_context(dask.config.set(settings))
        client = stack.enter_context(connect(ClusterOptions(scheduler=str(secured.file))))
        assert map_tasks(work.same, [1, 2], client=client, name="same") == [1, 2]


def test_a_local_cluster_speaks_tls_on_loopback(certs: Path) -> None:
    with connect(ClusterOptions(workers=1, dashboard=False, **options(certs))) as client:
        assert client is not None
        workers = client.scheduler_info(n_workers=-1)["workers"]
        assert [address.partition(":")[0] for address in (client.scheduler.address, *workers)] == ["tls", "tls"]
        assert {address for _, address in listening(os.getpid())} <= set(LOOPBACK)
        with (
            pytest.raises(ClusterError, match=r"speaks TLS only; write tls://"),
            connect(ClusterOptions(scheduler=client.scheduler.address.replace("tls://", "tcp://"))),
        ):
            pytest.fail("connected")


def test_every_socket_of_a_secured_cluster_is_on_loopback(secured: Separate) -> None:
    for process in (secured.scheduler, *secured.workers):
        found = {address for _, address in listening(process.pid)}
        assert found, "a process that listens nowhere: this test sees nothing"
        assert found <= set(LOOPBACK)


# Strangers


@pytest.fixture(scope="module")
def strangers(maker: ModuleType, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_strangers(maker, certs, tmp_path_factory.mktemp("strangers"))


def make_strangers(maker: ModuleType, certs: Path, folder: Path) -> Path:
    """Folders of files: 'own' has another authority; the others have a wrong certificate for the right one."""
    own = maker.make_authority(maker.period_of(1))
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    load = maker.serialization.load_pem_private_key
    ours = (
        maker.x509.load_pem_x509_certificate((certs / "ca.pem").read_bytes()),
        load((certs / "authority" / "ca.key").read_bytes(), None),
    )
    for name, authority, period in (
        ("own", own, maker.period_of(1)),
        ("wrong", own, maker.period_of(1)),
        ("expired", ours, (now - 2 * hour, now - hour)),
        ("early", ours, (now + hour, now + 2 * hour)),
    ):
        (folder / name).mkdir()
        certificate, key = maker.make_certificate("client", authority, period)
        maker.write_certificate(folder / name / "client.pem", certificate)
        maker.write_key(folder / name / "client.key", key)
        maker.write_certificate(folder / name / "ca.pem", own[0] if name == "own" else ours[0])
    return folder


def test_strangers_are_refused_and_nothing_runs(
    secured: Separate, strangers: Path, processes: Processes, reference: Reference, tmp_path: Path
) -> None:
    """All at once, each a process of its own."""
    plain = secured.address.replace("tls://", "tcp://")
    cases = {
        "no certificate": (secured.address, [], "wants certificates; give --tls-ca"),
        "plain tcp": (plain, [], "speaks TLS only; write tls:// and give --tls-ca"),
        "own authority": (secured.address, words(strangers / "own"), "shows a certificate not valid under"),
        "wrong certificate": (secured.address, words(strangers / "wrong"), "refuses the certificate .*unknown ca"),
        "expired": (secured.address, words(strangers / "expired"), "refuses the certificate .*expired"),
        "not yet valid": (secured.address, words(strangers / "early"), "refuses the certificate"),
    }
    started = time.monotonic()
    running = {}
    for number, (name, (address, certificates, _)) in enumerate(cases.items()):
        command = ("encode", reference.corpus, tmp_path / str(number), "--model", reference.model, "-q")
        running[name] = processes.och(*command, "--scheduler", address, *certificates)
    for name, process in running.items():
        processes.finish(process, code=7, seconds=PATIENCE)
        said = processes.log(process)
        assert said.count("\n") == 1, said
        assert said.startswith("och: the scheduler "), said
        assert re.search(cases[name][2], said), said
    assert time.monotonic() - started < PATIENCE
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_dask_itself_lets_no_stranger_run_code(secured: Separate, strangers: Path, tmp_path: Path) -> None:
    """Without our own checks before it: the protection is that of the cluster."""
    from distributed import Client, Security

    for name in ("own", "wrong", "expired"):
        files = options(strangers / name)
        security = Security(
            require_encryption=True,
            tls_ca_file=files["tls_ca"],
            tls_client_cert=files["tls_cert"],
            tls_client_key=files["tls_key"],
        )
        with pytest.raises((OSError, TimeoutError)):
            Client(secured.address, security=security, timeout=2, set_as_default=False).run_on_scheduler(os.getpid)


def test_a_worker_of_a_stranger_is_not_taken_in(
    secured: Separate, certs: Path, strangers: Path, processes: Processes, tmp_path: Path
) -> None:
    with connect(ClusterOptions(scheduler=secured.address, **options(certs))) as client:
        client.wait_for_workers(2, timeout=30)
        tls = ("--tls-ca-file", strangers / "wrong" / "ca.pem", "--tls-cert", strangers / "wrong" / "client.pem",
               "--tls-key", strangers / "wrong" / "client.key")  # fmt: skip
        other = processes.dask("worker", secured.address, "--no-nanny", "--nthreads", "1", "--host", "tls://127.0.0.1",
                               "--death-timeout", "3", "--dashboard-address", "127.0.0.1:0",
                               "--local-directory", tmp_path / "stranger", *tls)  # fmt: skip
        other.communicate(timeout=30)
        assert other.returncode != 0 or "Registered to" not in processes.log(other)
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2


def test_a_scheduler_that_does_not_speak_tls(separate: Separate, certs: Path) -> None:
    address = separate.address.replace("tcp://", "tls://")
    with (
        pytest.raises(ClusterError, match=r"does not speak TLS .*write tcp://"),
        connect(ClusterOptions(scheduler=address, **options(certs))),
    ):
        pytest.fail("connected")


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and says nothing, as a stopped scheduler does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[Any] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield int(server.getsockname()[1])
        for connection, _ in kept:
            connection.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_scheduler_that_says_nothing(silent: int, certs: Path, scheme: str) -> None:
    given = options(certs) if scheme == "tls" else {}
    started = time.monotonic()
    with (
        dask.config.set({"och.connect-timeout": "1s"}),
        pytest.raises(ClusterError, match=r"within 1 s \(it accepts the connection and says nothing\)"),
        connect(ClusterOptions(scheduler=f"{scheme}://127.0.0.1:{silent}", **given)),
    ):
        pytest.fail("connected")
    assert time.monotonic() - started < PATIENCE


# Files that cannot be used


def refused(sentence: str, **given: Any) -> None:
    with pytest.raises(UsageError, match=sentence) as caught, connect(ClusterOptions(**given)):
        pytest.fail("connected")
    assert isinstance(caught.value, OchError)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("where", [{"scheduler": "tls://127.0.0.1:1"}, {"workers": 1}])
def test_files_are_checked_first(
    certs: Path, maker: ModuleType, tmp_path: Path, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = options(certs)
    refused(r"without --tls-key; TLS needs all three", **where, **{**good, "tls_key": None})
    refused(r"without --tls-cert and --tls-key", **where, tls_ca=good["tls_ca"])
    refused(r"gone.pem cannot be read \(No such file", **where, **{**good, "tls_ca": f"{tmp_path}/gone.pem"})
    refused(r"cannot be read \(Is a directory", **where, **{**good, "tls_cert": str(tmp_path)})
    refused(r"do not belong together", **where, **{**good, "tls_key": f"{certs}/worker.key"})
    (tmp_path / "text.pem").write_text("no certificate")
    refused(r"text.pem is no certificate authority", **where, **{**good, "tls_ca": f"{tmp_path}/text.pem"})
    refused(r"text.pem and .* cannot be used", **where, **{**good, "tls_cert": f"{tmp_path}/text.pem"})
    open_key = tmp_path / "open.key"
    open_key.write_bytes((certs / "client.key").read_bytes())
    open_key.chmod(0o644)
    refused(r"everybody .* can read the private key .*chmod 600", **where, **{**good, "tls_key": str(open_key)})
    locked = tmp_path / "locked.key"
    key = maker.ec.generate_private_key(maker.ec.SECP256R1())
    coding = maker.serialization
    text = key.private_bytes(coding.Encoding.PEM, coding.PrivateFormat.PKCS8, coding.BestAvailableEncryption(b"secret"))
    maker.write(locked, text, 0o600)
    refused(r"the key has a passphrase", **where, **{**good, "tls_key": str(locked)})
    monkeypatch.setenv("OCH_TLS_CERT", good["tls_cert"])
    refused(r"--tls-cert .* without --tls-ca and --tls-key", **where)
