"""The `moe-fragment` command: help at once, clear endings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_fragment import cli

HELP = """
import sys
from typer.testing import CliRunner
from moe_fragment.cli import app
runner = CliRunner()
names = [command.name or command.callback.__name__ for command in app.registered_commands]
for words in ([], *([name] for name in names)):
    result = runner.invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output
print(names, [name for name in ("torch", "transformers", "deepspeed", "torchft", "datasets") if name in sys.modules])
"""


def main(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Exit code, standard output and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["moe-fragment", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_help_of_every_command_needs_nothing_heavy() -> None:
    found = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "['launch', 'sweep', 'plan', 'coordinator', 'report', 'export'] []\n"


def test_bad_usage_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, sentence in (
        (["lunch"], "No such command 'lunch'"),
        (["launch"], "Missing argument 'recipe'"),
        (["coordinator", "--clusters", "0"], "'--clusters': Input should be greater"),
        (["coordinator", "--clusters", "2", "--port", "99999"], "'--port': Input should be less"),
        (["export", str(tmp_path), "--out", "x", "--dtype", "fp8"], "'fp8' is not one of"),
        (["report", str(tmp_path / "none")], str(tmp_path / "none")),
        (["export", str(tmp_path), "--out", str(tmp_path / "x")], "no checkpoints of any cluster there"),
        (["launch", str(tmp_path / "none.yaml")], f"{tmp_path}/none.yaml: no such file"),
    ):
        code, out, err = main(words, monkeypatch, capsys)
        assert (code, out) == (2, ""), words
        assert sentence in " ".join(err.split()), err


@pytest.mark.parametrize("flag", ["--json", ""])
@pytest.mark.timeout(90)
def test_coordinator_says_where_it_is_and_leaves_on_sigterm(flag: str) -> None:
    words = ["coordinator", "--clusters", "2", *([flag] if flag else [])]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("moe-fragment")), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    try:
        assert process.stdout is not None
        text = process.stdout.readline()
        while flag and not text.endswith("}\n"):
            text += process.stdout.readline()
        if flag:
            assert json.loads(text) == {"address": json.loads(text)["address"], "clusters": 2}
            assert json.loads(text)["address"].startswith("localhost:")
        else:
            assert text.startswith("coordinator for 2 clusters at localhost:")
    finally:
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
