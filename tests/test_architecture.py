"""The layout is a promise: these tests read the sources and keep it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_bridge", "megarl", "launch", "tools")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# A unit may import only itself and units of a lower level. The longest matching name wins, so
# `megarl.executors.base` (the contract) sits below `megarl.executors` (the implementations).
LEVELS = (
    {"megatron_bridge"},
    {"megatron_bridge.runtime"},
    {"megarl.errors", "megarl.types", "megarl.topology", "megarl.progress"},
    {"megarl.config"},
    {"megarl.config_file"},
    {"megarl.executors.base", "megarl.channels.base", "megarl.algorithms"}
    | {"megarl.rewards", "megarl.data", "megarl.observe", "megarl.world"},
    {"megarl.weights", "megarl.recording", "megarl.convert_report"},
    {"megarl.ddma", "megarl.checkpoint", "megarl.check"},
    {"megarl.channels", "megarl.contract", "megarl.rollout"},
    {"megarl.executors", "megarl.controller"},
    {"megarl.wiring"},
    {"megarl.evaluate", "megarl.doctor", "megarl.convert"},
    {"megarl.train"},
    {"launch"},
    {"megarl.cli"},
    {"tools"},
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}

# Names that only these files and folders may import or touch. The longest matching name wins.
OBSERVE = ("megarl/observe/metrics.py",)
RUNTIME = ("megatron_bridge/runtime/",)
ENGINE = (
    "megarl/rollout/vllm_engine.py",
    "megarl/rollout/vllm_worker.py",
    "megarl/rollout/vllm_kernels.py",
    "megarl/rollout/vllm_scheduler.py",
    "megarl/rollout/vllm_fp8.py",
)
ENVIRONMENT = (
    "launch/",
    "megarl/cli.py",
    "megarl/train.py",
    "megarl/world.py",
    "megarl/rollout/vllm_engine.py",  # vLLM reads its variables while it is imported
    "tools/netlab.py",  # hands it on to processes
    "tools/weight_rank.py",  # gloo reads its interface from it
)
PROCESS_GROUPS = (
    "megarl/channels/",
    "megarl/ddma/",
    "megarl/world.py",
    "launch/preflight/link_rank.py",  # measures
    "launch/ranks.py",  # hosts the store at which the ranks meet
    "megarl/rollout/vllm_engine.py",  # checks the default group that vLLM is about to take over
    "megatron_bridge/io/dist_metadata.py",  # makes the records of its checkpoints, no group
    "tools/weight_peers.py",
    "tools/weight_rank.py",
    "tools/weight_schemes.py",
    *RUNTIME,
)
ONLY_IN = {
    "apex": RUNTIME,
    "megatron.core": (*RUNTIME, "tools/mcore_planner.py", "tools/weight_peers.py"),  # to measure
    "os.environ": ENVIRONMENT,
    "os.getenv": ENVIRONMENT,
    "os.putenv": (),
    "ray": (),
    "sglang": (),
    "tensorboard": (),
    "torch.distributed": PROCESS_GROUPS,
    "torch.distributed.ProcessGroup": (*PROCESS_GROUPS, "megarl/executors/"),  # handed on, not used
    "torch.utils.tensorboard": OBSERVE,
    "transformer_engine": RUNTIME,
    "vllm": ENGINE,
    "wandb": OBSERVE,
}

# What the command line needs to refuse a bad configuration; torch alone takes seconds to import.
TORCH_FREE = (
    "megarl.config",
    "megarl.config_file",
    "megarl.errors",
    "megarl.topology",
    "megatron_bridge.box",
    "megatron_bridge.errors",
    "megatron_bridge.parallel",
    "megatron_bridge.plan",
    "megatron_bridge.spec",
)

NAMELESS = {"common", "helper", "helpers", "misc", "util", "utils"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def _unit_of(dotted: str) -> str | None:
    """The longest known unit that prefixes ``dotted``; None for third-party names."""
    parts = dotted.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LEVEL), None)


def _imports(tree: ast.Module) -> set[str]:
    """Dotted names of everything imported, at any depth of the source."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _attributes(tree: ast.Module) -> set[str]:
    """Dotted attribute accesses on plain names, such as ``os.environ``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            names.add(".".join([node.id, *reversed(parts)]))
    return names


def _layer_faults(path: str, tree: ast.Module) -> Iterator[str]:
    unit = _unit_of(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if unit is None:
        if not path.endswith("__init__.py"):
            yield "has no level: add it to LEVELS"
        return
    used = {_unit_of(name) for name in _imports(tree)} - {None, unit}
    for other in sorted(str(name) for name in used):
        if LEVEL[other] >= LEVEL[unit]:
            yield f"{unit} must not import {other}: it is not below"


def _third_party_faults(path: str, tree: ast.Module) -> Iterator[str]:
    used = _imports(tree) | _attributes(tree)
    matches = ([name for name in ONLY_IN if f"{item}.".startswith(f"{name}.")] for item in used)
    for name in sorted({max(names, key=len) for names in matches if names}):
        if not path.startswith(ONLY_IN[name]):
            yield f"must not use {name}: see ONLY_IN"


def _form_faults(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    bad_names = NAMELESS & set(path.removesuffix(".py").split("/"))
    if bad_names:
        yield f"{bad_names} says nothing about what it owns"
    if not ast.get_docstring(tree):
        yield "has no module docstring: what does it own, who calls it?"
    if path.endswith("__init__.py") and len(tree.body) > 1:
        yield "__init__.py holds a docstring and nothing else"
    if len(source.splitlines()) > MAX_FILE_LINES:
        yield f"is longer than {MAX_FILE_LINES} lines: split it by responsibility"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"


def _faults(path: str, source: str) -> list[str]:
    """What is wrong with the source at ``path`` (relative to the root, with slashes)."""
    tree = ast.parse(source)
    return [
        *_layer_faults(path, tree),
        *_third_party_faults(path, tree),
        *_form_faults(path, source, tree),
    ]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in SOURCES])
def test_a_source_keeps_the_house_rules(path: str):
    assert _faults(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_bad_configuration_is_refused_without_importing_torch(module: str):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr or f"{module} imports torch"


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("megarl/rollout/buffer.py", "import megarl.executors.trainer", "must not import"),
        ("megarl/rollout/buffer.py", "from megarl.channels import wire", "must not import"),
        ("megarl/rollout/buffer.py", "from megarl import config", ""),
        ("megarl/controller.py", "from megarl.executors.base import Executor", ""),
        ("megarl/controller.py", "from megarl.executors.trainer import X", "must not import"),
        ("megatron_bridge/plan.py", "from megarl.errors import ConfigError", "must not import"),
        ("megatron_bridge/plan.py", "from megatron_bridge.box import Box", ""),
        ("megatron_bridge/plan.py", "import megatron_bridge.runtime.cpu", "must not import"),
        ("megatron_bridge/io/read.py", "def f():\n    import megatron.core.x", "megatron.core"),
        ("megatron_bridge/runtime/model.py", "from megatron.core import mpu", ""),
        ("megarl/executors/reward.py", "from torch import distributed", "torch.distributed"),
        ("megarl/executors/reward.py", "import torch\ntorch.distributed.barrier()", "torch.dist"),
        ("megarl/executors/reward.py", "from torch import Tensor", ""),
        ("megarl/executors/sft.py", "from torch.distributed import ProcessGroup", ""),
        ("megarl/rewards/pool.py", "from torch.distributed import ProcessGroup", "torch.dist"),
        ("megarl/rewards/pool.py", "import os\nos.environ.get('A')", "os.environ"),
        ("megarl/rewards/pool.py", "from os import environ", "os.environ"),
        ("megarl/rewards/pool.py", "import os\nos.getpid()", ""),
        ("megarl/rollout/engine.py", "from vllm import LLM", "must not use vllm"),
        ("megarl/rollout/vllm_engine.py", "from vllm import LLM", ""),
        ("megarl/observe/plots.py", "import wandb", "must not use wandb"),
        ("megarl/novelty.py", "x = 1", "add it to LEVELS"),
        ("megarl/data/utils.py", "x = 1", "says nothing"),
        ("megarl/data/helpers/rows.py", "x = 1", "says nothing"),
        ("megarl/data/__init__.py", "from megarl.data import rows", "nothing else"),
        ("megarl/data/rows.py", "x = 1\n" * 400, "longer than 400"),
        ("megarl/data/rows.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    ],
)
def test_the_rules_tell_right_from_wrong(path: str, code: str, fault: str):
    found = _faults(path, f'"""Docstring."""\n{code}\n')
    assert len(found) == bool(fault), found
    assert fault in "".join(found)


def test_pytest_collects_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not [name for name in folders if any(fnmatch(name, each) for each in passed_over)]
