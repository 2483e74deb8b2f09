"""Every failure a user can meet: one class per outcome, each with the exit code of the command line.

A message states the value, what was expected and the remedy. All classes carry plain arguments only, so
that an error raised on a worker arrives on the driver as it was.
"""

from __future__ import annotations

from typing import Any


class OchError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UsageError(OchError, ValueError):
    """The call cannot be understood: an unknown key, an impossible combination of options."""

    exit_code = 2


class BadInputError(OchError, ValueError):
    """The data cannot be used: truncated, foreign, of another dimension, empty, not finite."""

    exit_code = 3


LISTED_ROWS = 20


class NonFiniteError(BadInputError):
    """Rows with NaN or infinity; ``rows`` holds the first global row numbers, ``total`` how many there are."""

    @classmethod
    def of(cls, what: str, rows: Any, total: int, remedy: str) -> NonFiniteError:
        """``total`` of ``what`` are not finite, the first of them in ``rows`` (a list or an array of numbers)."""
        listed = tuple(int(row) for row in rows[:LISTED_ROWS])
        numbers = ", ".join(map(str, listed)) + (", ..." if total > len(listed) else "")
        return cls(f"{total} {what} hold NaN or infinity: {numbers}; {remedy}", listed, total)

    def __init__(self, message: str, rows: tuple[int, ...] = (), total: int = 0) -> None:
        super().__init__(message, rows, total)
        self.rows = rows
        self.total = total

    def __str__(self) -> str:
        return str(self.args[0])


class IntegrityError(OchError):
    """Stored bytes are missing, damaged or not what their record says."""

    exit_code = 4


class ConflictError(OchError):
    """Somebody else wrote something different at the same place, or two things that must agree do not."""

    exit_code = 4


class IncompleteError(OchError):
    """Part of the work is done and kept; running the same command again continues it."""

    exit_code = 5


class DriftError(OchError):
    """The quality gate: new rows differ too much from those that the model was trained on."""

    exit_code = 6


class ClusterError(OchError):
    """No scheduler, no workers, or they went away."""

    exit_code = 7
