// A score in words and as a share of the best → the number over a short bar.

import { element } from "./dom.js";

export function scoreBar(text, share) {
  const fill = element("span", { class: "score-fill" });
  fill.style.width = `${100 * share}%`;
  return element(
    "span",
    { class: "score" },
    element("span", { text }),
    element("span", { class: "score-room", "aria-hidden": "true" }, fill),
  );
}
