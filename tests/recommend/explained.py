"""Explanations from given contributions, and a parser of their HTML page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from segue.recommend.answer import Contribution, Explanation, ScoredItem

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a&amp;b",
    "</style>",
    "two\nlines",
    "\u202eabc",
]


def values(explanation: Explanation) -> list[float | None]:
    return [entry.contribution for entry in explanation.contributions]


def explanation_of(contributions: list[Contribution], **further: Any) -> Explanation:
    facts: dict[str, Any] = {"item": ScoredItem("x", None, 1.25), "rank": 2, "contributions": contributions} | further
    return Explanation(**facts)


class Page(HTMLParser):
    """Elements of a page, and the text of those that hold users' input."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.written: list[str] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href", "srcset", "action")]
        self._open.append(tag)
        if tag == "bdi":
            self.written.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "bdi":
            self.written[-1] += data
        if self._open and self._open[-1] == "title":
            self.titles.append(data)
