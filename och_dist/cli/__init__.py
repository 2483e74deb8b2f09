"""The command line: parse, call one stage, print one report."""

from __future__ import annotations

from och_dist.cli.app import cli, main

__all__ = ["cli", "main"]
