"""The page in a browser: Debian's Chromium, driven by playwright; skipped where there is none."""

import json
import shutil
import threading

import pytest
from axe_playwright_python.sync_playwright import Axe

from offbeat_recipes.report.build import server, write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]
EVIL = "</script><script>document.title = 'moved'</script><img src=x onerror=\"document.title='moved'\">"
WAIT_MS = 300_000
OWN = ("file:", "data:", "http://127.0.0.1:")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """Return what opens a report at some width.

    At the end the console held no error, and nothing was asked of a network.
    """
    complaints, contexts = [], []

    def show(path, width=1200, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(OWN) else complaints.append(asked.url),
        )
        page.goto(path if str(path).startswith("http:") else f"file://{path}")
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def rows_of(page):
    page.wait_for_selector(".list[data-loaded]")
    return page.locator(".row .what").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (360, "light")])
def test_it_draws_without_a_complaint_at_any_width_and_scheme(make_run, open_page, width, scheme):
    page = open_page(write_report([make_run()]), width, scheme)
    assert rows_of(page) == ["prompt a fine", "prompt a wrong"]
    assert page.locator("#learn svg").count() >= 2
    assert page.locator(".timeline canvas").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    said = page.locator("#head").inner_text()
    assert "done" in said
    assert "0.1 → 0.4" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_against_wcag_aa(make_run, open_page, sample, scheme):
    turns = [{"role": "policy", "text": "12*3", "versions": [[1, 4]]}, {"role": "environment", "text": "36"}]
    run = make_run(
        samples=[sample(4, "fine", reward=1.0, turns=turns), sample(4, "wrong", uid="b", reward=0.0)]
    )
    page = open_page(write_report([run]), scheme=scheme)
    assert len(rows_of(page)) == 2
    page.locator(".row").first.click()
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    found = Axe().run(page, options={"runOnly": tags}).response
    assert len(found["passes"]) > 10
    assert [(one["id"], one["help"], one["nodes"][0]["html"]) for one in found["violations"]] == []


def test_text_of_a_completion_is_text(make_run, open_page, sample):
    folder = make_run(samples=[sample(1, EVIL, uid=EVIL)])
    (folder / "summary.json").write_text(json.dumps({"error": EVIL}))
    page = open_page(write_report([folder]))
    rows_of(page)
    assert page.locator("pre.completion").inner_text() == EVIL
    assert page.title() == "run · Offbeat"
    assert page.locator("img").count() == 0


def test_advice_is_a_list_of_text(make_run, open_page):
    folder = make_run()
    (folder / "summary.json").write_text(json.dumps({"error": f"{EVIL}, see trainer.step_timeout_s"}))
    page = open_page(write_report([folder]))
    rows_of(page)
    [item] = page.locator("#learn").get_by_role("list", name="What to try").get_by_role("listitem").all()
    assert item.inner_text().startswith("the run ended: </script><script>document.title = 'moved'")
    assert item.inner_text().endswith("Try: raise trainer.step_timeout_s (now 600.0).")
    assert page.title() == "run · Offbeat"
    assert page.locator("img").count() == 0
    tags = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    assert Axe().run(page, options={"runOnly": tags}).response["violations"] == []


def test_filters_leave_what_they_say(make_run, open_page, sample):
    rows = [
        sample(at, f"Text {at}", uid=str(at % 3), reward=at / 10, finish="length" if at == 4 else "stop")
        for at in range(10)
    ]
    page = open_page(write_report([make_run(samples=rows)]))
    assert len(rows_of(page)) == 10
    page.get_by_label("Search").fill("text 7")
    assert rows_of(page) == ["prompt 1 Text 7"]
    assert page.locator(".rollouts > output").inner_text() == "1 of 10 completions"
    page.get_by_label("Search").fill("")
    page.get_by_label("Finish").select_option("length")
    assert rows_of(page) == ["prompt 1 Text 4"]
    page.get_by_label("Finish").select_option("")
    page.get_by_label("Verdict").select_option("false")
    assert rows_of(page) == ["prompt 0 Text 0"]
    page.get_by_label("Verdict").select_option("")
    page.get_by_label("step from").fill("3")
    page.get_by_label("reward to").fill("0.5")
    page.get_by_label("Order").select_option("best")
    assert rows_of(page) == ["prompt 2 Text 5", "prompt 1 Text 4", "prompt 0 Text 3"]


def test_the_keyboard_reads_completions_and_charts(make_run, open_page, sample):
    rows = [sample(step, f"s{step} n{at}", uid="p", reward=at) for step in (1, 2) for at in range(2)]
    page = open_page(write_report([make_run(samples=rows)]))
    rows_of(page)
    page.locator(".list").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.locator("pre.completion").inner_text() == "s1 n1"
    assert page.locator(".picks").all_inner_texts()[0].count("s1") == 2, "all completions of the prompt"
    assert "s2 n0" in page.locator(".picks").nth(1).inner_text(), "the same prompt at the other step"
    page.locator("#learn svg").first.focus()
    page.keyboard.press("Home")
    assert page.locator("#learn .key b").first.inner_text() == "0.1"
    page.keyboard.press("ArrowRight")
    assert page.locator("#learn .key b").first.inner_text() == "0.2"
    assert page.locator("#learn svg").first.get_attribute("aria-label").startswith("Reward. mean: first 0.1")


