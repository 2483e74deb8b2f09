"""What becomes of a task: its value, an error of ours, or an accident; how long to wait for it, and what it tells.

Errors of ours raised in a task arrive as they were. Accidents are tried again (``och.retries``) and then become
:class:`IncompleteError`. A cluster without workers or without a scheduler ends in :class:`ClusterError`.
Where somebody listens, tasks tell the scheduler when they begin and end, with what they worked through.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from och_dist import events, settings
from och_dist.errors import ClusterError, IncompleteError, OchError

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Mark = tuple[str, int]

POLL_SECONDS = 2.0
SEND_SECONDS = 0.1
"""In which the events of a worker are gathered before they are sent."""

ERROR_LENGTH = 300


def retries() -> int:
    """How often an accident is tried again."""
    return settings.whole("retries")


def answer_seconds() -> float:
    """How long the scheduler may take to answer a question."""
    return settings.seconds("answer-timeout")


def unique(name: str) -> str:
    """A key of its own for something that Dask's dashboard shows as ``name``."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


class Failure:
    """An :class:`OchError` travelling as a value, so that Dask retries accidents but not defined outcomes."""

    def __init__(self, error: OchError) -> None:
        self.error = error


def catch(function: Callable[..., T], *args: Any) -> T | Failure:
    """``function(*args)``, or the error of ours that it raised; a failure among the arguments is passed on."""
    for arg in args:
        if isinstance(arg, Failure):
            return arg
    try:
        return function(*args)
    except OchError as error:
        _forget_locals(error)
        return Failure(error)


def merged(merge: Callable[[Sequence[T]], T], parts: Sequence[T | Failure]) -> T | Failure:
    """``merge`` of some parts, or the first failure among them."""
    failure = next((part for part in parts if isinstance(part, Failure)), None)
    return catch(merge, parts) if failure is None else failure


def unwrap(value: Any) -> Any:
    """A value as it is; a failure is raised."""
    if isinstance(value, Failure):
        raise value.error
    return value


def _forget_locals(error: BaseException | None) -> None:
    """Free the blocks of data that the frames of a kept error would hold on to; where it happened stays known."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def retry(function: Callable[..., T], *args: Any) -> T | Failure:
    """:func:`catch` in this process, where accidents of storage are tried again as Dask would."""
    for _ in range(retries()):
        with contextlib.suppress(OSError):
            return catch(function, *args)
    try:
        return catch(function, *args)
    except OSError as error:
        _forget_locals(error)
        return Failure(_accident("a task", error))


def _accident(task: str, error: BaseException) -> IncompleteError:
    ours = IncompleteError(
        f"{task} failed {retries() + 1} times ({type(error).__name__}: {error}); what is done is kept: "
        "mend the cause and run the command again"
    )
    ours.__cause__ = error
    return ours


def begin(coroutine: Coroutine[Any, Any, Any], watch: Watch) -> Callable[[], Any]:
    """Run a coroutine of the client beside what this thread does; what is returned waits for its result."""
    running = asyncio.run_coroutine_threadsafe(coroutine, watch.client.loop.asyncio_loop)

    def finish() -> Any:
        try:
            while not concurrent.futures.wait([running], POLL_SECONDS).done:
                watch.check()
            return running.result()
        finally:
            running.cancel()

    return finish


def begin_fetch(future: Future | list[Future], watch: Watch) -> Callable[[], Any]:
    """Fetch the value of a future, or of a list of them, accidents turned into our errors; what is returned waits.

    A result whose worker died after finishing it is made again, so this may take as long as a task.
    """
    fetched = begin(watch.client.gather(future, asynchronous=True), watch)

    def finish() -> Any:
        try:
            return fetched()
        except ClusterError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            ours = error if isinstance(error, OchError) else _loss(error)
            return Failure(ours or _accident(f"task {getattr(future, 'key', 'of a search')}", error))

    return finish


def wait_for(future: Future | list[Future], watch: Watch) -> Any:
    return begin_fetch(future, watch)()


def _loss(error: BaseException) -> OchError | None:
    """Our error for one of Dask's own, None for any other."""
    kind, text = type(error).__name__, " ".join(str(error).split())  # Dask writes several lines
    if kind == "KilledWorker":
        return IncompleteError(
            f"every worker that task {error.args[0]} was given to died ({text}); what is done is kept: "
            "check the workers' memory (--memory-limit) and logs, then run the command again"
        )
    if "Cancelled" in kind:
        return ClusterError(f"the scheduler went away ({text}); what is done is kept: run the command again")
    if kind in ("NoWorkerError", "NoValidWorkerError"):
        return ClusterError(f"{text} What is done is kept: start workers, run the command again")
    return None


