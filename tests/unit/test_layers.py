"""The import layers of ARCHITECTURE.md, read from the source: a module imports only from layers above its own."""

import ast
from pathlib import Path

import skerry

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "core", "host"),
    ("typedyaml", "config", "modelfile"),
    ("arena", "session", "runner", "sampler", "text"),
    ("decoder", "engine"),
    (),
    ("daemon", "terminal", "cli"),
)
# Within a layer: L0, L1 and L3 build on their own in the order given; L2 modules do not know each other.
ORDERED = {0, 1, 3, 5}
# The one place that may use each.
BORDERS = {
    "onnxruntime": {"session"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "yaml": {"typedyaml", "config", "modelfile"},
}
PACKAGE = Path(skerry.__file__).parent


def imports(module: str) -> set[str]:
    """Names of the modules that a module imports, wherever the statement stands; ours without `skerry.`."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            found.add(node.module or "")
    return found


def own(module: str) -> set[str]:
    return {name.removeprefix("skerry.") for name in imports(module) if name.startswith("skerry.")}


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == {module for layer in LAYERS for module in layer}


def test_modules_import_only_from_layers_above() -> None:
    for level, layer in enumerate(LAYERS):
        above = {module for other in LAYERS[:level] for module in other}
        for position, module in enumerate(layer):
            allowed = above | (set(layer[:position]) if level in ORDERED else set())
            assert own(module) <= allowed, f"{module} imports {sorted(own(module) - allowed)}"


def test_foreign_types_stop_at_their_module() -> None:
    for library, allowed in BORDERS.items():
        users = {
            module
            for layer in LAYERS
            for module in layer
            if any(name == library or name.startswith(f"{library}.") for name in imports(module))
        }
        assert users == allowed, library


def test_only_the_host_opens_kernel_files() -> None:
    for layer in LAYERS:
        for module in layer:
            source = (PACKAGE / f"{module}.py").read_text()
            strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
            paths = [s for s in strings if isinstance(s, str) and s.startswith(("/sys/", "/proc/", "/dev/"))]
            assert module == "host" or not paths, f"{module}: {paths}"
