"""What all benchmarks share: tables, ranges, files."""

import argparse
import json

from safe_offload.commands.bench.report import Report, add_output_arguments, publish
from tests.benchmarks.report import COMMIT_FILE, commit_of


def test_a_report_is_printed_and_written(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_output_arguments(parser)
    file = tmp_path / "found.json"
    report = Report("How.", ["a table", "", "a line"], {"rows": [1]}, {"rounds": 2}, {"cores": 4})
    publish(report, parser.parse_args(["--json", str(file)]))
    assert capsys.readouterr().out.startswith("\nHow.\n\na table\n\na line\n\nwrote ")
    assert json.loads(file.read_text()) == {
        "method": "How.",
        "text": "How.\n\na table\n\na line",
        "machine": {"cores": 4},
        "options": {"rounds": 2},
        "rows": [1],
    }


def test_a_checkout_that_was_packed_without_git_knows_its_commit(tmp_path):
    assert commit_of(tmp_path) == "unknown"
    (tmp_path / COMMIT_FILE).write_text("abc1234\n")
    assert commit_of(tmp_path) == "abc1234"
