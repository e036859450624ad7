"""The page: one file, whose data cannot become markup, and what it says of one run and of several."""

import base64
import html
import json
import random
import re
import zlib

import pytest

from offbeat_recipes.report import tokens
from offbeat_recipes.report.build import ROWS_PER_BLOCK, embedded, page, report_data, write_report

EVIL = "</script><script>alert(1)</script><!--main--><!--blocks-->\u2028\udc80"


def unpacked(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_one_file_that_asks_no_network_for_anything(make_run):
    folder = make_run()
    path = write_report([folder])
    text = path.read_text()
    assert path == folder / "report.html"
    links = re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", text)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    assert "default-src 'none'" in html.unescape(text)
    assert "connect-src" not in text
    assert [one.name for one in folder.glob("*.writing")] == []


def test_no_text_of_a_run_is_markup(make_run, sample):
    folder = make_run(EVIL.replace("/", ""), samples=[sample(1, EVIL, uid=EVIL)])
    (folder / "summary.json").write_text(json.dumps({"error": EVIL}))
    main, blocks = report_data([folder])
    text = page(main, blocks)
    assert text.count("<script") == 2 + len(blocks), "the data, the page's own, and the blocks"
    assert "alert(1)</script>" not in text
    [held] = re.findall(r'<script type="application/json" id="main">(.*?)</script>', text, re.DOTALL)
    assert json.loads(held)["runs"][0]["summary"]["error"] == EVIL
    assert unpacked(blocks["rows-0-0"])["completion"] == [EVIL]
    assert embedded("<!--<script>") == '"\\u003c!--\\u003cscript>"'


def test_completions_come_in_blocks(make_run, sample):
    count = 2 * ROWS_PER_BLOCK + 1
    main, blocks = report_data([make_run(samples=[sample(1, f"text {at}") for at in range(count)])])
    assert (main["runs"][0]["rows"], main["runs"][0]["blocks"]) == (count, 3)
    texts = [text for at in range(3) for text in unpacked(blocks[f"rows-0-{at}"])["completion"]]
    assert texts == [f"text {at}" for at in range(count)]


def test_tokens_come_in_blocks_of_their_own_and_a_row_says_where(make_run, keep_trajectories, monkeypatch):
    monkeypatch.setattr(tokens, "COMPLETIONS_PER_BLOCK", 2)
    folder = make_run()
    turn = {"role": "policy", "pieces": ["a", EVIL], "logprobs": [-1, -2], "versions": [[1, 2]]}
    keep_trajectories(folder, 2, ["one", "two", "three"], turns=[turn])
    main, blocks = report_data([folder])
    assert main["runs"][0]["has_tokens"]
    assert unpacked(blocks["rows-0-0"])["tokens"] == [[0, 0], [0, 1], [1, 0], None, None]
    known = {"text": ["a", EVIL], "logprob": [-1, -2], "advantage": None, "version": [1, 1]}
    assert [unpacked(blocks[f"tokens-0-{at}"]) for at in range(2)] == [[[known], [known]], [[known]]]
    assert not report_data([make_run("none")])[0]["runs"][0]["has_tokens"]


def test_as_many_tokens_as_are_kept_stay_small(make_run, keep_trajectories):
    folder, draw, count = make_run(samples=[]), random.Random(0), 5000
    for step in range(1, 5):
        texts = [f" w{draw.randrange(30_000)}" for _ in range(count)]
        numbers = {key: [round(draw.gauss(-1, 1), 5) for _ in texts] for key in ("logprobs", "advantages")}
        turn = {
            "role": "policy",
            "text": "".join(texts),
            "pieces": texts,
            "versions": [[step, count]],
            **numbers,
        }
        keep_trajectories(folder, step, ["".join(texts)], turns=[turn])
    _, blocks = report_data([folder])
    assert len(unpacked(blocks["tokens-0-0"])) == 4
    assert len(blocks["tokens-0-0"]) / (4 * count) * tokens.MAX_TOKENS < 4e6, (
        "numbers without any order, and of each token"
    )


def test_charts_are_those_that_the_runs_fill_and_what_the_table_lacks_comes_last(make_run):
    main, _ = report_data([make_run(metrics={"mine/score": lambda step: step})])
    titles = [chart["title"] for chart in main["charts"]]
    assert titles[:2] == ["Reward", "Accuracy"]
    assert titles[-1] == "mine/score"
    assert "Critic" not in titles
    assert all(chart["usual"] for chart in main["charts"])


def test_a_metric_that_the_code_of_a_run_describes_has_its_unit_and_its_bounds(make_run):
    folder = make_run(metrics={"mine/score": lambda step: step, "mine/other": lambda step: 5})
    words = {"unit": "points", "meaning": "how well", "low": None, "high": 1.0}
    (folder / "metrics_described.json").write_text(json.dumps({"mine/score": words, "mine/torn": {}}))
    main, _ = report_data([folder])
    [entry], [other] = (chart["metrics"] for chart in main["charts"][:-3:-1])
    assert entry == {"key": "mine/score", "label": "mine/score", "unit": "points", "meaning": "how well"}
    assert other["unit"] == other["meaning"] == ""
    [flag] = main["runs"][0]["flags"]
    assert (flag["key"], flag["title"], flag["high"]) == ("mine/score", "mine/score", 1.0)


@pytest.mark.parametrize(
    ("metrics", "flagged"),
    [
        ({"mismatch/mean_abs_logprob_diff": lambda step: 0.4}, ["mismatch/mean_abs_logprob_diff"]),
        # of older tokens it is mostly their age
        ({"mismatch/mean_abs_logprob_diff": lambda step: 0.4, "staleness/max": lambda step: 2}, []),
        ({"offpolicy/ess_fraction": lambda step: 0.2}, ["offpolicy/ess_fraction"]),
        ({"offpolicy/ess_fraction": lambda step: 0.2 if step < 4 else 0.9}, []),
        ({"sync/failures": lambda step: step - 3}, ["sync/failures"]),
    ],
)
def test_what_is_unusual_at_the_end_is_named(make_run, metrics, flagged):
    main, _ = report_data([make_run(metrics=metrics)])
    assert [flag["key"] for flag in main["runs"][0]["flags"]] == flagged


def test_runs_that_differ_in_their_seed_alone_are_one_group(make_run):
    runs = [
        make_run("a", {"seed": 0, "name": "a", "trainer": {"sample_every": 1}}),
        make_run("b", {"seed": 1, "name": "b"}),
        make_run("c", {"mode": {"name": "fully_async", "max_staleness": 2}}),
        make_run("d", {"mode": {"name": "fully_async", "max_staleness": 3}}),
    ]
    main, blocks = report_data(runs)
    assert main["title"] == "4 runs"
    assert main["groups"] == [
        {"label": "mode=sync (2 seeds)", "runs": [0, 1]},
        {"label": "mode=fully_async, max_staleness=2", "runs": [2]},
        {"label": "mode=fully_async, max_staleness=3", "runs": [3]},
    ]
    assert {"rows-3-0", "timeline-3"} <= blocks.keys()


def test_runs_of_which_no_settings_are_known_are_told_apart_by_name(make_run):
    folders = [make_run("a"), make_run("b")]
    for folder in folders:
        (folder / "config.yaml").unlink()
    main, _ = report_data(folders)
    assert [group["label"] for group in main["groups"]] == ["a", "b"]


def test_what_cannot_be_written_leaves_the_earlier_report(make_run, tmp_path):
    folder = make_run()
    with pytest.raises(OSError, match="No such file"):
        write_report([folder], tmp_path / "nowhere" / "report.html")
    before = write_report([folder]).read_text()
    (folder / "report.html.writing").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_report([folder])
    assert (folder / "report.html").read_text() == before
