// A Problem → a card with its text and a button to retry.

import { element } from "./dom.js";
import { forgetKey, key } from "./key.js";

const KEY_REFUSED = 403;

/** `retry` sends the request again; if the key was refused, another can be given first. */
export function problemCard(problem, retry) {
  const button = (text, press, focus) =>
    element("button", { type: "button", class: "button", text, "data-focus": focus, on: { click: press } });
  const buttons = [button(problem.status === 401 ? "Enter a key" : "Try again", retry, "retry")];
  if (problem.status === KEY_REFUSED && key() !== null)
    buttons.push(
      button(
        "Use another key",
        () => {
          forgetKey();
          retry();
        },
        "another-key",
      ),
    );
  return element(
    "div",
    { class: "state problem", role: "alert" },
    element("p", { class: "state-title", text: problem.title }),
    element("p", { text: problem.detail }),
    element("div", { class: "state-buttons" }, ...buttons),
  );
}
