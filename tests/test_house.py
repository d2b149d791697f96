"""The house is small and its imports point one way; every collective carries a tag."""

import ast
import graphlib
import re
from pathlib import Path

from ranks import ROOT

FOLDERS = ("", "relatives", "plumbing", "lab")
PRODUCT = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
TESTS = sorted(Path(__file__).parent.glob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PRODUCT}
READING_PATH = "model mesh shard method minibatch diloco edit a_edit train".split()


def imports() -> dict:
    """Each module of the project -> those that it imports, at its beginning or in a function."""
    name = lambda path: ".".join(path.relative_to(ROOT).with_suffix("").parts)
    graph = {name(path).removesuffix(".__init__"): set() for path in PRODUCT}
    for found, tree in zip(graph.values(), TREES.values()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= names & graph.keys() or {node.module}
    return {name: found & graph.keys() for name, found in graph.items()}


def test_imports_point_one_way():
    graph = imports()
    graphlib.TopologicalSorter(graph).prepare()  # raises an error if there is a circle
    assert graph["train"] >= {"edit", "relatives", "plumbing.launch"}  # the graph is not empty
    for name, imported in graph.items():
        package, folders = name.split(".")[0], {each.split(".")[0] for each in imported}
        assert package == "lab" or "lab" not in folders, name
        assert package != "plumbing" or not imported & {"train", "sample"}, name
        plumbing = {each for each in imported if each.startswith("plumbing.")}
        assert package in ("train", "plumbing", "lab") or plumbing <= {"plumbing.config"}, name


def count(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_limits_of_lines_are_kept():
    inside = lambda folder: [path for path in PRODUCT if path.parent == ROOT / folder]
    limits = {
        "the reading path": (count(ROOT / f"{name}.py" for name in READING_PATH), 1550),
        "train.py": (count([ROOT / "train.py"]), 200),
        "plumbing": (count(inside("plumbing")), 1690),
        "lab": (count(inside("lab")), 1705),
        "product": (count(PRODUCT), 7830),
        "tests": (count(TESTS), 6900),
        "README.md": (count([ROOT / "README.md"]), 165),
    }
    for path in inside("relatives"):
        limits[path.name] = count([path]), 150
    for path, tree in TREES.items():
        limits[f"a line of {path.name}"] = max(map(len, path.read_text().splitlines())), 100
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                limits[f"{path.name}:{node.name}"] = node.end_lineno - node.lineno + 1, 50
    over = [f"{name}: {lines}, at most {most}" for name, (lines, most) in limits.items()
            if lines > most]  # fmt: skip
    assert not over, "\n".join(over)


def test_every_collective_of_training_carries_a_tag():
    """grep '# \\[s' lists all communication: one tag above each call, but in the files that carry
    it out or measure it."""
    operation = r"all_\w+|reduce_scatter\w*|gather_\w+|send_receive|barrier|broadcast\w*|i?send|i?recv"
    tagged = []
    for path in PRODUCT:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            call = re.search(rf"\b(mesh|dist)\.({operation})\(", line)
            if call and path.name not in ("mesh.py", "shm.py", "bench.py"):
                above = any("# [s" in comment for comment in lines[max(0, number - 3) : number])
                tagged.append((above, path.name, line))
    assert len(tagged) >= 14 and [call for call in tagged if not call[0]] == []
