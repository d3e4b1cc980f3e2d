// Numbers → small bars.

import { element } from "./dom.js";

/** A bar to the right of the middle, or to the left if the value is negative; `largest` fills one side. */
export function signedBar(value, largest) {
  const fill = element("span", { class: value < 0 ? "fill against" : "fill for" });
  fill.style.width = `${(50 * Math.abs(value)) / largest}%`;
  return element("span", { class: "signed-bar", "aria-hidden": "true" }, fill);
}

/** A score as text over a bar that is filled to `share`. */
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
