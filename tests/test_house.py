"""The house is small and its imports point one way; every collective carries a tag."""

import ast
import graphlib
import io
import re
import tokenize

from ranks import ROOT

FOLDERS = ("", "relatives", "plumbing", "lab")
PRODUCT = []
for folder in FOLDERS:
    PRODUCT += sorted((ROOT / folder).glob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PRODUCT}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COLLECTIVE = re.compile(
    r"\b(mesh|dist)\."
    r"(all_\w+|reduce_scatter\w*|gather_\w+|send_receive|barrier|broadcast\w*|i?send|i?recv)\("
)
READING_PATH = "model mesh shard method minibatch diloco edit a_edit train".split()


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
    assert graph["train"] >= {"edit", "relatives", "plumbing.launch"}  # the graph is not empty
    assert graph["config"] == set()
    assert graph["method"] <= {"config"}

    methods = {"method", "minibatch", "diloco", "edit", "a_edit"}
    programs = {"train", "data", "sample", "export"}
    may_import_plumbing = {*programs, "plumbing", "lab"}
    for name, imported in graph.items():
        folder = name.split(".")[0]
        if folder != "lab":
            assert not from_folder(imported, "lab"), name
        if folder not in may_import_plumbing:
            assert not from_folder(imported, "plumbing"), name
        if folder == "plumbing":  # concepts, but no method and no program, except data
            assert not imported & methods, name
            assert not imported & (programs - {"data"}), name
        if folder == "plumbing" or name in methods:
            assert not from_folder(imported, "relatives"), name


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


# ---- sizes ----


def lines(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def docstrings(tree) -> set:
    """The lines of all docstrings."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            found |= set(range(first.lineno, first.end_lineno + 1))
    return found


def tokens(path) -> int:
    """Tokens of code: without comments, docstrings and layout."""
    left_out = docstrings(TREES[path])
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        count += token.type not in LAYOUT and token.start[0] not in left_out
    return count


def test_limits_of_size_are_kept():
    sizes = {path: tokens(path) for path in PRODUCT}

    def total(paths):
        return sum(sizes[path] for path in paths)

    def inside(folder):
        return [path for path in PRODUCT if path.parent == ROOT / folder]

    reading_path = [ROOT / f"{name}.py" for name in READING_PATH]
    plumbing = [*inside("plumbing"), ROOT / "config.py"]
    limits = {  # what: (size, limit)
        "the reading path": (total(reading_path), 10500),
        "plumbing": (total(plumbing), 12700),
        "lab": (total(inside("lab")), 10430),
        "product": (total(PRODUCT), 48030),
        "Python files in the root": (len(inside("")), 15),
    }
    for path in inside("relatives"):
        if path.name != "quantize.py":
            limits[f"lines of {path.name}"] = (lines([path]), 200)
    for path, tree in TREES.items():
        longest = max(len(line) for line in path.read_text().splitlines())
        limits[f"a line of {path.relative_to(ROOT)}"] = (longest, 100)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                limits[f"{path.name}:{node.lineno} {node.name}"] = (length, 50)

    over = []
    for what, (size, limit) in limits.items():
        if size > limit:
            over.append(f"{what}: {size}, at most {limit}")
    assert not over, "\n".join(over)


# ---- density ----


def is_statement(node) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not docstring


def is_pair(node) -> bool:
    """a, b = x, y: two assignments in one statement."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def is_comprehension(node) -> bool:
    return isinstance(node, COMPREHENSION)


def is_conditional(node) -> bool:
    return isinstance(node, ast.IfExp)


def is_conditional_loop(node) -> bool:
    """for x in y if c else z."""
    return isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp)


def test_code_is_not_squeezed():
    nodes = []
    for tree in TREES.values():
        nodes += ast.walk(tree)

    def count(matches):
        return sum(map(matches, nodes))

    statements = count(is_statement)
    most_per_thousand = {is_pair: 18, is_comprehension: 45, is_conditional: 32}
    for sign, most in most_per_thousand.items():
        found = count(sign)
        assert 1000 * found / statements <= most, (sign.__name__, found, statements)
    assert count(is_conditional_loop) == 0
    skips = sum(path.read_text().count("# fmt: " + "skip") for path in PRODUCT)
    assert skips <= 12


# ---- communication ----


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
