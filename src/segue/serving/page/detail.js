// The third column: why an item is recommended, or its similar items.

import { byId, element, redrawn } from "./dom.js";
import { on, state } from "./state.js";
import { similarView } from "./similar.js";
import { whyView } from "./why.js";

const NARROW = "(max-width: 60rem)"; // as in page.css: one column

/** `take` gets an item that was clicked. */
export function startDetail(take) {
  const views = { why: whyView(draw), similar: similarView(draw, take) };

  function draw() {
    const parent = byId("detail");
    const view = views[state.detail?.kind];
    redrawn(parent, () => parent.replaceChildren(...(view === undefined ? [empty()] : [...view.draw()])));
  }

  on("detail", () => {
    const view = views[state.detail?.kind];
    draw();
    view?.ask();
    if (view !== undefined && matchMedia(NARROW).matches) bringIntoView();
  });
  on("query", () => {
    draw();
    if (state.detail?.kind === "why") views.why.ask();
  });
  draw();
}

function bringIntoView() {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const panel = byId("detail-panel");
  panel.focus({ preventScroll: true });
  panel.scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
}

function empty() {
  return element(
    "div",
    { class: "state tall" },
    element("h1", { class: "state-title", id: "detail-title", text: "Why this item?" }),
    element(
      "p",
      {},
      "Press ",
      element("b", { text: "Why" }),
      " beside an answer to see the contribution of each item of the history and the attention weights.",
    ),
    element("p", {
      class: "hint",
      text: "Then remove or move an item of the history to see how the answer changes.",
    }),
  );
}
