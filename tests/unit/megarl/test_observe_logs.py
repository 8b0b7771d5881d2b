"""What a process's log lines look like and where they go."""

import logging
import re

import pytest

from megarl.observe.logs import set_step, setup_logging


@pytest.fixture(autouse=True)
def _root_logger_as_before():
    names = ("", "megarl", "megatron_bridge", "launch")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = logging.getLogger().handlers[:]
    yield
    for handler in logging.getLogger().handlers[:]:
        if handler not in handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_lines_carry_time_executor_rank_and_step(tmp_path):
    file = tmp_path / "logs" / "trainer.3.log"
    setup_logging("trainer", 3, file)
    logging.getLogger("megarl.controller").info("hello")
    set_step(17)
    logging.getLogger("megatron_bridge.plan").warning("careful")
    first, second = file.read_text().splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{time} trainer/3 step 0 INFO megarl\.controller: hello", first)
    assert re.fullmatch(rf"{time} trainer/3 step 17 WARNING megatron_bridge\.plan: careful", second)


def test_libraries_log_from_warning(tmp_path):
    setup_logging("trainer", 0, tmp_path / "log")
    logging.getLogger("some_library").info("chatter")
    logging.getLogger("some_library").warning("trouble")
    assert "chatter" not in (tmp_path / "log").read_text()
    assert "trouble" in (tmp_path / "log").read_text()


def test_with_a_file_only_warnings_reach_standard_error(tmp_path, capsys):
    setup_logging("trainer", 0, tmp_path / "log")
    logging.getLogger("megarl").info("quiet")
    logging.getLogger("megarl").warning("loud")
    errors = capsys.readouterr().err
    assert "quiet" not in errors
    assert errors.count("loud") == 1


def test_without_a_file_everything_goes_to_standard_error_once(capsys):
    setup_logging("launcher", 0, None)
    setup_logging("launcher", 0, None)  # replaces, does not add
    logging.getLogger("megarl").info("hello")
    assert capsys.readouterr().err.count("hello") == 1
