"""tools/count_tests.py: every way in which a run can go wrong is counted."""

import json
import sys

import pytest

from tools import count_tests

XML = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure>no</failure></testcase>
<testcase classname="a" name="broken"><error>no</error></testcase>
<testcase classname="a" name="absent"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(events, checks) → exit status and the lines that count_tests prints."""

    def run(*events, checks=""):
        (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
        (tmp_path / "checks").write_text(checks)
        arguments = ["count_tests", str(tmp_path / "events"), "--checks", str(tmp_path / "checks")]
        monkeypatch.setattr(sys, "argv", arguments)
        status = count_tests.main()
        return status, capsys.readouterr().out.splitlines()

    return run


def result(tmp_path, label: str, status: str, xml: str | None):
    outputs = []
    if xml is not None:
        report = tmp_path / f"{label.strip('/')} with a space.xml"
        report.write_text(xml)
        outputs = [{"name": "test.log", "uri": "file:///nowhere"}, {"name": "test.xml", "uri": report.as_uri()}]
    details = {"status": status, "testAttemptDurationMillis": "1500", "testActionOutput": outputs}
    return {"id": {"testResult": {"label": label, "run": 1}}, "testResult": details}


def passed(tmp_path, cases=2):
    xml = "<testsuite>" + '<testcase classname="a" name="b"/>' * cases + "</testsuite>"
    return result(tmp_path, "//good", "PASSED", xml)


def test_counts_cases_and_checks(run, tmp_path):
    status, lines = run(passed(tmp_path), checks="PASSED wheel\nnoise\n")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed")
    assert lines[0].split() == ["1.5", "s", "//good"]


def test_names_failures_and_skips(run, tmp_path):
    status, lines = run(passed(tmp_path), result(tmp_path, "//bad", "FAILED", XML))
    assert (status, lines[-1]) == (1, "3 passed, 2 failed, 1 skipped")
    assert "FAILED //bad a::bad" in lines and "FAILED //bad a::broken" in lines


@pytest.mark.parametrize("xml", [None, '<testsuite><testcase classname="a" name="b"/></testsuite>'])
def test_a_failure_that_no_case_tells_of_counts(run, tmp_path, xml):
    status, lines = run(passed(tmp_path), result(tmp_path, "//hangs", "TIMEOUT", xml))
    assert status == 1 and "1 failed" in lines[-1]
    assert "FAILED //hangs TIMEOUT" in lines


def test_a_report_that_is_gone_counts(run, tmp_path):
    event = passed(tmp_path)
    (tmp_path / "good with a space.xml").unlink()
    status, lines = run(event)
    assert (status, lines[-1]) == (1, "0 passed, 1 failed")
    assert "FAILED //good test.xml is gone" in lines


def test_a_target_that_did_not_build_counts(run, tmp_path):
    broken = {"id": {"targetCompleted": {"label": "//broken"}}, "completed": {}}
    built = {"id": {"targetCompleted": {"label": "//good"}}, "completed": {"success": True}}
    not_for_this_platform = {"id": {"targetCompleted": {"label": "//gpu"}}, "aborted": {"reason": "SKIPPED"}}
    status, lines = run(passed(tmp_path), broken, built, not_for_this_platform)
    assert (status, lines[-1]) == (1, "2 passed, 1 failed")
    assert "FAILED //broken did not build" in lines


def test_a_run_without_tests_counts(run):
    status, lines = run({"id": {"started": {}}, "started": {}})
    assert (status, lines[-1]) == (1, "0 passed, 1 failed")


def test_a_failed_check_counts(run, tmp_path):
    status, lines = run(passed(tmp_path), checks="FAILED wheel_python3.12\n")
    assert (status, lines[-1]) == (1, "2 passed, 1 failed")
    assert "FAILED wheel_python3.12" in lines
