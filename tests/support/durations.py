"""What tests take: `tests/durations.json`, which `make durations` writes, and by which a session is ordered.

Seconds of a worker, alone on two cores: `groups` of tests that share launched runs, one on the other in the order in
which they run, and `tests` that belong to none, with all their cases.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"
# What is shorter is not written down.
LEAST_S = 1.0


def group_of(item: pytest.Item) -> str:
    """What runs on one worker: a group of tests, or all cases of a test."""
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker is not None else _test(item.nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts tests by what their group takes; those of a group stay together, in the order in which they are written."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {"groups": {}, "tests": {}}
    order = {name: -seconds for name, seconds in {**known["tests"], **known["groups"]}.items()}
    # What no table has yet begins early, since it may be long.
    items.sort(key=lambda item: (order.get(group_of(item), 0.0), group_of(item)))


def write(reports: dict[str, list[pytest.TestReport]]) -> None:
    """Writes the table from a session's reports, by the outcome that they are filed under."""
    groups: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (report for some in reports.values() for report in some if hasattr(report, "duration")):
        # As xdist marks the tests of a group.
        name, _, group = report.nodeid.rpartition("@")
        if name and "]" not in group:
            groups[group] += report.duration
        else:
            tests[_test(report.nodeid)] += report.duration
    tables = {
        title: {name: round(seconds, 1) for name, seconds in counted.most_common() if seconds >= LEAST_S}
        for title, counted in (("groups", groups), ("tests", tests))
    }
    FILE.write_text(json.dumps(tables, indent=1) + "\n")


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0].removeprefix("tests/")
