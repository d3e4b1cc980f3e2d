"""A visitor's actions on the page and what it then shows. Errors of the browser are collected."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, expect

PATIENCE = 20_000  # milliseconds: a machine may be busy with other tests
NOT_LOADED = "Failed to load resource"  # the browser's own line for any answer that is not a success

expect.set_options(timeout=PATIENCE)


class Visit:
    """One tab."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.url = url
        self.complaints: list[str] = []
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _listen(self, message: ConsoleMessage) -> None:
        """Violations of the content policy arrive here too."""
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def excuse_failed_requests(self) -> None:
        """Drop the browser's errors for requests that the test made fail."""
        self.complaints = [text for text in self.complaints if not text.startswith(NOT_LOADED)]

    def open(self, address: str = "/") -> None:
        """Open an address and wait for answers."""
        self.page.goto(self.url + address)
        expect(self.answers.first).to_be_visible()

    @property
    def answers(self) -> Locator:
        return self.page.locator("#answers .answer-title")

    @property
    def history(self) -> Locator:
        """Titles, newest first."""
        return self.page.locator("#history .entry-title")

    @property
    def detail(self) -> Locator:
        return self.page.locator("#detail-panel")

    def add(self, text: str) -> None:
        """Search for an item and take the first match."""
        self.page.get_by_role("combobox", name="Search the catalogue").fill(text)
        expect(self.page.locator("#matches [aria-selected=true]")).to_be_visible()
        self.page.keyboard.press("Enter")

    def press(self, name: str, *, within: Locator | None = None) -> None:
        """Press the button of this name."""
        (within or self.page).get_by_role("button", name=name, exact=True).click()

    def choose(self, group: str, name: str) -> None:
        """Choose one of a group of options."""
        self.page.get_by_role("group", name=group).get_by_role("radio", name=name, exact=True).check()

    def ask_why(self, rank: int) -> None:
        """Open the explanation of the answer at this rank, counted from 0."""
        self.page.locator("#answers .why-button").nth(rank).click()
        expect(self.detail.get_by_role("heading", name="What each item contributed")).to_be_visible()

    def open_user(self, user: str) -> None:
        self.page.get_by_label("or open a user").fill(user)
        self.press("Open")

    def sees_answers(self, answer: dict[str, Any]) -> None:
        """Exactly the items of an answer of the service, in its order."""
        expect(self.answers).to_have_text([item["title"] or item["id"] for item in answer["items"]])

    def fits(self) -> bool:
        """Whether nothing overflows to the side."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
