"""The page in a real browser, on the real service."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser import launch_browser
from page_visit import Visit
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from small_service import guarded, on_a_socket, small_service, tiny_recommender

from segue.recommend.recommender import Recommender
from segue.serving.http.keys import Keys
from segue.serving.http.server import fill_histories

HACK = "window.hacked = true"
TAG = f'<img src=x onerror="{HACK}">'
SLASHES = "a/b?c=1#d%2F"
STRANGE = {
    3: (TAG, f"</script><script>{HACK}</script> kettle"),
    4: (SLASHES, "Tea & <b>strainer</b>"),
    5: ("☕🫖", "Mug"),
}
ITEMS = [STRANGE.get(number, (f"t{number:02}", f"Teapot number {number}")) for number in range(24)]
TITLES = dict(ITEMS)
READER, WRITER = "a-key-to-read-with", "a-key-to-write-with"
QUICK = ("model.heads=2", "model.depth=2", "model.length=30", "train.epochs=4")


def title(number: int) -> str:
    return ITEMS[number][1]


def address(*numbers: int) -> str:
    return f"/#history={quote(json.dumps([ITEMS[number][0] for number in numbers]))}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a shop whose users follow one cycle of items, with a catalogue."""
    from segue.api import prepare

    folder = tmp_path_factory.mktemp("shop")
    with (folder / "log.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "timestamp"])
        for user in range(72):
            for step in range(12):
                rows.writerow(
                    [f"u{user:02}", ITEMS[(5 * user + step) % 24][0], 1_600_000_000 + 97 * user + 3600 * step]
                )
    with (folder / "items.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["item", "title", "room"])
        rows.writerows([*item, "kitchen" if number % 2 else "garden"] for number, item in enumerate(ITEMS))
    prepare(folder / "log.csv", out=folder / "data", items=folder / "items.csv")
    return folder / "data"


@pytest.fixture(scope="module")
def runs(shop: Path, quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs on the shop, first and second."""
    from segue.api import train

    folder = tmp_path_factory.mktemp("runs")
    train(shop, out=folder / "first", recipe=quick_recipe, overrides=QUICK)
    train(shop, out=folder / "second", recipe=quick_recipe, overrides=("train.epochs=1", "train.seed=2"))
    return folder


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service, and a client for expected answers."""

    url: str
    client: httpx.Client

    def answer(self, history: list[Any], **more: Any) -> dict[str, Any]:
        return self._json(self.client.post("/recommendations", json={"history": history, **more}))

    def explain(self, history: list[Any], item: str) -> dict[str, Any]:
        return self._json(self.client.post("/explanations", json={"history": history, "item": item}))

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._json(self.client.get(path, params=query))

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


def ids(*numbers: int) -> list[str]:
    return [ITEMS[number][0] for number in numbers]


@pytest.fixture(scope="module")
def service(runs: Path, shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with one model, without keys, with the log's users."""
    store = tmp_path_factory.mktemp("service") / "events.db"
    fill_histories(str(store), shop)
    app = guarded(small_service(store, Recommender.open(runs / "first"), runs=runs))
    with on_a_socket(app) as url, httpx.Client(base_url=url) as client:
        yield RunningService(url, client)


@pytest.fixture(scope="module")
def service_with_keys(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with two models, first and second, and with keys."""
    models = [Recommender.open(runs / name) for name in ("first", "second")]
    service = small_service(tmp_path_factory.mktemp("closed") / "events.db", *models)
    app = guarded(service, keys=Keys({"read": [READER], "write": [WRITER]}))
    with on_a_socket(app) as url, httpx.Client(base_url=url, headers={"authorization": f"Bearer {READER}"}) as client:
        yield RunningService(url, client)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = launch_browser(playwright)
        yield chromium
        chromium.close()


def open_visit(browser: Browser, url: str, **settings: Any) -> Iterator[Visit]:
    """A page; the test fails if the browser logs an error."""
    context = browser.new_context(
        **{"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce", "color_scheme": "light", **settings}
    )
    visit = Visit(context, url)
    yield visit
    script_result = visit.page.evaluate("window.hacked")
    context.close()
    assert visit.complaints == []
    assert script_result is None


@pytest.fixture
def visit(browser: Browser, service: RunningService) -> Iterator[Visit]:
    yield from open_visit(browser, service.url)


@pytest.fixture
def visit_with_keys(browser: Browser, service_with_keys: RunningService) -> Iterator[Visit]:
    yield from open_visit(browser, service_with_keys.url)


@pytest.fixture(scope="module")
def planner() -> Recommender:
    """An untrained model that plans."""
    return tiny_recommender([name for name, _ in ITEMS], plans=True, title=[title for _, title in ITEMS])


@pytest.fixture
def visit_of_planner(browser: Browser, planner: Recommender, tmp_path: Path) -> Iterator[Visit]:
    with on_a_socket(guarded(small_service(tmp_path / "events.db", planner))) as url:
        yield from open_visit(browser, url)


@pytest.fixture
def dark_visit(browser: Browser, service: RunningService) -> Iterator[Visit]:
    yield from open_visit(browser, service.url, color_scheme="dark")


@pytest.fixture
def narrow_visit(browser: Browser, service: RunningService) -> Iterator[Visit]:
    yield from open_visit(browser, service.url, viewport={"width": 390, "height": 844}, has_touch=True)


def moves(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The expected text of each item's change of rank between two answers."""
    ranks = {item["id"]: rank for rank, item in enumerate(before["items"])}
    texts = []
    for rank, item in enumerate(after["items"]):
        rise = None if item["id"] not in ranks else ranks[item["id"]] - rank
        texts.append("new" if rise is None else f"▲{rise}" if rise > 0 else f"▼{-rise}" if rise < 0 else "")
    return texts


def test_every_click_extends_the_history_and_changes_the_answers(visit: Visit, service: RunningService) -> None:
    visit.open()
    expect(visit.page.locator(".notice")).to_contain_text("Popular items")
    visit.sees_answers(service.answer([]))
    visit.add("number 8")
    visit.sees_answers(service.answer(ids(8)))
    visit.add("t09")
    before = service.answer(ids(8, 9))
    visit.sees_answers(before)
    expect(visit.page.locator(".notice")).to_have_count(0)
    expect(visit.answers).to_have_count(10)
    item = before["items"][0]
    visit.page.locator("#answers .answer-main").first.click()
    after = service.answer([*ids(8, 9), item["id"]])
    assert [item["id"] for item in after["items"]] != [item["id"] for item in before["items"]]
    visit.sees_answers(after)
    expect(visit.page.locator("#answers .move")).to_have_text(moves(before, after))
    expect(visit.history).to_have_text([item["title"], title(9), title(8)])


def displayed_contributions(visit: Visit) -> list[float]:
    """Contributions on the history, the newest first."""
    texts = visit.page.locator("#history .contribution-value").all_inner_texts()
    return [float(text.replace("−", "-").replace("±", "")) for text in texts]


def test_why_is_drawn_on_the_history_with_a_choice_of_heads(visit: Visit, service: RunningService) -> None:
    visit.open(address(7, 8, 9))
    visit.ask_why(1)
    item = service.answer(ids(7, 8, 9))["items"][1]
    explanation = service.explain(ids(7, 8, 9), item["id"])
    expect(visit.detail.get_by_role("heading", level=1)).to_have_text(item["title"])
    displayed = displayed_contributions(visit)
    expected = [entry["contribution"] for entry in reversed(explanation["contributions"])]
    assert displayed == pytest.approx(expected, rel=0.01, abs=0.001)
    bars = visit.page.locator("#history .signed-bar .fill")
    assert [("against" in (bar.get_attribute("class") or "")) for bar in bars.all()] == [
        value < 0 for value in expected
    ]

    weights = [layer["weights"] for layer in explanation["attention"]]
    assert (len(weights), len(weights[0])) == (2, 2)
    sentences = set()
    for layer in range(2):
        for head in range(2):
            visit.choose("Layer", str(layer + 1))
            visit.choose("Head", str(head + 1))
            last = weights[layer][head][-1]
            top = max(range(3), key=last.__getitem__)
            sentence = f"In layer {layer + 1}, head {head + 1}, the answer attends most to {top + 1} “{title(7 + top)}”"
            expect(visit.page.locator("#gist")).to_contain_text(f"{sentence} ({last[top]:.3f})")
            sentences.add(visit.page.locator("#gist").inner_text())
    assert len(sentences) == 4
    visit.page.locator("canvas").hover(position={"x": 30, "y": 30})
    expect(visit.page.locator("#cell")).to_contain_text(f"1 “{title(7)}” attends to 1 “{title(7)}”: 1.00")


def change_response(visit: Visit, path: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the service's responses to the page."""

    def fulfil(route: Route) -> None:
        body = route.fetch().json()
        change(body)
        route.fulfill(json=body)

    visit.page.route(path, fulfil)


def test_why_shows_in_words_what_the_counts_add(visit: Visit) -> None:
    """The six largest of seven, and names as text."""

    def count(item: str, title: str | None, score: float, sentence: str, kind: str = "followed") -> dict[str, Any]:
        fields = {"item": item, "title": title, "kind": kind, "distance": 1, "count": 2, "score": score}
        return fields | {"sentence": sentence}

    counts = [
        count("t07", f"“{TAG}” “", 1.5, f"followed ““{TAG}” “” 37 times"),
        count(TAG, None, -0.75, f"2 users have it near “{TAG}”", "together"),
        count("t09", None, 0.5, "3 times in this history, last 2 events ago", "repeated"),
        *[count("t08", None, 0.25, "followed “t08” 2 times")] * 4,
    ]
    change_response(
        visit,
        "**/explanations",
        lambda body: body.update(counts=counts, counts_score=2.25, item=body["item"] | {"score": 9.0}),
    )
    visit.open(address(7, 8, 9))
    visit.ask_why(0)
    expect(visit.detail.locator(".count-sentence")).to_have_text([one["sentence"] for one in counts[:6]])
    expect(visit.detail.locator(".count-sentence bdi")).to_have_text([f"“{TAG}” “", TAG, *["t08"] * 3])
    expect(visit.detail.locator(".counts .contribution-value")).to_have_text(
        ["+1.50", "−0.750", "+0.500", *["+0.250"] * 3]
    )
    expect(visit.detail.locator(".counts + .hint")).to_have_text(
        "Of the score, 6.75 is the model’s; counts of the training log add +2.25. 1 smaller one is not shown."
    )
    assert visit.fits()


def test_why_does_not_name_counts_that_the_run_does_not_have(visit: Visit) -> None:
    visit.open(address(7, 8, 9))
    visit.ask_why(0)
    expect(visit.detail.get_by_role("heading", name="What the counts add")).to_have_count(0)


def test_attention_of_every_shape_is_drawn(visit: Visit) -> None:
    """A layer of an encoder, then a decoder step, with negative weights in one head."""
    entries = [0, 1, 2]
    square = {"name": "layer 1", "rows": entries, "columns": entries, "weights": [[[1, 0, 0], [1, 0, 0], [0, 1, 0]]]}
    heads = [[[0.25, 0.75, 0]], [[-0.5, 0, 0.25]]]
    step = {"name": "decoder, at the history", "rows": [None], "columns": entries, "weights": heads}
    change_response(visit, "**/explanations", lambda body: body.update(attention=[square, step]))
    visit.open(address(7, 8, 9))
    visit.ask_why(0)
    sentence, cell, canvas = (visit.page.locator(name) for name in ("#gist", "#cell", "canvas"))
    expect(sentence).to_have_text(
        f"In decoder, at the history, mean of the heads, the answer attends most to 2 “{title(8)}” (0.375), "
        f"1 “{title(7)}” (-0.125), and 3 “{title(9)}” (0.125)."
    )
    visit.choose("Head", "2")
    expect(sentence).to_have_text(
        f"In decoder, at the history, head 2, the answer attends most to 1 “{title(7)}” (-0.500) "
        f"and 3 “{title(9)}” (0.250)."
    )
    expect(visit.page.locator(".legend")).to_have_text("-0.50000.500")
    canvas.hover(position={"x": 30, "y": 30})
    expect(cell).to_have_text(f"? “the query” attends to 1 “{title(7)}”: -0.500")
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        visit.page.keyboard.press(key)
    expect(cell).to_have_text(f"? “the query” attends to 3 “{title(9)}”: 0.250")
    below, above = canvas.evaluate(
        """canvas => {
          const scale = devicePixelRatio || 1;
          const { data } = canvas.getContext("2d").getImageData(0, 34 * scale, canvas.width, 1);
          const middles = [0, 2].map(key => 4 * Math.round((26 + 34 * (key + 0.5)) * scale));
          return middles.map(at => [...data.slice(at, at + 3)]);
        }"""
    )
    assert below[0] > below[2] and above[2] > above[0], "negative weights are reddish, others bluish"
    visit.choose("Layer", "1")
    expect(sentence).to_have_text(f"In layer 1, head 1, 3 “{title(9)}” attends most to 2 “{title(8)}” (1.00).")
    canvas.hover(position={"x": 30, "y": 30 + 34})
    expect(cell).to_have_text(f"2 “{title(8)}” attends to 1 “{title(7)}”: 1.00")


def test_steps_of_a_plan_are_drawn_with_their_items(visit_of_planner: Visit, planner: Recommender) -> None:
    """The query is the first step, which attends to itself alone."""
    visit_of_planner.open(address(7, 8, 9))
    visit_of_planner.ask_why(0)
    explanation = planner.explain(ids(7, 8, 9), planner.recommend(ids(7, 8, 9)).ids[0])
    sentence, cell, canvas = (visit_of_planner.page.locator(name) for name in ("#gist", "#cell", "canvas"))
    ((weights, *_),) = explanation.attention[-1].weights  # of one head
    strongest = max(range(3), key=weights.__getitem__)
    expect(sentence).to_contain_text(
        f"the answer attends most to {strongest + 1} “{title(7 + strongest)}” ({weights[strongest]:.3f})"
    )
    canvas.focus()
    visit_of_planner.page.keyboard.press("ArrowUp")
    names = [f"step {step}: {item.title}" for step, item in enumerate(explanation.plan, start=1)]
    expect(cell).to_contain_text(f"?4 “{names[3]}” attends to 3 “{title(9)}”: ")
    visit_of_planner.choose("Layer", explanation.attention[-2].name)
    expect(sentence).to_contain_text(f"the answer attends most to ?1 “{names[0]}” (1.00).")


def test_a_model_without_attention(visit: Visit) -> None:
    change_response(visit, "**/model", lambda body: body["models"][0].update(attention=False))
    change_response(visit, "**/explanations", lambda body: body.update(attention=[]))
    visit.open(address(7, 8, 9))
    visit.ask_why(0)
    expect(visit.detail).to_contain_text("This model has no attention to show.")
    expect(visit.page.locator("canvas")).to_have_count(0)


def test_items_are_removed_and_moved_in_the_history(visit: Visit, service: RunningService) -> None:
    visit.open(address(7, 8, 9, 15))
    visit.ask_why(0)
    explained_title = visit.detail.get_by_role("heading", level=1).inner_text()
    visit.page.locator("#history .entry").nth(1).hover()
    visit.press(f"Remove {title(9)}")
    visit.sees_answers(service.answer(ids(7, 8, 15)))
    expect(visit.page.locator("#history .contribution")).to_have_count(3)
    expect(visit.detail.get_by_role("heading", level=1)).to_have_text(explained_title)
    visit.press("Undo")
    visit.sees_answers(service.answer(ids(7, 8, 9, 15)))

    visit.press(f"Move {title(15)} down, to older")
    visit.sees_answers(service.answer(ids(7, 8, 15, 9)))
    visit.page.keyboard.press("Alt+ArrowDown")  # the pressed button still has the focus
    visit.sees_answers(service.answer(ids(7, 15, 8, 9)))
    entries = visit.page.locator("#history .entry")
    entries.nth(3).drag_to(entries.nth(0))
    expect(visit.history).to_have_text([title(number) for number in (7, 9, 8, 15)])
    visit.sees_answers(service.answer(ids(15, 8, 9, 7)))
    visit.page.keyboard.press("Control+z")
    expect(visit.history).to_have_text([title(number) for number in (9, 8, 15, 7)])


def test_a_reload_and_a_link_show_the_same(visit: Visit, service: RunningService, browser: Browser) -> None:
    visit.open(address(3, 4, 5))
    visit.page.get_by_label("How many answers").select_option("5")
    visit.page.get_by_role("switch", name="Keep seen items").check()
    expected = service.answer(ids(3, 4, 5), k=5, keep_seen=True)
    visit.sees_answers(expected)
    visit.ask_why(2)
    for other in (visit.page, browser.new_page()):
        if other is visit.page:
            other.reload()
        else:
            other.goto(visit.page.url)
        expect(other.locator("#history .entry-title")).to_have_text([title(5), title(4), title(3)])
        expect(other.locator("#answers .answer-title")).to_have_text([item["title"] for item in expected["items"]])
        expect(other.locator("#detail-title")).to_have_text(expected["items"][2]["title"])
        expect(other.locator("#history .contribution")).to_have_count(3)
        if other is not visit.page:
            other.close()


def test_an_unreachable_service_can_be_retried(visit: Visit) -> None:
    visit.open(address(7, 8))
    visit.page.context.set_offline(True)
    visit.page.locator("#answers .answer-main").first.click()
    expect(visit.page.get_by_role("alert")).to_contain_text("The service does not answer")
    expect(visit.history).to_have_count(3)  # the history is in the browser and stays
    visit.page.context.set_offline(False)
    visit.press("Try again")
    expect(visit.answers).to_have_count(10)
    expect(visit.page.get_by_role("alert")).to_have_count(0)
    visit.excuse_failed_requests()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (503, "The service is busy"),
        (429, "Too many requests"),
        (403, "does not allow that"),
    ],
)
def test_errors_are_shown_and_can_be_retried(visit: Visit, status: int, words: str) -> None:
    visit.open(address(7))
    body = json.dumps({"title": "No", "status": status, "detail": "The reason <b>in full</b>."})

    def refuse(route: Route) -> None:
        route.fulfill(
            status=status, body=body, headers={"retry-after": "2", "content-type": "application/problem+json"}
        )

    visit.page.route("**/recommendations", refuse)
    visit.add("t10")
    alert = visit.page.get_by_role("alert")
    expect(alert).to_contain_text(words)
    expect(alert).to_contain_text("The reason <b>in full</b>. Wait 2 s.")
    visit.page.unroute("**/recommendations")
    visit.press("Try again")
    expect(visit.answers).to_have_count(10)
    visit.excuse_failed_requests()


def test_a_failed_start_can_be_retried(visit: Visit) -> None:
    visit.page.route("**/model", lambda route: route.abort())
    visit.page.goto(visit.url + address(7))
    expect(visit.page.get_by_role("alert")).to_contain_text("The service does not answer")
    visit.page.unroute("**/model")
    visit.press("Try again")
    expect(visit.answers).to_have_count(10)
    expect(visit.history).to_have_text([title(7)])
    visit.excuse_failed_requests()


def test_a_late_answer_is_dropped(visit: Visit, service: RunningService) -> None:
    visit.open()
    held_routes: list[Route] = []
    visit.page.route(
        "**/recommendations", lambda route: route.continue_() if held_routes else held_routes.append(route)
    )
    visit.add("t08")
    expect(visit.page.locator("[aria-busy=true]")).to_have_count(1)
    visit.add("t09")
    expected = service.answer(ids(8, 9))
    visit.sees_answers(expected)
    late_answer = service.answer(ids(8))
    assert late_answer["items"] != expected["items"]
    held_routes[0].fulfill(json=late_answer)
    visit.page.wait_for_timeout(100)
    visit.sees_answers(expected)


def test_hostile_ids_and_titles_are_text(visit: Visit, service: RunningService) -> None:
    visit.open()
    for number in (3, 4, 5):
        visit.add(ITEMS[number][0])
    expect(visit.history).to_have_text([title(5), title(4), title(3)])
    expect(visit.page.locator("#history .id")).to_have_text([ITEMS[number][0] for number in (5, 4, 3)])
    visit.sees_answers(service.answer(ids(3, 4, 5)))
    visit.ask_why(0)
    for number in (3, 4):
        visit.page.locator("#history .entry").nth(5 - number).get_by_role("button", name="Items similar to").click()
        expected = service.get(f"/items/{quote(ITEMS[number][0], safe='')}/similar")
        expect(visit.detail.locator(".answer-title")).to_have_text([item["title"] for item in expected["items"]])
    visit.page.goto(f"{visit.url}/#history={quote(json.dumps([TAG + 'x', '../..', 'no such item']))}")
    expect(visit.history).to_have_text(["no such item", "../..", TAG + "x"])
    expect(visit.page.locator("#history .badge")).to_have_text(["unknown to the model"] * 3)
    expect(visit.page.locator(".notice")).to_contain_text("Popular items")
    visit.open_user(TAG)
    expect(visit.page.locator(".user-name")).to_have_text(f"User {TAG}")


def test_clicks_of_a_known_user_are_recorded_on_request(visit: Visit, service: RunningService) -> None:
    visit.open()
    visit.open_user("u01")
    events = service.get("/users/u01/history")["events"]
    expect(visit.history).to_have_text([event["title"] for event in reversed(events)])
    visit.sees_answers(service.get("/users/u01/recommendations"))
    record = visit.page.get_by_role("switch", name="Record clicks")
    expect(record).not_to_be_checked()
    visit.page.locator("#answers .answer-main").first.click()
    expect(visit.page.locator(".user-name")).to_have_text("User u01what if")
    assert service.get("/users/u01/history")["events"] == events  # nothing was recorded

    visit.press("Back to their history")
    record.check()
    before = service.get("/users/u01/recommendations")
    visit.sees_answers(before)
    visit.page.locator("#answers .answer-main").first.click()
    expect(visit.history.first).to_have_text(before["items"][0]["title"])
    visit.sees_answers(service.get("/users/u01/recommendations"))
    new_events = service.get("/users/u01/history")["events"]
    assert [event["item"] for event in new_events] == [*(event["item"] for event in events), before["items"][0]["id"]]
    visit.page.reload()
    expect(visit.history).to_have_count(len(new_events))


def test_why_is_of_the_whole_history_though_only_its_newest_part_is_shown(
    visit: Visit, service: RunningService
) -> None:
    """An item seen long ago is no answer, and must not take a rank in an explanation."""
    old, recent = ids(*range(12)), ids(*(12 + number % 3 for number in range(100)))
    events = [{"user": "faithful", "item": item} for item in (*old, *recent)]
    assert service.client.post("/events", json={"events": events}).status_code < 300
    visit.open()
    visit.open_user("faithful")
    expect(visit.history).to_have_count(100)
    answers = service.get("/users/faithful/recommendations")
    visit.sees_answers(answers)
    with visit.page.expect_request("**/explanations") as request:
        visit.ask_why(0)
    first = answers["items"][0]
    assert request.value.post_data_json == {"user": "faithful", "item": first["id"]}
    explanation = service.client.post("/explanations", json=request.value.post_data_json).json()
    assert (explanation["rank"], len(explanation["contributions"])) == (1, 112)
    expect(visit.detail).to_contain_text("rank 1")
    displayed = displayed_contributions(visit)
    expected = [entry["contribution"] for entry in reversed(explanation["contributions"][12:])]
    assert displayed == pytest.approx([value for value in expected if value is not None], rel=0.01, abs=0.001)
    assert len(displayed) > 1
    newest = visit.detail.locator(".contributions .position").all_inner_texts()
    assert {int(position) for position in newest} <= set(range(100 - len(displayed) + 1, 101))


def test_a_user_without_a_history_gets_popular_items(visit: Visit, service: RunningService) -> None:
    visit.open()
    visit.open_user("nobody yet")
    expect(visit.page.locator("#history-empty")).to_contain_text("no event of this user")
    expect(visit.page.locator(".notice")).to_contain_text("Popular items")
    visit.sees_answers(service.get("/users/nobody%20yet/recommendations"))


def test_a_key_is_requested_and_two_models_are_side_by_side(
    visit_with_keys: Visit, service_with_keys: RunningService
) -> None:
    visit = visit_with_keys
    visit.page.goto(visit.url + address(7, 8))
    visit.press("Not now")
    expect(visit.page.get_by_role("alert")).to_contain_text("A key is needed")
    visit.press("Enter a key")
    visit.page.get_by_label("Key", exact=True).fill("a-key-that-is-wrong")
    visit.press("Use this key")
    expect(visit.page.get_by_role("dialog")).to_contain_text("did not accept")
    visit.page.get_by_label("Key", exact=True).fill(READER)
    visit.page.keyboard.press("Enter")
    columns = visit.page.locator(".answer-column")
    expect(columns).to_have_count(2)
    answers = {name: service_with_keys.answer(ids(7, 8), model=name) for name in ("first", "second")}
    assert answers["first"]["items"] != answers["second"]["items"]
    for index, (name, answer) in enumerate(answers.items()):
        expect(columns.nth(index).locator(".column-title")).to_have_text(name)
        expect(columns.nth(index).locator(".answer-title")).to_have_text([item["title"] for item in answer["items"]])
    shared = {item["id"] for item in answers["first"]["items"]} & {item["id"] for item in answers["second"]["items"]}
    expect(columns.first.locator(".answer-status")).to_contain_text(f"{len(shared)} in both")
    visit.choose("Model", "second")
    visit.sees_answers(answers["second"])
    visit.page.reload()  # the tab keeps the key
    visit.sees_answers(answers["second"])
    visit.excuse_failed_requests()


def test_a_readers_key_records_nothing(visit_with_keys: Visit, service_with_keys: RunningService) -> None:
    visit = visit_with_keys
    visit.page.add_init_script(f"sessionStorage.setItem('segue-key', '{READER}')")
    visit.open("/#user=ann&model=first")
    visit.page.get_by_role("switch", name="Record clicks").check()
    visit.page.locator("#answers .answer-main").first.click()
    alert = visit.page.get_by_role("alert")
    expect(alert).to_contain_text("This key does not allow that")
    expect(alert.get_by_role("button", name="Use another key")).to_be_visible()
    assert service_with_keys.get("/users/ann/history")["events"] == []
    visit.excuse_failed_requests()


def brightness(page: Page) -> float:
    """Brightness of the background, from 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
    return sum(map(float, colour.strip("rgb()").split(",")[:3])) / 3


def test_the_theme_follows_the_system_unless_selected(dark_visit: Visit) -> None:
    dark_visit.open()
    assert brightness(dark_visit.page) < 60
    dark_visit.press("Use the light theme")
    assert brightness(dark_visit.page) > 200
    dark_visit.page.reload()
    assert brightness(dark_visit.page) > 200


def test_everything_by_keyboard(visit: Visit, service: RunningService) -> None:
    visit.open()
    keys = visit.page.keyboard
    keys.press("/")
    keys.type("teapot")
    options = visit.page.get_by_role("option")
    expect(options.first).to_have_attribute("aria-selected", "true")
    keys.press("ArrowDown")
    selected_title = options.nth(1).locator(".match-title").inner_text()
    expect(visit.page.locator("#search")).to_have_attribute("aria-activedescendant", "match-1")
    keys.press("Enter")
    expect(visit.history).to_have_text([selected_title])
    number = ITEMS.index(next(item for item in ITEMS if item[1] == selected_title))
    expected = service.answer(ids(number))
    visit.sees_answers(expected)
    keys.type("zzz no such thing")
    expect(visit.page.locator("#matches-note")).to_contain_text("Nothing in the catalogue")
    keys.press("Escape")
    expect(visit.page.locator("#matches-box")).to_be_hidden()
    focused = visit.page.locator(":focus")
    for _ in range(40):
        keys.press("Tab")
        if "Why" in (focused.get_attribute("aria-label") or ""):
            break
    assert focused.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
    keys.press("Enter")
    expect(visit.detail.get_by_role("heading", level=1)).to_have_text(expected["items"][0]["title"])
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    keys.press("Enter")  # the answer itself, which extends the history
    expect(visit.history).to_have_text([expected["items"][0]["title"], selected_title])
    after = service.answer([ITEMS[number][0], expected["items"][0]["id"]])
    visit.sees_answers(after)
    first, move = after["items"][0]["title"], moves(expected, after)[0]
    expect(focused).to_have_attribute("aria-label", f"1. {first}{move_words(move)}. Add to the history")
    visit.page.locator("canvas").focus()
    keys.press("ArrowLeft")
    expect(visit.page.locator("#cell")).to_contain_text("2 “")
    expect(visit.page.locator("#cell")).to_contain_text(f"attends to 1 “{selected_title}”")


def move_words(move: str) -> str:
    """A change of rank for a screen reader."""
    return {"": "", "n": ", new", "▲": f", up {move[1:]}", "▼": f", down {move[1:]}"}[move[:1]]


def test_a_narrow_screen_needs_no_scrolling_to_the_side(narrow_visit: Visit) -> None:
    visit = narrow_visit
    visit.open(f"/#history={quote(json.dumps([*ids(3, 4, 5), 'an-id-without-any-break-' * 20]))}")
    assert visit.fits()
    visit.ask_why(0)
    assert visit.fits()
    expect(visit.detail).to_be_in_viewport()
    visit.press("About the model first")
    assert visit.fits()
    box = visit.page.get_by_role("dialog").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_the_page_follows_a_switch_to_another_run(visit: Visit, service: RunningService) -> None:
    visit.open(address(7))
    name = visit.page.locator("#model-name")
    expect(name).to_have_text("first")
    before = service.answer(ids(7, 8))
    assert service.client.put("/model", json={"run": "second"}).status_code == 200
    try:
        visit.add("t08")
        expect(name).to_have_text("second")
        after = service.answer(ids(7, 8))
        assert after["items"] != before["items"]
        visit.sees_answers(after)
    finally:
        assert service.client.post("/model/rollback").status_code == 200
    visit.press("Undo")
    expect(name).to_have_text("first")


def test_the_models_card(visit: Visit, service: RunningService) -> None:
    visit.open()
    visit.press("About the model first")
    card = visit.page.get_by_role("dialog")
    report = service.get("/model")["models"][0]["report"]
    own_row = card.locator("tr.own")
    expect(own_row).to_contain_text(f"{report['metrics']['ndcg@10']:.3f}")
    expect(own_row).to_contain_text("–".join(f"{bound:.3f}" for bound in report["intervals"]["ndcg@10"]))
    expect(card.locator(".bars th")).to_have_text(["this model", *report["baselines"]])
    expect(card.locator(".verdict p")).to_have_text(report["verdict"]["sentences"])
    card.get_by_label("Metric", exact=True).select_option("hit@5")
    expect(own_row).to_contain_text(f"{report['metrics']['hit@5']:.3f}")
    expect(card).to_contain_text(f"{report['cases']} cases of the test part; the last event of each user was held out.")
    expect(card).to_contain_text("Ties count against the model.")
    expect(card).to_contain_text("Seen items are excluded")
    visit.page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_filters_by_a_column_of_the_catalogue(visit: Visit, service: RunningService) -> None:
    visit.open(address(7, 8))
    held_routes: list[Route] = []
    visit.page.route("**/items?*", lambda route: held_routes.append(route))  # a function: Playwright marks it
    visit.press("Filter")
    visit.page.get_by_label("Value").fill("kitchen")
    for suggestions in held_routes:  # late suggestions must not replace the typed text
        suggestions.continue_()
    expect(visit.page.locator("#filter-values option").first).to_be_attached()
    visit.press("Add")
    expected = service.answer(ids(7, 8), where={"room": ["kitchen"]})
    assert {ITEMS.index((item["id"], item["title"])) % 2 for item in expected["items"]} == {1}
    visit.sees_answers(expected)
    visit.press("Remove the filter room: kitchen")
    visit.sees_answers(service.answer(ids(7, 8)))


def test_a_plan_is_next_to_the_answers_if_the_model_can_plan(visit_of_planner: Visit, planner: Recommender) -> None:
    visit_of_planner.open(address(7, 8))
    steps = visit_of_planner.page.locator("#plan .plan-name")

    def sees_plan(*numbers: int) -> list[str]:
        names = [item.title or item.id for item in planner.plan(ids(*numbers), 5).items]
        expect(steps).to_have_text(names)
        return names

    names = sees_plan(7, 8)
    visit_of_planner.page.locator("#plan .plan-step").nth(1).click()
    expect(visit_of_planner.history.first).to_have_text(names[1])
    sees_plan(7, 8, [name for _, name in ITEMS].index(names[1]))
    visit_of_planner.press("Clear")
    expect(visit_of_planner.page.locator("#plan")).to_contain_text("these are the most frequent items")


def test_no_plan_is_shown_if_the_model_cannot_plan(visit: Visit) -> None:
    visit.open(address(7, 8))
    expect(visit.page.locator("#plan")).to_be_hidden()


def test_the_api_is_documented_and_can_be_called(visit: Visit, service: RunningService) -> None:
    visit.page.goto(visit.url + "/schema")
    paths = service.get("/schema/openapi.json")["paths"]
    operations = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    displayed = visit.page.locator("summary")
    expect(displayed).to_have_count(len(operations))
    names = [f"{row.locator('.method').inner_text()} {row.locator('.path').inner_text()}" for row in displayed.all()]
    assert names == operations
    operation = visit.page.locator("details").nth(names.index("POST /recommendations"))
    operation.locator("summary").click()
    visit.press("Send", within=operation)
    expect(operation.locator("pre")).to_contain_text('"fallback": null')
