"""A run directory has one writer, and one that cannot be written is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moe_fragment.schema import ConfigError
from moe_fragment.train.launch import launch
from moe_fragment.train.lock import RunLock
from tests.train.runs import recipe_for


def test_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="another run is writing here \\(process "):
        RunLock(tmp_path / "run")
    first.release()
    RunLock(tmp_path / "run").release()


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a run directory \\(Not a directory\\); set `out`"):
        RunLock(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot be a run directory \\(File exists\\)"):
        RunLock(tmp_path / "file")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be a run directory \\(Is a directory\\)"):
        RunLock(tmp_path / "run")


def test_launch_refuses_it_before_anything_starts(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_for(tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a run directory"):
        launch(recipe, [f"out={tmp_path}/file/runs"], quiet=True)
