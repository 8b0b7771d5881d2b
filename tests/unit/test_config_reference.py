from megarl.config import RunConfig
from megarl.config_file import schema_rows
from tools.config_reference import TARGET, reference


def test_the_configuration_page_is_what_the_schema_says() -> None:
    assert TARGET.read_text() == reference(), "run `python -m tools.config_reference`"


def test_every_key_is_on_the_page() -> None:
    page = TARGET.read_text()
    assert all(f"`{key}`" in page for key, _, _ in schema_rows(RunConfig))