def test_all_charts_zoom_together(make_run, open_page):
    page = open_page(write_report([make_run(steps=40)]))
    rows_of(page)
    drawn = page.locator("#learn svg")
    every = [one.locator("text").all_text_contents() for one in drawn.all()]
    assert len(every) == 2
    drawn.first.scroll_into_view_if_needed()
    box = drawn.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 50)
    page.mouse.up()
    near = [one.locator("text").all_text_contents() for one in drawn.all()]
    assert all("30" in one and "10" not in one for one in near), "the second half of the steps, in both"
    drawn.first.press("Escape")
    assert [one.locator("text").all_text_contents() for one in drawn.all()] == every


def test_turns_are_read_one_by_one_and_none_is_markup(make_run, open_page, keep_trajectories):
    folder = make_run(samples=[])
    turns = [
        {"role": "policy", "text": EVIL, "versions": [[3, 5], [4, 1]], "reward": 0.5},
        {"role": "environment", "text": "answer"},
    ]
    keep_trajectories(folder, 2, ["both"], turns=turns, parts={"format": 0.25})
    page = open_page(write_report([folder]))
    rows_of(page)
    assert page.locator(".turn .facts").all_inner_texts() == [
        "policy · version 3, 4 · reward 0.5",
        "environment",
    ]
    assert page.locator(".turn pre").all_inner_texts() == [EVIL, "answer"]
    assert "format 0.25" in page.locator(".detail").inner_text()


def test_a_live_page_draws_what_is_new(make_run, open_page, sample):
    folder = make_run()
    with server([folder]) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            page = open_page(f"http://127.0.0.1:{running.server_port}/")
            assert len(rows_of(page)) == 2
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 5, "reward/mean": 0.75}) + "\n")
            with (folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps(sample(5, "new")) + "\n")
            page.wait_for_selector("text=prompt a new")
            assert page.locator("#learn .key b").first.inner_text() == "0.75"
        finally:
            running.shutdown()
            thread.join()


def test_several_runs_are_lines_with_a_band_over_seeds(make_run, open_page, tmp_path):
    folders = [
        make_run("a", {"seed": 0}),
        make_run("b", {"seed": 1}, metrics={"reward/mean": lambda step: step / 5}),
        make_run("c", {"algorithm": {"name": "rloo"}}),
    ]
    page = open_page(write_report(folders, tmp_path / "all.html"))
    first = page.locator("#learn .chart").first
    assert first.locator(".key").all_inner_texts() == ["algorithm=grpo (2 seeds) 0.6", "algorithm=rloo 0.4"]
    assert first.locator("path.band").count() == 1
    page.locator("#said select").first.select_option("2")
    page.wait_for_selector(".list[data-loaded]")


def test_a_folder_that_holds_hardly_anything_is_shown(make_run, open_page):
    folder = make_run()
    for path in folder.glob("*.json*"):
        path.unlink()
    page = open_page(write_report([folder]))
    assert "ended early" in page.locator("#head").inner_text()
    assert "metrics.jsonl is missing" in page.locator(".note").first.inner_text()
    assert "No step was finished" in page.locator("#learn").inner_text()


def test_values_of_kinds_that_nobody_foresaw_break_nothing(make_run, open_page, sample):
    odd = {
        "accuracy_after": "high",
        "wall_s": [1],
        "startup_s": "soon",
        "reward_last": {},
        "lost_replicas": [{}, 3],
    }
    turns = [3, {"role": 1, "versions": [5], "observed": "x"}]
    rows = [sample(1, "odd", turns=turns, parts={"a": "b"}) | {"reward": "r"}]
    folder = make_run(samples=[*rows, sample(1, "fine", turns=7, parts=[1])])
    (folder / "summary.json").write_text(json.dumps(odd))
    (folder / "machine.json").write_text(json.dumps({"packages": None, "gpus": [{"name": 1}, None]}))
    page = open_page(write_report([folder]))
    assert rows_of(page) == ["prompt a odd", "prompt a fine"]
    page.locator(".row").first.click()
    assert page.locator(".turn").count() == 1
    assert page.locator("#what .card").count() == 3


def test_a_hundred_thousand_completions_load_in_pieces_and_are_all_searched(make_run, open_page, sample):
    count = 100_000
    rows = [sample(at // 500, f"completion {at} {'word ' * 20}", uid=str(at // 10)) for at in range(count)]
    page = open_page(write_report([make_run(samples=rows)]))
    assert 5 < len(rows_of(page)) < 60, "the list draws what is seen"
    page.get_by_label("Search").fill("completion 99999 ")
    assert page.locator(".rollouts > output").inner_text() == "1 of 100,000 completions"
