"""Find a reward function by its import path; called by the pool and by its processes.

Imports no torch: reward processes must stay light.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

from megarl.errors import ConfigError

# (prompt, response, answer, extra) -> score, or a dict with "score" and numbers to report
ScoreFunction = Callable[[str, str, str, dict], float | Mapping[str, float]]


def load_score_function(path: str) -> ScoreFunction:
    """Import ``module:function`` or ``file.py:function``.

    Raises:
        ConfigError: no such module, file or function, or one that does not take
            (prompt, response, answer, extra).
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(
            f"reward.path must be 'module:function' or 'file.py:function', got {path!r}"
        )
    try:
        module = (
            _import_file(Path(source))
            if source.endswith(".py")
            else importlib.import_module(source)
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"reward.path {path!r}: importing {source} failed: {type(error).__name__}: {error}"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(f"reward.path {path!r}: {source} has no function {name!r}, only {known}")
    try:
        inspect.signature(function).bind("", "", "", {})
    except TypeError as error:
        raise ConfigError(
            f"reward.path {path!r}: expected a function of (prompt, response, answer, extra), "
            f"got {name}{inspect.signature(function)}"
        ) from error
    return cast(ScoreFunction, function)


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"reward.path: file {file} does not exist")
    name = f"megarl_reward_file_{file.stem}"  # a file called math.py must not hide `math`
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
