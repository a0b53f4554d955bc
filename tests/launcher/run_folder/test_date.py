"""The date of a run, which its chat templates are told."""

import datetime

import pytest
from run_settings import simulated_run

from asyncrl.errors import ConfigError
from asyncrl.launcher.run_folder.date import with_date
from asyncrl.launcher.run_folder.folders import create_run_folder


def config(tmp_path, **chat):
    return simulated_run(run={"dir": str(tmp_path / "runs")}, chat=chat)


def test_a_run_has_the_date_of_its_first_start_unless_the_user_gives_one(tmp_path):
    days = [datetime.date.today().isoformat()]
    found = with_date(config(tmp_path), None).chat.date
    assert found in [*days, datetime.date.today().isoformat()]
    assert with_date(config(tmp_path, date="2024-02-29"), None).chat.date == "2024-02-29"


def test_a_resumed_run_keeps_its_date(tmp_path):
    run = create_run_folder(config(tmp_path, date="2024-02-29")).path
    assert with_date(config(tmp_path), run).chat.date == "2024-02-29"
    assert with_date(config(tmp_path, date="2025-01-01"), run).chat.date == "2025-01-01"
    (run / "config.json").write_text("{}")
    assert with_date(config(tmp_path), run).chat.date is not None


@pytest.mark.parametrize("date", ["2024-02-30", "2024-2-3", "today"])
def test_a_date_is_a_day_of_the_calendar(tmp_path, date):
    with pytest.raises(ConfigError, match=r"chat\.date"):
        config(tmp_path, date=date)
