"""Strangers at the door, and strangers' files: nobody gets in, nothing of theirs runs, nothing outside is touched."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.archive import extract
from och_dist.store.manifest import seal, sha256, unseal
from och_dist.store.model import split_model_path
from tests.faults.ground import Ground, Place, compare
from tests.faults.processes import Scene, await_progress
from tests.faults.runner import Fault, NotDelivered, Skipped
from tests.support.cluster_help import LOOPBACK, listening, wait_until
from tests.support.command import refused, small_rows
from tests.test_illegal_input import BAD_INPUT, INTEGRITY, USAGE, adopted

CLUSTER = 7
SECONDS = 240.0


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class File:
    """A file that would run something, or reach outside, when it is read without care; ``use`` must refuse it."""

    def __init__(self, ground: Ground, use: Callable[[File], object]) -> None:
        self.ground, self.use = ground, use

    def deliver(self) -> None:
        self.folder = self.ground.fresh()
        self.mark, self.outside = self.folder / "ran", self.folder / "outside"
        self.outside.mkdir()
        (self.outside / "kept").write_text("kept")
        pickle.loads(self.pickled())
        if not self.mark.exists():
            raise NotDelivered("the payload does nothing")
        self.mark.unlink()

    def check(self) -> None:
        self.place = self.ground.copy(self.ground.encoded)
        self.use(self)
        if self.mark.exists():
            raise AssertionError("what was hidden in a file ran")
        if {path.name: path.read_text() for path in self.outside.iterdir()} != {"kept": "kept"}:
            raise AssertionError("something outside was touched")
        compare(self.place.index, self.ground.live(len(self.ground.codes[0][:140])))

    def pickled(self) -> bytes:
        return pickle.dumps(Payload(self.mark))

    def objects(self, *shape: int) -> np.ndarray:
        """An array of payloads."""
        found = np.empty(shape, object)
        found.fill(Payload(self.mark))
        return found

    def npy(self, *shape: int) -> bytes:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, self.objects(*shape), allow_pickle=True)
        return buffer.getvalue()

    def refuses(self, code: int, text: str, *words: object) -> None:
        refused(code, text, *words, keeps=[Path(self.place.corpus), Path(self.place.index)])


def _forged_model(one: File, change: Callable[[dict[str, Any]], object], **files: bytes) -> Path:
    """A model whose address and hashes are right, and which says what ``change`` makes of it."""
    source = Path(one.place.model())
    document = json.loads((source / "model.json").read_bytes())
    for name, data in files.items():
        document["arrays"][name]["sha256"] = sha256(data)
    change(document)
    text = json.dumps(document).encode()
    forged = one.folder / "forged" / sha256(text)  # apart, so that the place has one true model
    shutil.copytree(source, forged)
    for name, data in files.items():
        (forged / f"{name}.npy").write_bytes(data)
    (forged / "model.json").write_bytes(text)
    return forged


def _encode(one: File, model: Path, code: int = INTEGRITY, text: str = "och: ") -> None:
    one.refuses(code, text, "encode", one.place.corpus, one.folder / "new", "--model", model)
    if (one.folder / "new" / "versions").exists():
        raise AssertionError("something was published")


def pickle_as_model_array(one: File) -> None:
    data = one.npy(8)
    declared = lambda document: document["arrays"]["mean"].update(dtype="|O")  # noqa: E731
    _encode(one, _forged_model(one, declared, mean=data), text="is not described")
    (one.folder / "new").mkdir()
    plain = lambda document: document["arrays"]["mean"].update(shape=[8])  # noqa: E731
    _encode(one, _forged_model(one, plain, mean=data))


def pickle_as_model_document(one: File) -> None:
    text = one.pickled()
    forged = one.folder / "forged" / sha256(text)
    forged.mkdir(parents=True)
    (forged / "model.json").write_bytes(text)
    _encode(one, forged)


def pickle_as_zarr_filter(one: File) -> None:
    """Zarr format 2: an array of objects, decoded by the codec 'pickle' of numcodecs."""
    array = one.folder / "array"
    array.mkdir()
    pickled = {"id": "pickle", "protocol": 5}
    layout = {"shape": [4, 8], "chunks": [4, 8], "dtype": "|O", "fill_value": None, "order": "C", "zarr_format": 2}
    (array / ".zarray").write_text(json.dumps({**layout, "filters": [pickled], "compressor": None}))
    (array / "0.0").write_bytes(pickle.dumps(one.objects(4, 8)))
    one.refuses(BAD_INPUT, "och: ", "ingest", array, one.folder / "new")
    (array / ".zarray").write_text(json.dumps({**layout, "dtype": "<f4", "filters": [pickled], "compressor": None}))
    one.refuses(BAD_INPUT, "not an array that Zarr can open .*pickle", "ingest", array, one.folder / "new")


def pickle_as_zarr_codec(one: File) -> None:
    """Zarr format 3, adopted as a corpus as it is, and in the place of our own arrays."""
    codec = {"name": "numcodecs.pickle", "configuration": {"protocol": 5}}
    for array in (adopted(one.folder, small_rows(40)), *Path(one.place.corpus).glob("segments/*/vectors")):
        path = array / "zarr.json"
        text = path.read_text()
        path.write_text(json.dumps({**json.loads(text), "codecs": [codec]}))
        for chunk in array.rglob("c/*/0"):
            kept = chunk.read_bytes()
            chunk.write_bytes(one.pickled())
            corpus = array if array.parent.name != "segments" and array.name != "vectors" else one.place.corpus
            words = ("encode", corpus, one.folder / "new", "--model", one.place.model())
            for code in (BAD_INPUT, INTEGRITY):
                try:
                    one.refuses(code, "och: ", *words)
                    break
                except AssertionError:
                    if code == INTEGRITY:
                        raise
            chunk.write_bytes(kept)
            break
        path.write_text(text)


def pickle_in_npz(one: File) -> None:
    """As vectors, queries, ids and rows, under its own name and as an .npy."""
    np.savez(one.folder / "hidden.npz", rows=one.objects(4, 8))
    shutil.copy(one.folder / "hidden.npz", one.folder / "hidden.npy")
    sound = one.folder / "sound.npy"
    np.save(sound, small_rows(4))
    for name in ("hidden.npz", "hidden.npy"):
        one.refuses(BAD_INPUT, "och: ", "ingest", one.folder / name, one.folder / "new")
        one.refuses(BAD_INPUT, "och: ", "search", one.place.index, one.folder / name)
    one.refuses(BAD_INPUT, "och: ", "ingest", sound, one.folder / "new", "--ids", one.folder / "hidden.npy")
    one.refuses(USAGE, "ids are read from", "ingest", sound, one.folder / "new", "--ids", one.folder / "hidden.npz")
    one.refuses(BAD_INPUT, "och: ", "delete", one.place.index, "--rows", f"@{one.folder}/hidden.npy")
    one.refuses(BAD_INPUT, "och: ", "search", one.place.index, sound, "--only", f"@{one.folder}/hidden.npz")


def pickle_in_npy(one: File) -> None:
    sound = one.folder / "sound.npy"
    np.save(sound, small_rows(4))
    for name, data in (("objects.npy", one.npy(4, 8)), ("bare.npy", one.pickled()), ("ids.npy", one.npy(4))):
        (one.folder / name).write_bytes(data)
        one.refuses(BAD_INPUT, "och: ", "ingest", one.folder / name, one.folder / "new")
        one.refuses(BAD_INPUT, "och: ", "search", one.place.index, one.folder / name)
        one.refuses(BAD_INPUT, "och: ", "ingest", sound, one.folder / "new", "--ids", one.folder / name)
        one.refuses(BAD_INPUT, "och: ", "delete", one.place.index, "--rows", f"@{one.folder / name}")


def pickle_as_manifest_and_record(one: File) -> None:
    """In an index that is a copy, in each place where JSON is expected."""
    for pattern in ("versions/*.json", "segments/*/job.json", "models/*/provenance.json"):
        hostile = one.ground.copy(one.ground.encoded)
        for path in Path(hostile.index).glob(pattern):
            path.write_bytes(one.pickled())
        refused(INTEGRITY, "och: ", "verify", hostile.index)


def path_in_manifest(one: File) -> None:
    """A sealed manifest whose segments lie outside of the store: nothing there is read or removed."""
    secret = one.outside.parent / "copy"
    shutil.copytree(next(Path(one.place.corpus).glob("segments/*")), secret)
    for climb in ("../../copy", str(secret), "../" * 12 + str(secret).lstrip("/")):
        hostile = one.ground.copy(one.ground.encoded)
        (path,) = Path(hostile.corpus, "versions").iterdir()
        body = unseal(path.read_bytes(), "it")
        body["segments"][0]["id"] = climb
        path.write_bytes(seal(body))
        for command in ("verify", "inspect"):
            refused(INTEGRITY, "och: ", command, hostile.corpus)


def path_that_is_collected(one: File) -> None:
    """An old version of an index names segments outside of it, for 'och gc' to remove."""
    (one.folder / "victim.0").mkdir()
    (one.folder / "victim.0" / "kept").write_text("kept")
    for climb in (f"../../../{one.folder.name}/victim", str(one.folder / "victim"), "x/../../../victim"):
        hostile = one.ground.copy(one.ground.deleted)
        path = Path(hostile.index, "versions", "00000001.json")
        body = unseal(path.read_bytes(), "it")
        for entry in body["segments"]:
            entry["job"] = climb
        path.write_bytes(seal(body))
        refused(INTEGRITY, "och: ", "gc", hostile.index, "--keep", 1)
        if not (one.folder / "victim.0" / "kept").exists():
            raise AssertionError("a folder outside was removed")


def path_in_model(one: File) -> None:
    stolen = lambda document: document["arrays"].update({"../../outside/kept": document["arrays"]["mean"]})  # noqa: E731
    _encode(one, _forged_model(one, stolen), text="no short identifier")
    for climb in ("../../outside", "/etc/passwd", "..", "a\0b"):
        (path,) = Path(one.place.index, "versions").iterdir()
        kept = path.read_bytes()
        body = unseal(kept, "it")
        body["model"] = climb
        for segment in body["segments"]:
            segment["model"] = climb
        path.write_bytes(seal(body))
        one.refuses(INTEGRITY, "och: ", "search", one.place.index, one.ground.files[1])
        path.write_bytes(kept)


def path_in_archive(one: File) -> None:
    """Members that climb, that are absolute, that are links, or that are devices."""
    (one.folder / "data").write_text("vectors")
    for number, (name, kind) in enumerate(
        (("../outside/new", tarfile.REGTYPE), (f"{one.outside}/new", tarfile.REGTYPE), ("gist", tarfile.SYMTYPE),
         ("gist", tarfile.LNKTYPE), ("gist", tarfile.CHRTYPE))
    ):  # fmt: skip
        archive = one.folder / f"{number}.tar"
        with tarfile.open(archive, "w") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, str(one.outside / "kept"), 0
            tar.addfile(member)
        for wanted in {name, "new"}:
            try:
                extract(archive, [wanted], one.folder / f"into{number}")
            except (BadInputError, UsageError):
                continue
            raise AssertionError(f"{name} was unpacked as {wanted}")
        if list((one.folder / f"into{number}").glob("*")):
            raise AssertionError("something was left behind")


def unexpected_model(one: File) -> None:
    """An index that somebody replaced by one of another model, of the same shape."""
    expected = f"sha256:{split_model_path(one.place.model())[1]}"
    other = Place(one.place.folder)
    words = ("encode", other.corpus, one.folder / "other", "--model", one.place.model(1))
    one.refuses(INTEGRITY, "is expected; nothing was done", *words, "--expect-model", expected)
    queries = one.ground.files[1]
    from och_dist.encode.stage import encode

    encode(other.corpus, str(one.folder / "other"), model=one.place.model(1))
    for command in (("search", one.folder / "other", queries), ("inspect", one.folder / "other")):
        one.refuses(INTEGRITY, "is expected; nothing was done", *command, "--expect-model", expected)


def open_networks(one: File) -> None:
    """Schedulers elsewhere, by address, by name and by a scheduler file, without TLS."""
    file = one.folder / "scheduler.json"
    file.write_text(json.dumps({"address": "tcp://10.20.30.40:8786"}))
    addresses = ("tcp://10.20.30.40:8786", "10.20.30.40:8786", "tcp://0.0.0.0:8786", "tcp://[2001:db8::1]:8786",
                 "tcp://[::ffff:10.20.30.40]:8786", "ws://10.20.30.40:8786", file)  # fmt: skip
    for address in addresses:
        words = ("encode", one.place.corpus, one.folder / "new", "--model", one.place.model())
        text = "is not on this machine, and without TLS anybody"
        one.refuses(USAGE, text, *words, "--scheduler", address)


FILES: dict[str, Callable[[File], object]] = {
    "pickle as an array of a model": pickle_as_model_array,
    "pickle as a model": pickle_as_model_document,
    "pickle as a filter of Zarr 2": pickle_as_zarr_filter,
    "pickle as a codec of Zarr 3": pickle_as_zarr_codec,
    "pickle in an npz": pickle_in_npz,
    "pickle in an npy": pickle_in_npy,
    "pickle as a manifest": pickle_as_manifest_and_record,
    "a path in a manifest": path_in_manifest,
    "a path in a manifest, collected": path_that_is_collected,
    "a path in a model": path_in_model,
    "a path in an archive": path_in_archive,
    "another model than expected": unexpected_model,
    "plain schedulers elsewhere": open_networks,
}


class Certificates:
    """make-certs where everybody may read everything by default: keys stay private, dates allow for slow clocks."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def deliver(self) -> None:
        from tests.cluster.test_tls import MAKE_CERTS

        self.folder = self.ground.fresh() / "certs"
        made = subprocess.run([sys.executable, MAKE_CERTS, self.folder], umask=0, capture_output=True, timeout=60)
        if made.returncode:
            raise NotDelivered("make-certs failed")

    def check(self) -> None:
        import datetime

        from cryptography import x509

        keys = list(self.folder.rglob("*.key"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in keys}
        if len(keys) != 4 or set(modes.values()) != {0o600}:
            raise AssertionError(f"keys can be read: {modes}")
        hour = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=59)
        for path in self.folder.glob("*.pem"):
            if x509.load_pem_x509_certificate(path.read_bytes()).not_valid_before_utc > hour:
                raise AssertionError(f"{path.name} is not valid for a clock that is slow")
        key = self.folder / "client.key"
        key.chmod(0o644)
        from tests.cluster.test_tls import words

        words_of = ("encode", "corpus", "index", "--model", "model", "--workers", "1", *words(self.folder))
        refused(USAGE, "can read the private key .*chmod 600", *words_of)


