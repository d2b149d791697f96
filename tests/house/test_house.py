"""How the code is built: imports point one way, every collective carries a tag, every method has a
plain version. CI runs tests/house; make test does not: a reader's change may break these rules."""

import ast
import graphlib
import re
import sys

import pytest

from methods import METHODS, PLAIN
from ranks import ROOT

FOLDERS = ("", "relatives", "plain", "plumbing", "lab")
PRODUCT = []
for folder in FOLDERS:
    PRODUCT += sorted((ROOT / folder).glob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PRODUCT}
COLLECTIVE = re.compile(
    r"\b(mesh|dist)\."
    r"(all_\w+|reduce_scatter\w*|gather_\w+|send_receive|barrier|broadcast\w*|i?send|i?recv)\("
)


# ---- imports ----


def module_name(path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imports() -> dict:
    """Each module of the project -> those that it imports, at its beginning or in a function."""
    modules = {module_name(path) for path in PRODUCT}
    graph = {}
    for path, tree in TREES.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules
                found |= submodules or {node.module}
        graph[module_name(path)] = found & modules
    return graph


def from_folder(imported, folder) -> set:
    return {name for name in imported if name.split(".")[0] == folder}


def test_imports_point_one_way():
    graph = imports()
    graphlib.TopologicalSorter(graph).prepare()  # raises an error if there is a circle
    assert graph["train"] >= {"methods", "shard", "plumbing.launch"}  # the graph is not empty
    assert graph["config"] == set()
    assert graph["method"] <= {"config"}

    methods = {"method", "minibatch", "diloco", "edit", "a_edit"}
    programs = {"train", "data", "sample"}
    may_import_plumbing = {*programs, "hf", "plumbing", "plain", "lab"}
    for name, imported in graph.items():
        folder = name.split(".")[0]
        if folder != "lab":
            assert not from_folder(imported, "lab"), name
        if folder not in ("plain", "lab"):
            assert not from_folder(imported, "plain"), name
        if folder not in may_import_plumbing:
            assert not from_folder(imported, "plumbing"), name
        if folder == "plumbing":  # concepts, but no method and no program
            assert not imported & methods, name
            assert not imported & programs, name
        if folder == "plumbing" or name in methods:
            assert not from_folder(imported, "relatives"), name


def test_edit_imports_only_what_all_methods_share():
    graph = imports()
    seen = set()
    todo = ["edit"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    assert seen == {"edit", "method", "config"}


# ---- plain versions ----


def test_every_method_has_a_plain_version():
    assert set(PLAIN) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_docstring_of_a_method_names_the_file_of_its_plain_version(name):
    last_line = sys.modules[METHODS[name].__module__].__doc__.splitlines()[-1]
    assert last_line.startswith(f"Plain version: {PLAIN.file(name)}.")


def test_plain_files_and_their_sharded_twins_name_each_other():
    for path in (ROOT / "plain").glob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        twins = re.findall(r"[\w/]+\.py", docstring[docstring.index("twin") :])
        for twin in twins:
            if twin == "relatives/NAME.py":
                continue
            theirs = ast.get_docstring(ast.parse((ROOT / twin).read_text()))
            assert re.search(r"Plain versions?: plain/\w+\.py", theirs), twin
        assert twins or path.name == "__init__.py", path


def test_plain_versions_share_only_network_data_and_errors_with_the_sharded_ones():
    for name, imported in imports().items():
        if from_folder({name}, "plain") and name != "plain.__main__":  # it reads the flags
            ours = imported - from_folder(imported, "plain")
            assert ours <= {"data", "model", "config", "methods"}, name


def test_plain_versions_have_no_collective():
    for path in (ROOT / "plain").glob("*.py"):
        assert "torch.distributed" not in path.read_text()


# ---- lines and communication ----


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_have_at_most_100_characters(path):
    assert max(len(line) for line in path.read_text().splitlines()) <= 100


def test_every_collective_of_training_carries_a_tag():
    """grep '# \\[s' lists all communication: one tag above each call, but in the files that carry
    it out or measure it."""
    calls = 0
    untagged = []
    for path in PRODUCT:
        if path.name in ("mesh.py", "shm.py", "bench.py"):
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if not COLLECTIVE.search(line):
                continue
            calls += 1
            above = lines[max(0, number - 3) : number]
            if not any("# [s" in comment for comment in above):
                untagged.append((path.name, line))
    assert calls >= 14
    assert untagged == []
