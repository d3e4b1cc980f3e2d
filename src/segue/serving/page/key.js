// The key of the service: asked for once, however many requests wait for it, and stored in this tab only.

import { byId } from "./dom.js";

const STORAGE_KEY = "segue-key";
let waiting = null;

let fallback = null; // if the browser's storage is disabled

export const key = () => {
  try {
    return sessionStorage.getItem(STORAGE_KEY);
  } catch {
    return fallback;
  }
};

function store(value) {
  fallback = value;
  try {
    if (value === null) sessionStorage.removeItem(STORAGE_KEY);
    else sessionStorage.setItem(STORAGE_KEY, value);
  } catch {
    // asked for again after a reload
  }
}

/** Delete the key, so that the next refusal asks for another. */
export const forgetKey = () => store(null);

/** Ask for a key; rejects with `refusal` if the dialog is cancelled. */
export function askForKey(wasWrong, refusal) {
  waiting ??= showDialog(wasWrong, refusal).finally(() => {
    waiting = null;
  });
  return waiting;
}

function showDialog(wasWrong, refusal) {
  const [dialog, form, input, cancel] = ["key", "key-form", "key-input", "key-cancel"].map(byId);
  byId("key-note").textContent = wasWrong
    ? "The service did not accept this key. Try another."
    : "The operator of the service can give you one; a key with the role read is enough.";
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
        store(input.value);
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
