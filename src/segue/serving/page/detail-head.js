// The head of the third column.

import { element, iconButton } from "./dom.js";
import { showDetail } from "./state.js";

export function detailHead(kicker, name, meta) {
  return element(
    "div",
    { class: "detail-head" },
    element("p", { class: "kicker", text: kicker }),
    iconButton("close", "Close", () => showDetail(null), { "data-focus": "close" }),
    element("h1", { id: "detail-title" }, element("bdi", { text: name })),
    element("p", { class: "meta" }, ...meta),
  );
}
