// An item → its nearest items by the model's item vectors.

import { latest, similarItems, superseded } from "./api.js";
import { detailHead } from "./detail-head.js";
import { element, iconButton } from "./dom.js";
import { brief, decimal, nameOf } from "./format.js";
import { problemCard } from "./problem.js";
import { scoreBar } from "./bars.js";
import { modelToSend, showDetail, state } from "./state.js";
import { storeTitles, titleOf } from "./titles.js";

const SHOWN = 10;

/** `redraw` is called when there is something new to draw; `take` gets an item that was clicked. */
export function similarView(redraw, take) {
  let neighbours = null;
  let problem = null;

  async function ask() {
    const signal = latest("similar");
    const { id, model } = state.detail;
    neighbours = problem = null;
    try {
      const answer = await similarItems(id, { k: SHOWN, model: modelToSend(model) }, signal);
      if (signal.aborted) return;
      storeTitles(answer.items);
      neighbours = answer.items;
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
    else if (neighbours === null) yield element("p", { class: "hint", text: "Loading …" });
    else
      yield element(
        "ol",
        { class: "answers similar", "aria-label": `Items similar to ${brief(name)}` },
        ...neighbours.map((item, index) => row(item, index, model)),
      );
    yield element("p", {
      class: "hint",
      text: "The score is the cosine similarity of the item vectors.",
    });
  }

  const row = (item, index, model) =>
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
          "data-focus": `similar ${index}`,
          on: { click: () => take(item) },
        },
        element("span", { class: "rank", text: String(index + 1) }),
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
          "data-focus": `near ${index}`,
        },
      ),
    );

  return { ask, draw };
}
