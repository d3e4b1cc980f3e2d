// A number and the largest of its kind → a bar to the right of the middle, or to the left where it is negative.

import { element } from "./dom.js";

export function signedBar(value, most) {
  const fill = element("span", { class: value < 0 ? "fill against" : "fill for" });
  fill.style.width = `${(50 * Math.abs(value)) / most}%`;
  return element("span", { class: "signed-bar", "aria-hidden": "true" }, fill);
}
