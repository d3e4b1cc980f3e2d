// What went wrong → a card that says it and offers the way on.

import { element } from "./dom.js";
import { forgetKey, key } from "./key.js";

const KEY_REFUSED = 403;

/** `retry` asks again; where the key was refused, another can be given first. */
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
