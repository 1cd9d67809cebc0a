"""What holds the project together: names that must stay free, imports that must stay light, one version."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest

import agentkv

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "agentkv": ROOT / "agentkv",
    "agentkv_kernels": ROOT / "kernels" / "agentkv_kernels",
    "agentkv_radix": ROOT / "radix" / "agentkv_radix",
}
WITH_TORCH = {"__main__", "checking", "engine", "model_runner", "sampling"}
HEAVY = ("numpy", "torch", "transformers")
OF_USERS = ("adapters", "cuda", "openai", "server")
"""Extras whose libraries the package itself imports."""


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def fresh_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code as a user would who stands in the repository's root."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "radix"), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("folder", ["kernels", "radix"])
def test_no_folder_takes_the_import_name_of_another_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    assert list((ROOT / folder).glob("*.py")) == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_each_package_says_that_it_is_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").exists()


def torch_free_names() -> list[str]:
    children = [module.name for module in pkgutil.iter_modules([str(PACKAGES["agentkv"])])]
    return ["agentkv", "agentkv_radix", *(f"agentkv.{name}" for name in children if name not in WITH_TORCH)]


@pytest.mark.parametrize("name", torch_free_names())
def test_the_host_side_imports_neither_torch_nor_transformers_nor_numpy(name: str) -> None:
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
if {name!r} == "agentkv":
    package.Runtime  # With the first of its names all of them come.
else:  # Its own children are asked one by one.
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), {name!r} + "."):
        importlib.import_module(module.name)
print(*[heavy for heavy in {HEAVY!r} if heavy in sys.modules])
"""
    done = fresh_interpreter(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_transformers_imports_and_builds_a_model_from_the_root_of_the_repository() -> None:
    code = """
from transformers import AutoModel, LlamaConfig
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
print(type(AutoModel.from_config(LlamaConfig(**sizes))).__name__)
"""
    done = fresh_interpreter(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["LlamaModel"]


def importable_modules() -> list[str]:
    names = list(PACKAGES)
    for package, folder in PACKAGES.items():
        names += [module.name for module in pkgutil.walk_packages([str(folder)], f"{package}.")]
    if importlib.util.find_spec("triton") is None:
        needing = ("agentkv_kernels.triton.backend", "agentkv_kernels.triton.device")
        names = [name for name in names if not name.startswith(needing)]
    return sorted(name for name in names if not name.endswith("__main__"))


@pytest.mark.parametrize("name", importable_modules())
def test_every_name_that_a_module_offers_is_there_once(name: str) -> None:
    """ruff keeps `__all__` in order; that its names exist, only an import can tell."""
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", [])
    assert len(set(offered)) == len(offered)
    assert [missing for missing in offered if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", importable_modules())
def test_an_init_hands_names_on_and_defines_nothing(name: str) -> None:
    file = importlib.import_module(name).__file__
    assert file is not None
    if not file.endswith("__init__.py"):
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    assert [node.name for node in tree.body if isinstance(node, kinds)] == []
    assert hasattr(importlib.import_module(name), "__all__")


def test_every_error_of_agentkv_is_one_of_its_public_names() -> None:
    errors = importlib.import_module("agentkv.errors")
    assert set(errors.__all__) <= set(agentkv.__all__)


def test_type_checkers_are_told_of_the_same_names_as_python() -> None:
    tree = ast.parse((PACKAGES["agentkv"] / "__init__.py").read_text(encoding="utf-8"))
    told = {
        alias.name: getattr(importlib.import_module(str(node.module)), alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"__version__", *told} == set(agentkv.__all__)
    assert [name for name, value in told.items() if getattr(agentkv, name) is not value] == []


@pytest.mark.parametrize(
    "code",
    [
        "from agentkv import *; print(Runtime.__name__)",
        "from agentkv import Runtime as R; print(R.__name__)",
        "import agentkv; print(agentkv.runtime.Runtime.__name__)",
        "import agentkv; assert agentkv.cache and agentkv.errors; print(agentkv.Runtime.__name__)",
        "import agentkv, inspect; inspect.unwrap(agentkv); print('Runtime', *{'asyncio'} & {*sys.modules})",
    ],
)
def test_the_names_of_agentkv_are_there_however_they_are_asked_for(code: str) -> None:
    done = fresh_interpreter(f"import sys; {code}")
    assert (done.returncode, done.stdout) == (0, "Runtime\n"), done.stderr


def test_an_unknown_name_of_agentkv_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runtimes'"):
        agentkv.Runtimes  # noqa: B018
    assert set(agentkv.__all__) <= set(dir(agentkv))


def test_the_version_stands_in_one_place() -> None:
    project = project_table()
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", agentkv.__version__)
    assert f"## {agentkv.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        installed = version("agentkv-runtime")
    except PackageNotFoundError:
        pytest.skip("agentkv-runtime is not installed here, only found on the path")
    assert installed == agentkv.__version__


def project_table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_every_library_that_is_imported_is_declared() -> None:
    extras: dict[str, list[str]] = project_table()["optional-dependencies"]  # type: ignore[assignment]
    lines = [*project_table()["dependencies"], *(line for name in OF_USERS for line in extras[name])]
    declared = {re.split(r"[<>=\[]", line)[0] for line in lines}
    distributions = packages_distributions()
    imported = {name for path in sources(*PACKAGES.values()) for name in imported_by(path)}
    foreign = {name for name in imported if name not in sys.stdlib_module_names and name not in PACKAGES}
    undeclared = {
        name
        for name in foreign
        if not declared & {one.lower().replace("_", "-") for one in distributions.get(name, [name])}
    }
    assert undeclared == set()


def public_texts() -> list[Path]:
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [path for path in named if path.exists()] + sorted((ROOT / "docs").rglob("*.md"))


def test_no_text_installs_the_other_project_called_agentkv() -> None:
    texts = [*public_texts(), *sources(*PACKAGES.values(), ROOT / "examples")]
    install = re.compile(r"(pip|uv|poetry|pipx)\s+(pip\s+)?(install|add)\s+[^\n`]*\bagentkv(?!-runtime)\b")
    assert [str(path) for path in texts if install.search(path.read_text(encoding="utf-8"))] == []


MAY_NAME_MODELS = {"quirks.py", "convert.py", "scripted.py"}
"""What a kind of model shows by no evidence; the tokenizers of .gguf files, which say their kind by name only; and the
small model that is made for tests, which is of some kind."""


def test_no_model_class_or_type_is_named_outside_the_file_of_quirks() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if len(kind) > 2}
    kinds |= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert {"llama", "LlamaForCausalLM"} < kinds
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno} {word}"
        for path in sources(*PACKAGES.values())
        if path.name not in MAY_NAME_MODELS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for word in _words(node)
        if word in kinds
    ]
    assert named == []


def _words(node: ast.AST) -> list[str]:
    """What a line of code names: a variable, an attribute, an import, or a text that is compared with."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return node.name.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []
