"""`offbeat report`: files, refusals, and the server of a run that goes on."""

import html
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from offbeat_recipes.cli import report
from offbeat_recipes.report.build import server


@contextmanager
def serving(folders):
    """Yield what asks the server of `folders` for a path."""
    with server(folders) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()

        def ask(path, **headers):
            url = f"http://127.0.0.1:{running.server_port}{path}"
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=600) as answer:
                return answer.read().decode()

        try:
            yield ask
        finally:
            running.shutdown()
            thread.join()


def test_one_run_has_its_report_in_its_folder_and_several_here(make_run, tmp_path, monkeypatch, capsys):
    first, second = make_run("a"), make_run("b", {"seed": 1})
    monkeypatch.chdir(tmp_path)
    assert report.main([str(first)]) == 0
    assert report.main([str(first), str(second)]) == 0
    assert report.main([str(first), "--output", "other.html"]) == 0
    assert capsys.readouterr().out.split() == [str(first / "report.html"), "report.html", "other.html"]
    assert "2 runs" in (tmp_path / "report.html").read_text()
    assert sorted(one.name for one in first.glob("*.html")) == ["report.html"]


@pytest.mark.parametrize("more", [[], ["--serve"]])
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, capsys, more):
    assert report.main([str(tmp_path), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"offbeat report: {tmp_path} is no run folder")
    assert said.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_said(make_run, tmp_path, capsys):
    assert report.main([str(make_run()), "--output", str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_server_tells_what_is_new(make_run, sample):
    folder = make_run()
    with serving([folder]) as ask:
        assert "connect-src 'self'" in html.unescape(ask("/"))
        first = json.loads(ask("/data.json"))
        version = first["main"]["version"]
        assert json.loads(ask(f"/data.json?have={version}")) == {}
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(sample(5, "new")) + "\n")
        then = json.loads(ask(f"/data.json?have={version}"))
        assert then["main"]["runs"][0]["rows"] == first["main"]["runs"][0]["rows"] + 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask("/config.yaml")


def test_the_server_answers_to_no_name_of_somebody_elses(make_run):
    with serving([make_run()]) as ask, pytest.raises(urllib.error.HTTPError, match="403"):
        ask("/data.json", Host="rebound.example")


def test_help_and_a_report_load_no_heavy_library(make_run):
    program = (
        "import sys; from offbeat_recipes.cli import report; report.main(sys.argv[1:]);"
        "print([name for name in ('torch', 'ray', 'transformers', 'hydra', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(make_run())],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == "[]"