class Strangers(Scene):
    """A TLS cluster, and commands of people without the right certificate: each is told why, and nothing runs."""

    def fail(self) -> int:
        from tests.cluster.test_tls import load_maker, make_certs, make_strangers, start_secured, words

        certs = self.folder / "certs"
        if make_certs(certs).returncode:
            raise NotDelivered("make-certs failed")
        others = self.others = make_strangers(load_maker(), certs, self.ground.fresh())
        self.cluster = start_secured(self.running, self.running.folder, certs, workers=1)
        address = self.cluster.address
        cases = {
            "plain tcp": (address.replace("tls://", "tcp://"), [], "speaks TLS only"),
            "wrong certificate": (address, words(others / "wrong"), "refuses the certificate .*unknown ca"),
            "no certificate": (address, [], "wants certificates; give --tls-ca"),
            "own authority": (address, words(others / "own"), "shows a certificate not valid under"),
            "expired": (address, words(others / "expired"), "refuses the certificate .*expired"),
            "not yet valid": (address, words(others / "early"), "refuses the certificate"),
        }
        if not self.ground.long:
            cases = dict(list(cases.items())[:2])
        self.tried = {}
        for name, (scheduler, certificates, text) in cases.items():
            run = self.running.och(*self.field.encode(self.folder / name), "--scheduler", scheduler, *certificates)
            self.tried[name] = run, text
        self.belongs = words(certs)
        return len(cases)

    def look(self) -> None:
        from tests.faults.processes import check_codes, ended

        for name, (run, text) in self.tried.items():
            said = ended(run, self.running, (CLUSTER,), 60)
            if not re.search(text, said):
                raise AssertionError(f"{name}: {said}")
            if (self.folder / name).exists():
                raise AssertionError(f"{name}: something was written")
        words = self.field.encode(self.index)
        ended(self.running.och(*words, "--scheduler", self.cluster.address, *self.belongs), self.running, (0,), 60)
        check_codes(self.index, self.field.first())


