"""The import layers of ARCHITECTURE.md, read from the source: a module imports only from layers above its own."""

import ast
from pathlib import Path

import skerry

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "core", "host"),
    ("typedyaml", "config", "modelfile", "protocol"),
    ("arena", "session", "runner", "sampler", "text"),
    ("decoder", "engine"),
    (
        "conversation",
        "service",
        *(f"transport.{name}" for name in ("lineedit", "words", "dialogue", "serial")),
        *(f"transport.{name}" for name in ("outbox", "door", "discovery", "broker", "mqtt")),
    ),
    ("systemd", "daemon", "terminal", "remote", "chat", "cli"),
)
# Within a layer, modules build on each other in the order given; those of L2 do not know each other.
ORDERED = {0, 1, 3, 4, 5}
# The one place that may use each.
BORDERS = {
    "onnxruntime": {"session"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "yaml": {"typedyaml", "config", "modelfile"},
    "pyudev": {"transport.serial"},
    "serial": {"transport.serial", "remote"},
}
PACKAGE = Path(skerry.__file__).parent


def _file(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def imports(module: str) -> set[str]:
    """Names of the modules that a module imports, wherever the statement stands; ours without `skerry.`."""
    found = set()
    for node in ast.walk(ast.parse(_file(module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            found.add(node.module or "")
    return found


def own(module: str) -> set[str]:
    return {name.removeprefix("skerry.") for name in imports(module) if name.startswith("skerry.")}


def test_every_module_has_a_layer() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths}
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
            source = _file(module).read_text()
            strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
            paths = [s for s in strings if isinstance(s, str) and s.startswith(("/sys/", "/proc/", "/dev/"))]
            assert module == "host" or not paths, f"{module}: {paths}"
