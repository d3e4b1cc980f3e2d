// An item → its nearest items by the model's own vectors, each of which can be added or asked about in turn.

import { latest, similarItems, superseded } from "./api.js";
import { detailHead } from "./detail-head.js";
import { element, iconButton } from "./dom.js";
import { brief, decimal, nameOf } from "./format.js";
import { problemCard } from "./problem.js";
import { scoreBar } from "./score-bar.js";
import { modelToSend, showDetail, state } from "./state.js";
import { meet, titleOf } from "./titles.js";

const SHOWN = 10;

/** `redraw` is called when there is something new to draw; `take` gets an item that was clicked. */
export function similarView(redraw, take) {
  let found = null;
  let problem = null;

  async function ask() {
    const signal = latest("similar");
    const { id, model } = state.detail;
    found = problem = null;
    try {
      const answer = await similarItems(id, { k: SHOWN, model: modelToSend(model) }, signal);
      if (signal.aborted) return;
      meet(answer.items);
      found = answer.items;
    } catch (error) {
      if (superseded(error)) return;
      problem = error;
    }
    if (state.detail?.kind === "similar") redraw();
  }

  function* draw() {
    const { id, model } = state.detail;
    const name = titleOf(id) ?? id;
    yield detailHead("Similar to", name, [element("bdi", { class: "id", text: id })]);
    if (problem !== null) yield problemCard(problem, ask);
    else if (found === null) yield element("p", { class: "hint", text: "Looking …" });
    else
      yield element(
        "ol",
        { class: "answers similar", "aria-label": `Items similar to ${brief(name)}` },
        ...found.map((item, place) => row(item, place, model)),
      );
    yield element("p", {
      class: "hint",
      text: "The number is the cosine between the items’ vectors: 1 is the same direction.",
    });
  }

  const row = (item, place, model) =>
    element(
      "li",
      { class: "answer" },
      element(
        "button",
        {
          type: "button",
          class: "answer-main",
          "aria-label": `${nameOf(item)}. Add to the history`,
          title: "Add to the history",
          "data-focus": `similar ${place}`,
          on: { click: () => take(item) },
        },
        element("span", { class: "rank", text: String(place + 1) }),
        element(
          "span",
          { class: "answer-text" },
          element("bdi", { class: "answer-title", text: nameOf(item) }),
          element("span", { class: "meta" }, item.title ? element("bdi", { class: "id", text: item.id }) : null),
        ),
        scoreBar(decimal(item.score), Math.max(0, Math.min(1, item.score))),
      ),
      iconButton(
        "near",
        `Items similar to ${brief(nameOf(item))}`,
        () => showDetail({ kind: "similar", model, id: item.id }),
        {
          "data-focus": `near ${place}`,
        },
      ),
    );

  return { ask, draw };
}