class StrangeDask(Strangers):
    """The same strangers with Dask's own client and worker, without our checks before it."""

    def fail(self) -> int:
        super().fail()
        from distributed import Client, Security

        from tests.cluster.test_tls import options

        self.ran = []
        tries = ("own", "wrong", "expired")
        for name in tries:
            files = options(self.others / name)
            roles = {"tls_client_cert": files["tls_cert"], "tls_client_key": files["tls_key"]}
            security = Security(require_encryption=True, tls_ca_file=files["tls_ca"], **roles)
            try:
                client = Client(self.cluster.address, security=security, timeout=3, set_as_default=False)
                self.ran.append((name, client.run_on_scheduler(os.getpid)))
            except (OSError, TimeoutError):
                continue
        other = self.others / "wrong"
        tls = ("--tls-ca-file", other / "ca.pem", "--tls-cert", other / "client.pem", "--tls-key", other / "client.key")
        local = ("--host", "tls://127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--death-timeout", "3")
        place = ("--local-directory", self.folder / "stranger")
        worker = self.running.dask("worker", self.cluster.address, "--no-nanny", *local, *place, *tls)
        worker.communicate(timeout=60)
        if "Registered to" in self.running.log(worker):
            self.ran.append(("worker", worker.pid))
        return len(tries) + 1

    def look(self) -> None:
        if self.ran:
            raise AssertionError(f"strangers got in: {self.ran}")


