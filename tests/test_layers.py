"""The rule of the house: a room imports only from the rooms named here, through their doors, and heavy packages only
where they are allowed."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from och_dist.catalog import COMMANDS, STAGES

PACKAGE = Path(__file__).parent.parent / "och_dist"

# A room: a folder, or a module of the top level. Order is the order of imports; the outside packages it may use.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "stop": set(),
    "events": set(),
    "options": set(),
    "catalog": set(),
    "settings": {"dask", "distributed"},
    "kernels": {"numpy", "scipy", "numba", "llvmlite"},
    "methods": {"numpy", "scipy", "numba", "sklearn", "threadpoolctl"},
    "store": {"numpy", "scipy", "zarr", "obstore", "google_crc32c", "numcodecs", "pyarrow"},
    "sources": {"numpy", "scipy", "zarr", "h5py", "pyarrow"},
    "worker": {"distributed", "numpy", "threadpoolctl"},
    "cluster": {"dask", "distributed", "threadpoolctl", "llvmlite", "numpy"},
    "stage": set(),
    "report": {"numpy", "scipy", "bokeh", "jinja2"},
    "ingest": {"numpy"},
    "train": {"numpy", "dask", "dask_ml", "sklearn"},
    "estimators": {"numpy", "dask", "sklearn"},
    "encode": {"numpy"},
    "search": {"numpy", "dask", "distributed"},
    "evaluate": {"numpy"},
    "upkeep": {"numpy", "distributed"},
    "jobs": {"numpy"},
    "monitor": {"numpy", "distributed", "jinja2", "rich", "prometheus_client"},
    "cli": {"click", "distributed"},
}
ORDER = list(ROOMS)

# Rooms of things that users ask for do not know each other, but for these.
USES = ("ingest", "train", "encode", "search", "evaluate", "upkeep")
KNOWS = {"evaluate": {"train", "search"}, "upkeep": {"encode", "search"}}

# Stages that the catalogue names are used by the command line and by pipelines.
CATALOGUE = {tuple(stage.place.split(":")) for stage in [*STAGES.values(), *COMMANDS.values()]}

# Rooms without a door: each file stands alone and is imported by its name. One door would load them all.
OPEN = ("kernels", "methods")


def room_of(module: str) -> str:
    """Room of 'och_dist.<room>...'; '' for the package itself."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[tuple[str, bool]]:
    """(module, whether for type checking only) of every import in a file, also inside functions."""
    found: set[tuple[str, bool]] = set()

    def visit(node: ast.AST, typing_only: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update((alias.name, typing_only) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                if child.module == "och_dist":
                    found.update((f"och_dist.{alias.name}", typing_only) for alias in child.names)
                else:
                    found.add((str(child.module), typing_only))
            is_guard = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
            visit(child, typing_only or is_guard)

    visit(ast.parse(path.read_text()), False)
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_knows_only_the_rooms_before_it_and_comes_in_by_the_door(path: Path) -> None:
    module = ".".join(["och_dist", *path.relative_to(PACKAGE).with_suffix("").parts])
    room = room_of(module)
    assert room in ROOMS, f"{room} is no room; add it to the diagram in CONTRIBUTING.md and to this test"
    for imported, typing_only in imports(path):
        top, other = imported.split(".")[0], room_of(imported)
        if top == "och_dist" and other and other != room:
            assert ORDER.index(other) < ORDER.index(room), f"{module} imports {imported}, a room after its own"
            if room in USES and other in USES:
                assert other in KNOWS.get(room, ()), f"{module} imports {imported}: {room} does not know {other}"
            assert other in OPEN or imported.count(".") == 1, f"{module} imports {imported}: not by the door"
        elif top not in sys.stdlib_module_names and top != "och_dist" and not typing_only:
            assert top in ROOMS[room], f"{module} imports {top}, which {room} may not"


def names_taken(path: Path, folder: str) -> set[str]:
    """What a file uses of a room: by ``from och_dist.room import name``, or as ``room.name``."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {alias.name for node in imports if node.module == f"och_dist.{folder}" for alias in node.names}
    if folder in {alias.name for node in imports if node.module == "och_dist" for alias in node.names}:
        found |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == folder}
    return found


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in OPEN])
def test_a_door_says_what_others_may_use(folder: str) -> None:
    """Nothing else is used by others, and nothing is shadowed: a file has no name that the door gives to a thing."""
    door = import_module(f"och_dist.{folder}")
    named = [node for node in ast.parse(Path(str(door.__file__)).read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in named if node.module != "__future__" for alias in node.names}
    assert not names & {path.stem for path in (PACKAGE / folder).glob("*.py")}
    for name in names:
        assert not isinstance(getattr(door, name), ModuleType), name
    used = {name for path in FILES if path.parent.name != folder for name in names_taken(path, folder)}
    public = (
        {"open_index", "open_corpus"}
        if folder in ("search", "store")
        else {"cli", "main"}
        if folder == "cli"
        else set()
    )
    used |= {name for room, name in CATALOGUE if room == folder}
    assert used <= names <= used | public, f"missing: {used - names}; nobody uses: {names - used - public}"


def test_the_cluster_room_is_the_only_way_to_the_workers() -> None:
    """Others declare what is to be done; graphs and futures are made in one room."""
    functions = {"dask.delayed", "dask.compute", "dask.persist"}
    methods = {"submit", "map", "compute", "persist", "scatter", "gather"}
    found = []
    for path in FILES:
        if path.parent.name == "cluster":
            continue
        if ("dask.delayed", False) in imports(path):
            found.append(f"{path}: dask.delayed")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                on_client = owner.rpartition(".")[2] == "client" and node.attr in methods
                if on_client or f"{owner}.{node.attr}" in functions:
                    found.append(f"{path}:{node.lineno}: {owner}.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "dask":
                names = {f"dask.{alias.name}" for alias in node.names}
                found += [f"{path}:{node.lineno}: {name}" for name in names & functions]
    assert not found


def test_only_one_file_uses_dask_ml() -> None:
    assert len({path for path in FILES for module, _ in imports(path) if module.startswith("dask_ml")}) == 1


@pytest.mark.parametrize("code", ["import och_dist", "import och_dist.cli"])
def test_importing_is_light(code: str) -> None:
    """Start-up stays fast because nothing heavy is imported; measured by modules, not by a clock."""
    heavy = "{'dask', 'distributed', 'numba', 'bokeh', 'numpy', 'zarr', 'sklearn', 'scipy', 'rich', 'pandas'}"
    check = f"{code}, sys; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_workers_that_do_not_search_do_without_numba() -> None:
    """It takes 60 MB of each of them."""
    check = "import och_dist.encode, sys; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
