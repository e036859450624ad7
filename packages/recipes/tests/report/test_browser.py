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
    assert page.locator(".turn > summary").all_inner_texts() == [
        f"policy · {len(EVIL)} characters · version 3, 4 · reward 0.5",
        "environment · 6 characters",
    ]
    assert page.locator(".turn pre").all_text_contents() == [EVIL, "answer"]
    assert page.locator("img").count() == 0
    assert "format 0.25" in page.locator(".detail").inner_text()


CALL = '<tool_call>{"name": "add"}</tool_call>\n'


def spoken(pieces, **others):
    """A turn of the policy as a run keeps it."""
    turn = {"role": "policy", "text": "".join(pieces), "pieces": pieces, "token_ids": [1] * len(pieces)}
    logprobs = [-0.25 * at for at in range(len(pieces))]
    return turn | {"logprobs": logprobs, "versions": [[3, 1], [4, len(pieces) - 1]], **others}


def test_turns_and_tool_calls_are_folded_but_for_the_last_turn(make_run, open_page, keep_trajectories):
    folder = make_run(samples=[])
    first, last = spoken(["I add.", " " + CALL[:20], CALL[20:], "Well"]), spoken(["It is", " 3"], reward=1.0)
    answer = {"role": "environment", "text": "3", "token_ids": [7]}
    keep_trajectories(folder, 2, ["all"], turns=[first, answer, last])
    page = open_page(write_report([folder]))
    rows_of(page)
    turns = page.locator(".turn")
    assert turns.evaluate_all("all => all.map((one) => one.open)") == [False, False, True]
    said = [
        "policy · 4 tokens · version 3, 4",
        "environment · 1 token",
        "policy · 2 tokens · version 3, 4 · reward 1",
    ]
    assert page.locator(".turn > summary").all_inner_texts() == said
    turns.first.locator("> summary").focus()
    page.keyboard.press("Enter")
    call = turns.first.locator(".call")
    assert turns.first.locator("pre").all_text_contents() == ["I add. ", CALL, "Well"]
    assert (call.locator("summary").inner_text(), call.locator("pre").is_visible()) == (
        f"tool call · {len(CALL)} characters",
        False,
    )
    page.get_by_label("Colour tokens by").select_option("logprob")
    page.wait_for_selector("pre .token")
    pieces = ["I add.", " " + CALL, "Well"]
    assert turns.first.locator("pre").all_text_contents() == pieces, "a token that begins a call is in it"
    assert turns.evaluate_all("all => all.map((one) => one.open)") == [True, False, True], "as they were"


def contrast(page):
    """The least contrast of a token with what it lies on, as WCAG counts it, and how many there are."""
    return page.evaluate("""() => {
      const light = (colour) => {
        const numbers = colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const [r, g, b] = numbers.map((one) => (colour.startsWith("rgb") ? one / 255 : one))
          .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      };
      const all = [...document.querySelectorAll(".detail .token")].map((one) => {
        const { color, backgroundColor } = getComputedStyle(one);
        return [light(color), light(backgroundColor)].sort((a, b) => b - a);
      });
      return [Math.min(...all.map(([high, low]) => high / low)), all.length];
    }""")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_are_coloured_by_what_is_known_of_them(make_run, open_page, keep_trajectories, scheme):
    folder = make_run(samples=[])
    numbers = {"logprobs": [0, -1, -5, -20, -2, -3, -4], "advantages": [-9, -2, -1, 0, 1, 2, 9]}
    versions = [[version, 1] for version in range(7)]
    pieces = ["a", EVIL, "", "é", " b", "\n", "𝄞"]
    keep_trajectories(folder, 2, ["".join(pieces)], turns=[spoken(pieces, versions=versions) | numbers])
    page = open_page(write_report([folder]), scheme=scheme)
    rows_of(page)
    assert page.locator(".token").count() == 0
    choice = page.get_by_label("Colour tokens by")
    assert choice.locator("option").all_inner_texts() == ["none", "log-prob", "advantage", "version"]
    shades = {}
    for by in ("logprob", "advantage", "version"):
        choice.focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "by => document.querySelector('.scale').textContent.startsWith(by)",
            arg={"logprob": "log-prob"}.get(by, by),
        )
        tokens = page.locator("pre.completion .token")
        assert tokens.all_text_contents() == pieces, "text, never markup"
        assert page.locator("pre.completion").text_content() == "".join(pieces)
        least, count = contrast(page)
        assert (least >= 4.5, count > 7) == (True, True), (by, least)
        shades[by] = tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
        found = (
            Axe().run(page, options={"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa"]}}).response
        )
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    assert tokens.nth(1).get_attribute("title") == "log-prob -1 · advantage -2 · version 1"
    assert len(set(shades["logprob"])) == 6, "the two that are rarer than the scale goes are alike"
    assert len(set(shades["advantage"])) == 5
    assert len(set(shades["version"])) == 6
    assert page.title() == "run · Offbeat"
    choice.select_option("")
    page.wait_for_function("!document.querySelector('pre.completion .token')")
    assert page.locator("pre.completion").text_content() == "".join(pieces)


def test_what_is_not_known_of_tokens_is_said(make_run, open_page, keep_trajectories):
    folder = make_run()
    keep_trajectories(folder, 5, ["one two"], turns=[spoken(["one", " two"])])
    keep_trajectories(folder, 6, ["other"], turns=[spoken(["another", " text"])])
    page = open_page(write_report([folder]))
    assert rows_of(page) == ["prompt a fine", "prompt a wrong", "prompt u0 one two", "prompt u0 other"]
    page.get_by_label("Colour tokens by").select_option("advantage")
    page.locator(".row").nth(2).click()
    page.wait_for_selector("text=Of this completion no advantage was kept.")
    page.locator(".row").first.click()
    page.wait_for_selector("text=Of this completion the text alone is in the report.")
    page.get_by_label("Colour tokens by").select_option("logprob")
    page.locator(".row").nth(3).click()
    page.wait_for_selector(".scale .token")
    assert page.locator("pre.completion").text_content() == "other", (
        "the text is always that of the completion"
    )
    assert page.locator("pre.completion .token").count() == 0


def test_where_no_token_is_known_there_is_no_choice_of_colours(make_run, open_page):
    page = open_page(write_report([make_run()]))
    rows_of(page)
    assert page.get_by_label("Colour tokens by").count() == 0


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
