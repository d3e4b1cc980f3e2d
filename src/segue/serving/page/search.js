// Typed text → matching items of the catalogue, as a combobox: arrows move, Enter chooses, Escape closes.

import { latest, searchItems, superseded } from "./api.js";
import { byId, element } from "./dom.js";
import { count, nameOf } from "./format.js";

const PAUSE = 120; // milliseconds without a keystroke before the search
const SHOWN = 12;

/** `take` gets the chosen item. */
export function startSearch(take) {
  const input = byId("search");
  const box = byId("matches-box");
  const list = byId("matches");
  const note = byId("matches-note");
  let items = [];
  let active = -1;
  let timer = null;

  const close = () => {
    clearTimeout(timer);
    latest("search"); // a pending answer would open the list again
    box.hidden = true;
    active = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };

  const activate = index => {
    active = index;
    for (const [position, option] of [...list.children].entries()) option.setAttribute("aria-selected", position === index);
    const option = list.children[index];
    if (option === undefined) return input.removeAttribute("aria-activedescendant");
    input.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
  };

  const show = (matches, text) => {
    items = matches;
    list.replaceChildren(...matches.map((item, index) => option(item, index, choose)));
    note.hidden = matches.length > 0;
    note.textContent = text;
    box.hidden = false;
    input.setAttribute("aria-expanded", String(matches.length > 0));
    activate(-1);
  };

  const ask = async () => {
    const signal = latest("search");
    const text = input.value.trim();
    try {
      const answer = await searchItems(text, SHOWN, signal);
      if (document.activeElement !== input) return;
      show(answer.items, `Nothing in the catalogue has “${text}” in its id or title.`);
      if (text && answer.items.length) activate(0);
    } catch (error) {
      if (!superseded(error)) show([], `${error.title}. ${error.detail}`);
    }
  };

  const choose = index => {
    const item = items[index];
    if (item === undefined) return;
    input.value = "";
    close();
    take(item);
    input.focus();
  };

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE);
  });
  input.addEventListener("click", () => {
    if (box.hidden) ask();
  });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", event => {
    const open = !box.hidden && items.length > 0;
    const steps = { ArrowDown: active + 1, ArrowUp: active < 0 ? items.length - 1 : active - 1 };
    if (event.key in steps) {
      event.preventDefault();
      if (!open) ask();
      else activate((steps[event.key] + items.length) % items.length);
    } else if (event.key === "Enter" && open && active >= 0) {
      event.preventDefault();
      choose(active);
    } else if (event.key === "Escape") {
      if (box.hidden) input.value = "";
      else event.preventDefault();
      close();
    }
  });
  addEventListener("keydown", event => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    event.preventDefault();
    input.focus();
  });
}

function option(item, index, choose) {
  const details = Object.values(item.details ?? {}).filter(value => value !== null && value !== "");
  return element(
    "li",
    {
      id: `match-${index}`,
      role: "option",
      "aria-selected": "false",
      on: {
        mousedown: event => event.preventDefault(), // keep the focus in the field
        click: () => choose(index),
      },
    },
    element("span", { class: "match-title", text: nameOf(item) }),
    element(
      "span",
      { class: "match-meta" },
      element("bdi", { class: "id", text: item.id }),
      ...details.slice(0, 2).map(value => element("bdi", { text: String(value) })),
      element("span", { class: "match-count", text: `${count(item.count)}×`, title: "events in training" }),
    ),
  );
}
