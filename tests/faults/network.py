"""A network that swallows everything for a while, without a word: namespaces with a router between them.

Driver and one worker are on one side, scheduler and another worker on the other. The router drops packets by routes
into nowhere, so that neither side hears of it. Needs root and 'ip' (Debian: apt-get install iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.ground import NOTHING, Ground, check_visible
from tests.faults.processes import Scene, await_progress, check_codes, ended
from tests.faults.runner import Fault, NotDelivered, Skipped
from tests.support.cluster_help import wait_until

SECONDS = 300.0
LONG_WAIT = 200.0
HEALED_AFTER = 12.0
INCOMPLETE, UNAVAILABLE = 5, 7
HERE, THERE = "10.77.1.2", "10.77.2.2"
PORT = 8786


class Network:
    """Two namespaces and a router between them, until :meth:`close`."""

    def __init__(self) -> None:
        unique = f"och{os.getpid() % 100_000}"
        self.here, self.router, self.there = (f"{unique}{side}" for side in "arb")
        try:
            for name in (self.here, self.router, self.there):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for side, name, address in ((1, self.here, HERE), (2, self.there, THERE)):
                inner, outer, gate = f"{name}0", f"{name}1", f"10.77.{side}.1"
                ip("link", "add", inner, "netns", name, "type", "veth", "peer", "name", outer, "netns", self.router)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", inner)
                ip("-n", self.router, "addr", "add", f"{gate}/24", "dev", outer)
                ip("-n", name, "link", "set", inner, "up")
                ip("-n", self.router, "link", "set", outer, "up")
                ip("-n", name, "route", "add", "default", "via", gate)
            ip("netns", "exec", self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        for address in (HERE, THERE):
            ip("-n", self.router, "route", "add", "blackhole", f"{address}/32")

    def heal(self) -> None:
        for address in (HERE, THERE):
            ip("-n", self.router, "route", "del", "blackhole", f"{address}/32")

    def close(self) -> None:
        for name in (self.here, self.router, self.there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, timeout=20)


class Cut(Scene):
    """The network fails in the middle of an encode, for so many seconds or until the command has ended."""

    def __init__(self, ground: Ground, seconds: float | None) -> None:
        super().__init__(ground)
        self.seconds = seconds

    def deliver(self) -> int | None:
        self.network = Network()
        try:
            return super().deliver()
        except BaseException:
            self.network.close()
            raise

    def check(self) -> None:
        try:
            super().check()
        finally:
            self.network.close()

    def inside(self, namespace: str, *command: object):  # type: ignore[no-untyped-def]
        return self.running.start("ip", "netns", "exec", namespace, *map(str, command))

    def encode(self):  # type: ignore[no-untyped-def]
        words = (*self.field.encode(self.index), "--scheduler", f"tcp://{THERE}:{PORT}", "--insecure")
        return self.inside(self.network.here, sys.executable, "-m", "och_dist.cli", *words)

    def start_cluster(self) -> None:
        dask, board = Path(sys.executable).with_name("dask"), ("--dashboard-address", "127.0.0.1:0")
        scheduler = self.inside(self.network.there, dask, "scheduler", "--host", THERE, "--port", PORT, *board)
        wait_until(lambda: "Scheduler at" in self.running.log(scheduler))
        for name, host in ((self.network.here, HERE), (self.network.there, THERE)):
            place = ("--local-directory", self.folder / name, "--death-timeout", 120)
            words = (f"tcp://{THERE}:{PORT}", "--host", host, "--nthreads", 1, "--no-nanny", *board, *place)
            worker = self.inside(name, dask, "worker", *words)
            wait_until(lambda worker=worker: "Registered to" in self.running.log(worker))

    def fail(self) -> None:
        self.start_cluster()
        self.run = self.encode()
        await_progress(self.run, self.running, self.index, 40)
        self.network.cut()
        if self.seconds is not None:
            time.sleep(self.seconds)
            if self.run.poll() is not None:
                raise NotDelivered(f"it ended within {self.seconds} s")
            self.network.heal()

    def look(self) -> None:
        said = ended(self.run, self.running, (0, INCOMPLETE, UNAVAILABLE), LONG_WAIT)
        if self.seconds is None:
            self.network.heal()
            if self.run.returncode == 0:
                raise NotDelivered("it was not cut off")
        if self.run.returncode:
            if "what is done is kept" not in said:
                raise AssertionError(said[-2500:])
            check_visible(str(self.index), NOTHING)
            ended(self.encode(), self.running, (0,), LONG_WAIT)
        check_codes(self.index, self.field.first())


def faults(ground: Ground) -> Iterator[Fault]:
    if os.geteuid():
        raise Skipped("network namespaces are made by root only")
    if shutil.which("ip") is None:
        raise Skipped("there is no command ip; install it (Debian: apt-get install iproute2)")
    try:
        Network().close()
    except (subprocess.SubprocessError, OSError) as error:
        raise Skipped(f"network namespaces cannot be made here ({error})") from None
    for name, seconds in (("silent cut, healed after a while", HEALED_AFTER), ("silent cut that stays", None)):
        cut = Cut(ground, seconds)
        yield Fault(name, cut.deliver, cut.check, SECONDS)
