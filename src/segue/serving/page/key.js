// A refusal for want of a key → the key, asked for once however many questions wait for it, and kept in this tab only.

import { byId } from "./dom.js";

const PLACE = "segue-key";
let waiting = null;

let given = null; // where the browser keeps nothing for pages

export const key = () => {
  try {
    return sessionStorage.getItem(PLACE);
  } catch {
    return given;
  }
};

function keep(value) {
  given = value;
  try {
    if (value === null) sessionStorage.removeItem(PLACE);
    else sessionStorage.setItem(PLACE, value);
  } catch {
    // asked for again in the next tab
  }
}

/** The next question will be refused, and a key asked for. */
export const forgetKey = () => keep(null);

/** Ends when a key was given; rejects with `refusal` when the person would rather not. */
export function askForKey(wasWrong, refusal) {
  waiting ??= asked(wasWrong, refusal).finally(() => {
    waiting = null;
  });
  return waiting;
}

function asked(wasWrong, refusal) {
  const [dialog, form, input, cancel] = ["key", "key-form", "key-input", "key-cancel"].map(byId);
  byId("key-note").textContent = wasWrong
    ? "The service did not accept the key it was given. Try another."
    : "Whoever runs the service can give you one; a key for reading is enough to look around.";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    const listening = new AbortController();
    const { signal } = listening;
    const close = end => {
      listening.abort();
      dialog.close();
      end();
    };
    form.addEventListener(
      "submit",
      event => {
        event.preventDefault();
        keep(input.value);
        close(resolve);
      },
      { signal },
    );
    cancel.addEventListener("click", () => close(() => reject(refusal)), { signal });
    dialog.addEventListener(
      "cancel",
      event => {
        event.preventDefault();
        close(() => reject(refusal));
      },
      { signal },
    );
  });
}
