"""What all benchmarks share: tables, ranges, files."""

import argparse
import json

from safe_offload.commands.bench.report import (
    COMMIT_FILE,
    Report,
    add_output_arguments,
    commit_of,
    describe_machine,
    median_and_spread,
    publish,
    table,
)

ROWS = [["", "first", "second"], ["a", "1", "22,000"], ["longer", "333", ""]]


def test_columns_are_aligned_and_lines_do_not_end_in_spaces():
    assert table(ROWS).splitlines() == [
        "        first  second",
        "a           1  22,000",
        "longer    333",
    ]
    assert table(ROWS, num_left=2).splitlines()[1] == "a       1      22,000"


def test_the_range_stands_beside_the_median():
    assert median_and_spread([0.5, 2.0, 1.0], ".1f") == "1.0 (0.5 to 2.0)"


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


def test_the_machine_is_described_by_what_matters_to_a_figure():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert "torch" in machine["versions"]
    assert len(machine["load_average_before"]) == 3
    assert machine["date"].endswith("UTC")


def test_a_checkout_that_was_packed_without_git_knows_its_commit(tmp_path):
    assert commit_of(tmp_path) == "unknown"
    (tmp_path / COMMIT_FILE).write_text("abc1234\n")
    assert commit_of(tmp_path) == "abc1234"
