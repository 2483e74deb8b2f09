"""Safe connections: certificates for TLS, plain connections on this machine only, and a probe of the scheduler.

Dask has no users and no rights: whoever can speak to a scheduler can run code on its workers. So a plain connection is
only made on this machine, and over a network both sides show a certificate of one private authority.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from och_dist.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from distributed import Security

    from och_dist.cluster.connection import ClusterOptions

PAUSE_SECONDS = 0.2
SILENCE_SECONDS = 2.0
FIELDS = ("ca", "cert", "key")
ROLES = ("client", "scheduler", "worker")
NOT_BEGUN = "nothing was begun: start it, or check the address, and run the command again"
REMEDY = "--tls-ca, --tls-cert and --tls-key (cluster/tls/make-certs makes the files)"


@dataclass(frozen=True)
class Certificates:
    """Files: the authority that signed everybody, our certificate, and its key (None: it is in ``cert``)."""

    ca: str
    cert: str
    key: str | None

    def context(self) -> ssl.SSLContext:
        """What one side of a connection uses to prove itself and to check the other, as Dask does."""
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.ca} is no certificate authority ({error}); give its PEM file") from None
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.cert} and {self.key or 'the key in it'} do not belong together or cannot be used ({error}); "
                "give the PEM files of a certificate and of its key, without a passphrase"
            ) from None
        context.check_hostname = False  # the authority is private to the cluster, and machines come and go
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def security(self) -> Security:
        """The same certificate for every role; this process plays the client, or all roles of a local cluster."""
        from distributed import Security

        roles = {f"tls_{role}_{part}": getattr(self, part) for role in ROLES for part in ("cert", "key")}
        return Security(require_encryption=True, tls_ca_file=self.ca, **roles)


def _no_password() -> str:
    """Without this, OpenSSL would ask on the terminal, and a job that nobody watches would wait for ever."""
    raise ValueError("the key has a passphrase")


def find_certificates(options: ClusterOptions) -> Certificates | None:
    """The files that options or OCH_TLS_CA, OCH_TLS_CERT, OCH_TLS_KEY name, checked; None without any."""
    given = {name: getattr(options, f"tls_{name}") or os.environ.get(f"OCH_TLS_{name.upper()}") for name in FIELDS}
    if not any(given.values()):
        return None
    if missing := [f"--tls-{name}" for name in FIELDS if not given[name]]:
        there = ", ".join(f"--tls-{name} {value}" for name, value in given.items() if value)
        raise UsageError(f"{there} without {' and '.join(missing)}; TLS needs all three, or OCH_TLS_CA, _CERT and _KEY")
    paths = {name: os.path.expanduser(str(value)) for name, value in given.items()}
    return _checked(Certificates(**paths))


def dask_certificates() -> Certificates | None:
    """The client's files in Dask's own configuration (``distributed.comm.tls``), checked; None without."""
    from distributed import Security

    ours = Security().get_tls_config_for_role("client")
    if not ours["ca_file"] or not ours["cert"]:
        return None
    return _checked(Certificates(ours["ca_file"], ours["cert"], ours["key"]))


def _checked(certificates: Certificates) -> Certificates:
    for path in filter(None, (certificates.ca, certificates.cert, certificates.key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}); TLS needs {REMEDY}") from None
    key = certificates.key or certificates.cert
    if os.name == "posix" and stat.S_IMODE(os.stat(key).st_mode) & (stat.S_IROTH | stat.S_IWOTH):
        raise UsageError(f"everybody on this machine can read the private key {key}; run: chmod 600 {key}")
    certificates.context()
    return certificates


def refuse_open_network(address: str, host: str) -> None:
    """A connection without TLS stays on this machine, unless somebody says --insecure."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise ClusterError(f"no scheduler answers at {address}: the name {host!r} is not known ({error})") from None
    if strangers := sorted(ip for ip in found if not _is_loopback(ip)):
        where = f" ({strangers[0]})" if strangers[0] != host else ""
        raise UsageError(
            f"{address}{where} is not on this machine, and without TLS anybody on the way can run code there and "
            f"here; use a tls:// scheduler with {REMEDY}, or say --insecure in a network that you trust"
        )


def _is_loopback(text: str) -> bool:
    ip = ipaddress.ip_address(text.partition("%")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def probe_scheduler(address: str, host: str, port: int, *, certificates: Certificates | None, seconds: float) -> None:
    """Return when a scheduler has sent its first byte; :class:`ClusterError` with the reason if it does not in time.

    Dask's own connection has no limit for the first message, and does not tell why a certificate was refused.
    """
    context = certificates.context() if certificates else None
    deadline = time.monotonic() + seconds
    reason = "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        patience = left if context or left < SILENCE_SECONDS else SILENCE_SECONDS
        try:
            with socket.create_connection((host, port), timeout=left) as plain:
                plain.settimeout(patience)
                if _first_byte(plain, context):
                    return
                reason = "it closes the connection"
        except ssl.SSLError as error:
            raise ClusterError(f"the scheduler at {address} {_why(error, certificates)}") from None
        except TimeoutError:
            reason = "it accepts the connection and says nothing"
            if context is None and _speaks_tls(host, port, max(0.1, deadline - time.monotonic())):
                raise ClusterError(
                    f"the scheduler at {address} speaks TLS only; write tls:// and give {REMEDY}"
                ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
    raise ClusterError(f"no scheduler answers at {address} within {seconds:g} s ({reason}); {NOT_BEGUN}")


def _first_byte(plain: socket.socket, context: ssl.SSLContext | None) -> bytes:
    """What a scheduler sends first. With TLS 1.3 a refusal of our certificate arrives instead, and raises here."""
    if context is None:
        return plain.recv(1)
    with context.wrap_socket(plain) as secured:
        return secured.recv(1)


def _why(error: ssl.SSLError, certificates: Certificates | None) -> str:
    """The rest of a sentence that begins with 'the scheduler at ...'."""
    text = str(getattr(error, "verify_message", "") or error.reason or error).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"shows a certificate not valid under {certificates and certificates.ca} ({text}); check --tls-ca"
    if "alert" in text:
        return f"refuses the certificate {certificates and certificates.cert} ({text}); use one of its own authority"
    return f"does not speak TLS ({text}); start it with TLS, or write tcp://"


def _speaks_tls(host: str, port: int, seconds: float) -> bool:
    """Whether a TLS handshake is answered by one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=seconds) as plain:
        try:
            with context.wrap_socket(plain):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
    return False
