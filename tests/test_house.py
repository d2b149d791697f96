"""The house is small and its imports point one way; every collective carries a tag."""

import ast
import graphlib
import io
import re
import tokenize
from pathlib import Path

from ranks import ROOT

FOLDERS = ("", "relatives", "plumbing", "lab")
PRODUCT = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
TESTS = sorted(Path(__file__).parent.glob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PRODUCT}
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip
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
    assert not graph["config"] and not graph["method"] - {"config"}
    methods = {"method", "minibatch", "diloco", "edit", "a_edit"}
    programs = {"train", "data", "sample", "export"}
    for name, imported in graph.items():
        folder = name.split(".")[0]
        assert folder == "lab" or not any(each.startswith("lab") for each in imported), name
        plumbing = {each for each in imported if each.startswith("plumbing")}
        assert folder in (*programs, "plumbing", "lab") or not plumbing, name
        if folder == "plumbing":  # concepts, but no method and no program
            below = methods | programs - {"data"}
            assert not imported & below and not any("relatives" in each for each in imported), name
        if name in methods:
            assert not any("relatives" in each for each in imported), name


def test_edit_and_all_that_it_imports_is_an_afternoons_reading():
    graph = imports()
    seen = set()
    todo = ["edit"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    assert seen == {"edit", "method", "config"}
    assert lines(ROOT / f"{name}.py" for name in seen) <= 900


def lines(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def docstrings(tree) -> set:
    """The lines of all docstrings."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def tokens(path) -> int:
    """Tokens of code: without comments, docstrings and layout."""
    left_out = docstrings(TREES[path])
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        count += token.type not in LAYOUT and token.start[0] not in left_out
    return count


def test_limits_of_size_are_kept():
    inside = lambda folder: [path for path in PRODUCT if path.parent == ROOT / folder]
    sizes = {path: tokens(path) for path in PRODUCT}
    total = lambda paths: sum(sizes[path] for path in paths)
    limits = {
        "the reading path": (total(ROOT / f"{name}.py" for name in READING_PATH), 10900),
        "plumbing": (total([*inside("plumbing"), ROOT / "config.py"]), 13850),
        "lab": (total(inside("lab")), 11000),
        "product": (total(PRODUCT), 50400),
        "Python files in the root": (len(inside("")), 15),
    }
    for path in inside("relatives"):
        if path.name != "quantize.py":
            limits[f"lines of {path.name}"] = lines([path]), 200
    for path, tree in TREES.items():
        limits[f"a line of {path.name}"] = max(map(len, path.read_text().splitlines())), 100
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                limits[f"{path.name}:{node.name}"] = node.end_lineno - node.lineno + 1, 50
    over = [f"{name}: {size}, at most {most}" for name, (size, most) in limits.items() if size > most]
    assert not over, "\n".join(over)


def is_statement(node) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not docstring


def is_pair(node) -> bool:
    """a, b = x, y: two assignments in one statement."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def test_code_is_not_squeezed():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    comprehension = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
    statements = sum(map(is_statement, nodes))
    per_thousand = {
        "pairs": (sum(map(is_pair, nodes)), 18),
        "comprehensions": (sum(isinstance(node, comprehension) for node in nodes), 45),
        "conditional expressions": (sum(isinstance(node, ast.IfExp) for node in nodes), 32),
    }
    for name, (count, most) in per_thousand.items():
        assert 1000 * count / statements <= most, f"{name}: {count} in {statements} statements"
    loops = [node for node in nodes if isinstance(node, ast.For)]
    assert sum(isinstance(loop.iter, ast.IfExp) for loop in loops) == 0
    assert sum(path.read_text().count("# fmt: " + "skip") for path in PRODUCT) <= 12


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
