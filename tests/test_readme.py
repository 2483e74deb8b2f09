"""The README is true: its library example runs, its printed report has the lines that a run prints, its links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import och

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo at a small size: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("readme")
    settings = [f"dir={folder / 'demo-data'}", "rows=3000", "queries=20", "train.params={n_centres=20,max_iter=20}"]
    words = [word for setting in settings for word in ("--set", setting)]
    return folder, och("run", TOP / "pipelines" / "demo.toml", *words).stdout


def test_the_library_example_runs(demo: tuple[Path, str]) -> None:
    (code,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], cwd=demo[0], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("(5000, 8) [")


def test_the_printed_report_has_the_lines_of_a_run(demo: tuple[Path, str]) -> None:
    shown = next(block for block in blocks("") if block.startswith("demo: done"))

    def labels(text: str) -> list[str]:
        """First words of the lines; what depends on the size, the cluster or the PATH is left out."""
        words = [line.split()[0].rstrip(",") for line in text.splitlines() if line.strip()]
        numbers = re.compile(r"recall@|dashboard|[\d.]+|.*och$")
        return [word for word in words if not numbers.match(word)]

    assert labels(shown) == labels(demo[1])
    assert len(labels(shown)) > 15


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in TOP.glob("docs/*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (TOP / page).read_text()):
        assert "://" in target or (TOP / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^och ([a-z]+)", "\n".join(blocks("")), re.MULTILINE))))
def test_commands_exist(command: str) -> None:
    assert f" {command} [OPTIONS]" in och(command, "--help").stdout
