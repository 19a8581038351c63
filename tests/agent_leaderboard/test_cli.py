"""The command: run, verify, share."""

import pytest

from agent_leaderboard import cli
from tests.agent_leaderboard.runs import CONFIG, content_of, read_rows, write_config, write_rows


def test_a_run_is_made_reported_verified_and_merged(tmp_path, small_data, capsys):
    config, folder = write_config(tmp_path, CONFIG), tmp_path / "run"
    run = ["--config", str(config), "--data", str(small_data), "--tasks", "1"]
    cli.main([*run, "--output", str(folder)])  # the default command
    assert {path.suffix for path in folder.glob("leaderboard.*")} == {".md", ".html"}
    assert "oracle" in capsys.readouterr().out

    check = ["--data", str(small_data), "--jobs", "1"]
    (folder / "leaderboard.html").unlink()
    (folder / "leaderboard.md").unlink()
    cli.main(["merge", str(tmp_path / "merged"), str(folder), *check])
    assert content_of(tmp_path / "merged") == content_of(folder)

    rows, own = read_rows(folder, "table", "random")
    own[0]["success"] = True
    write_rows(folder, rows)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(folder), *check])
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "table/random, task 0, sample 0, field 'success': is true, not false" in output
    assert "Verification FAILED" in output


def test_errors_are_one_line(tmp_path):
    for arguments, message in (
        (["--preset", "papre"], "Did you mean 'paper'"),
        (["--config", str(tmp_path / "no.yaml")], r"no\.yaml"),
        (["verify", str(tmp_path)], "1"),
        (["verify", str(tmp_path), "--max_minutes", "nan"], "max_minutes must be positive"),
        (["merge", str(tmp_path / "merged"), str(tmp_path)], "has no manifest.json"),
        (["--preset", "published", "--agents", "orcle"], "Did you mean 'oracle'"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(arguments)


def test_an_option_that_does_not_exist_and_a_number_below_one_are_refused(capsys):
    for arguments in (["--modle", "x"], ["--jobs", "0"], ["verfy", "x"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    errors = capsys.readouterr().err
    assert "unrecognized arguments: --modle" in errors
    assert "must be at least 1, not 0" in errors


def test_the_data_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(cli.DATA_VARIABLE, str(tmp_path))
    options = cli._parser().parse_args(["verify", "run"])
    assert options.data == tmp_path