class Listeners(Scene):
    """Every socket that a command with a local cluster and a dashboard listens on, as the kernel lists them."""

    def fail(self) -> None:
        run = self.running.och(*self.field.encode(self.index), "--workers", 2, "--dashboard")
        await_progress(run, self.running, self.index, 12)
        os.killpg(run.pid, 19)  # SIGSTOP: what is open stays open while we look
        self.found = wait_until(lambda: listening(run.pid), 20)
        processes = {pid for pid, _ in self.found}
        if len(self.found) < 8 or len(processes) < 3:
            raise NotDelivered(f"scheduler, dashboards, nannies and workers must listen somewhere: {self.found}")

    def look(self) -> None:
        if strange := [entry for entry in self.found if entry[1] not in LOOPBACK]:
            raise AssertionError(f"these listen to everybody: {strange}")


def faults(ground: Ground) -> Iterator[Fault]:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise Skipped("the package cryptography is not installed: pip install 'och-dist[tls]'") from None
    for name, use in FILES.items():
        file = File(ground, use)
        yield Fault(name, file.deliver, file.check)
    certificates = Certificates(ground)
    yield Fault("make-certs with umask 0", certificates.deliver, certificates.check)
    strangers = Strangers(ground)
    yield Fault("strangers at a TLS cluster", strangers.deliver, strangers.check, SECONDS)
    if ground.long:
        dask = StrangeDask(ground)
        yield Fault("strangers with Dask's own client and worker", dask.deliver, dask.check, SECONDS)
    listeners = Listeners(ground)
    yield Fault("sockets of a local cluster", listeners.deliver, listeners.check, SECONDS)