class Watch:
    """Raises :class:`ClusterError` when the scheduler is lost or no worker has worked for a while."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.alone_since: float | None = None
        self.require_connection()

    def require_connection(self) -> None:
        if self.client.status not in ("running", "newly-created"):
            raise ClusterError(
                f"the connection to the scheduler is {self.client.status}; what is done is kept: run the command again"
            )

    def check(self) -> None:
        self.require_connection()
        if any(map(_works, self._workers())):
            self.alone_since = None
            return
        now = time.monotonic()
        self.alone_since = self.alone_since or now
        if now - self.alone_since > (patience := settings.seconds("no-workers-timeout")):
            raise ClusterError(
                f"no worker, or only paused ones, for {patience:.0f} s; what is done is kept: "
                "start workers, or give them more memory, and run the command again"
            )

    def _workers(self) -> list[dict[str, Any]]:
        try:
            info = self.client.sync(self.client.scheduler.identity, n_workers=-1, callback_timeout=answer_seconds())
        except (OSError, TimeoutError) as error:
            raise ClusterError(
                f"the scheduler does not answer ({error!r}); what is done is kept: run the command again"
            ) from None
        return list(info["workers"].values())


def _works(worker: dict[str, Any]) -> bool:
    """Whether a worker takes tasks, or has one under way; one that is paused for its memory may do neither."""
    return worker["status"] == "running" or bool(worker["metrics"].get("task_counts", {}).get("executing"))


@contextlib.contextmanager
def watched(client: Client) -> Iterator[None]:
    """The limits of :class:`Watch`, and our errors, for Dask computations that would wait for ever."""
    watch, over = Watch(client), threading.Event()
    found: list[ClusterError] = []

    def keep_watch() -> None:
        from distributed import Future

        while not over.wait(POLL_SECONDS):
            try:
                watch.check()
            except ClusterError as error:
                found.append(error)
                with contextlib.suppress(Exception):
                    client.cancel([Future(key, client) for key in list(client.futures)], force=True)
                return

    thread = threading.Thread(target=keep_watch, name="och-watch", daemon=True)
    thread.start()
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        ours = found[0] if found else _loss(error)
        if ours is None:
            raise
        raise ours from error
    finally:
        over.set()


class Trace:
    """The tasks of one graph as an operator sees them: ``count`` tasks, in the places that ``inherited`` leaves free.

    Without a listener, or for a graph that shows no progress, marks are None and tasks tell nothing.
    """

    def __init__(self, name: str, count: int, *, shown: bool, inherited: Collection[int] = ()) -> None:
        self.token = unique(name)
        self.active = shown and events.heard()
        if self.active:
            events.say("tasks", token=self.token, name=name, count=count, inherited=_ranges(inherited))

    def mark(self, number: int) -> Mark | None:
        return (self.token, number) if self.active else None

    def end(self, *, done: bool) -> None:
        """All tasks are done, or no more will be."""
        if self.active:
            events.say("tasks_end", token=self.token, done=done)


def _ranges(numbers: Collection[int]) -> list[list[int]]:
    """[[first, last + 1], ...] of ascending runs."""
    ordered = np.sort(np.fromiter(numbers, np.int64, len(numbers)))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def traced(mark: Mark | None, function: Callable[..., T], *args: Any) -> T | Failure:
    """:func:`catch` on a worker, told to the scheduler."""
    if mark is None:
        return catch(function, *args)
    started = time.perf_counter()

    def end(state: str, facts: events.Facts) -> None:
        seconds = time.perf_counter() - started
        events.TOTALS.count(mark[0].rpartition("-")[0], state, seconds, facts)
        OUTBOX.put(["end", *mark, state, round(seconds, 4), facts])

    OUTBOX.put(["begin", *mark])
    with events.counting() as facts:
        try:
            value = catch(function, *args)
        except BaseException as error:
            end("retry", {"error": f"{type(error).__name__}: {error}"[:ERROR_LENGTH]})
            raise
    if isinstance(value, Failure):
        end("failed", {"error": str(value.error)[:ERROR_LENGTH]})
    else:
        end("done", facts)
    return value


class Outbox:
    """Events on their way from this worker to its scheduler, a few messages a second; never waits, never raises."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[list[Any]] = []

    def put(self, event: list[Any]) -> None:
        from distributed import get_worker

        with self.lock:
            self.waiting.append(event)
            first = len(self.waiting) == 1
        if first:
            with contextlib.suppress(Exception):
                worker = get_worker()
                worker.loop.add_callback(worker.loop.call_later, SEND_SECONDS, self.send, worker)

    def send(self, worker: Any) -> None:
        with self.lock:
            batch, self.waiting = self.waiting, []
        with contextlib.suppress(Exception):
            worker.log_event(events.TOPIC, {"events": batch})


OUTBOX = Outbox()
