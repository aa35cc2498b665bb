#!/usr/bin/env python3
"""Counts the test cases of bazel test runs, from their test.xml files.

    tools/count_tests.py EVENTS [EVENTS ...] [--checks FILE]

EVENTS are files that bazel test --build_event_json_file wrote; FILE holds lines "PASSED name" and "FAILED name" of
checks outside Bazel. Prints what failed and the slowest targets, then one line "N passed, N failed[, N skipped]". A
test that failed without saying so in its test.xml (a crash, a timeout), a target that did not build, and a run in which
no test ran count as one failure each. Exits 1 on any failure.
"""

import argparse
import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree
from collections import Counter

SLOWEST = 10


def cases(report: pathlib.Path):
    """(name, outcome) of every case in a test.xml."""
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        yield f"{case.get('classname', '')}::{case.get('name', '')}", outcome


def read_events(path: pathlib.Path):
    """Test results by target, and the targets that did not build, of one run."""
    results, broken = {}, set()
    for line in path.read_text().splitlines():
        event = json.loads(line)
        identity = event["id"]
        if "testResult" in identity and "testResult" in event:
            results.setdefault(identity["testResult"]["label"], []).append(event["testResult"])
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            if event.get("aborted", {}).get("reason") != "SKIPPED":  # not for this platform
                broken.add(identity["targetCompleted"]["label"])
    return results, broken - set(results)


def report(events: pathlib.Path) -> Counter:
    """Counts of one run; prints its failures."""
    total, seconds = Counter(), {}
    results, broken = read_events(events)
    for label, attempts in sorted(results.items()):
        seconds[label] = sum(int(attempt.get("testAttemptDurationMillis", 0)) for attempt in attempts) / 1000
        for attempt in attempts:
            counts = Counter()
            for output in attempt.get("testActionOutput", []):
                if output["name"] != "test.xml" or "uri" not in output:
                    continue
                path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path))
                for name, outcome in cases(path) if path.exists() else [("test.xml is gone", "failed")]:
                    counts[outcome] += 1
                    if outcome == "failed":
                        print(f"FAILED {label} {name}")
            if attempt.get("status") != "PASSED" and not counts["failed"]:
                print(f"FAILED {label} {attempt.get('status', 'without a result')}")
                counts["failed"] += 1
            total += counts
    for label in sorted(broken):
        print(f"FAILED {label} did not build")
        total["failed"] += 1
    if not total:
        print(f"FAILED {events.name}: no test ran")
        total["failed"] += 1
    for label in sorted(seconds, key=seconds.get, reverse=True)[:SLOWEST]:
        print(f"{seconds[label]:7.1f} s  {label}")
    return total


def count_checks(path: pathlib.Path) -> Counter:
    """Counts of a file of checks; prints its failures."""
    total = Counter()
    for line in path.read_text().splitlines():
        outcome = line.split(" ", 1)[0].lower()
        if outcome in ("passed", "failed"):
            total[outcome] += 1
            if outcome == "failed":
                print(line)
    return total


def summary(total: Counter) -> str:
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    return f"{total['passed']} passed, {total['failed']} failed{skipped}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=pathlib.Path, nargs="+", metavar="EVENTS")
    parser.add_argument("--checks", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    total = sum((report(path) for path in options.events), Counter())
    if options.checks:
        total += count_checks(options.checks)
    print(summary(total))
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
