"""The layer rule: a module imports only from its own layer and those above, and heavy packages only where allowed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "och_dist"

# Each layer, from the top of the diagram down, with the outside packages it may use.
LAYERS: list[tuple[tuple[str, ...], set[str]]] = [
    (("errors", "stop", "events"), set()),
    (("kernels",), {"numpy", "scipy", "numba", "llvmlite"}),
    (("hashers", "metrics"), {"numpy", "scipy", "numba", "sklearn", "threadpoolctl"}),
    (("store",), {"numpy", "scipy", "zarr", "obstore", "h5py", "pyarrow", "google_crc32c", "numcodecs"}),
    (("settings",), {"dask", "distributed"}),
    (("graph", "outcome", "pinned", "tracing", "tree"), {"dask", "distributed"}),
    (("machine",), {"distributed", "threadpoolctl", "llvmlite"}),
    (("cluster", "tls", "worker"), {"dask", "distributed", "threadpoolctl", "numpy"}),
    (("stages",), {"numpy", "dask", "dask_ml", "sklearn", "google_crc32c", "distributed"}),
    (("estimators", "report"), {"numpy", "dask", "sklearn"}),
    (("pipeline", "plan", "recorded", "monitor"), {"numpy", "distributed", "jinja2", "rich", "prometheus_client"}),
    (("cli", "logs", "cli_options", "cli_run", "cli_search", "cli_settings", "cli_upkeep"), {"click", "distributed"}),
]


def layer_of(module: str) -> int:
    """Number of the layer of 'och_dist.<name>...'; the package itself is below all."""
    name = module.split(".")[1] if "." in module else ""
    return next((number for number, (names, _) in enumerate(LAYERS) if name in names), len(LAYERS))


def imports(path: Path) -> set[tuple[str, bool]]:
    """(module, whether for type checking only) of every import in a file, also inside functions."""
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, typing_only: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update((alias.name, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                found.add((str(child.module), typing_only))
                if str(child.module) in ("och_dist", "och_dist.store", "och_dist.stages", "och_dist.kernels"):
                    found.update((f"{child.module}.{alias.name}", typing_only) for alias in child.names)
            is_guard = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
            visit(child, typing_only or is_guard)

    visit(ast.parse(path.read_text()), False)
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    module = ".".join(["och_dist", *path.relative_to(PACKAGE).with_suffix("").parts])
    layer = layer_of(module)
    assert layer < len(LAYERS), f"{module} is in no layer; add it to the diagram in CONTRIBUTING.md and to this test"
    for imported, typing_only in imports(path):
        top = imported.split(".")[0]
        if top == "och_dist" and imported.count("."):
            assert layer_of(imported) <= layer, f"{module} imports {imported} from a layer below it"
        elif top not in sys.stdlib_module_names and top != "och_dist" and not typing_only:
            assert top in LAYERS[layer][1], f"{module} imports {top}, which its layer may not"


def test_only_the_centres_use_dask_ml() -> None:
    users = {path.stem for path in FILES for module, _ in imports(path) if module.startswith("dask_ml")}
    assert users == {"centres"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("code", ["import och_dist", "import och_dist.cli.app"])
def test_importing_is_light(code: str) -> None:
    """Start-up stays fast because nothing heavy is imported; measured by modules, not by a clock."""
    heavy = "{'dask', 'distributed', 'numba', 'bokeh', 'numpy', 'zarr', 'sklearn', 'scipy', 'rich', 'pandas'}"
    check = f"{code}, sys; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
