// The history → a list to read, reorder and shorten, newest first, with a bar for the contribution of each entry.

import { byId, element, gliding, icon, iconButton, redrawn } from "./dom.js";
import { brief, counted, day, signed } from "./format.js";
import { signedBar } from "./bars.js";
import { canUndo, clear, emit, move, on, remove, showDetail, shownModels, state, undo } from "./state.js";
import { titleOf } from "./titles.js";

let dragged = null;

export function startHistory() {
  byId("undo").addEventListener("click", undo);
  byId("clear").addEventListener("click", clear);
  addEventListener("keydown", event => {
    const typing =
      /^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "") && document.activeElement.type !== "radio";
    if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !typing) {
      event.preventDefault();
      undo();
    }
  });
  for (const topic of ["query", "entries", "explanation", "detail"]) on(topic, draw);
}

function draw() {
  const list = byId("history");
  const { entries } = state;
  byId("history-count").textContent = entries.length ? `${counted(entries.length, "item")}, newest first` : "";
  byId("undo").disabled = !canUndo();
  byId("clear").disabled = !entries.length && state.user === null;
  const drawing = contributions();
  redrawn(list, () =>
    gliding(list, () => list.replaceChildren(...entries.map((one, index) => row(one, index, drawing)).reverse())),
  );
  byId("history-empty").replaceChildren(...(entries.length ? [] : [empty()]));
}

function empty() {
  const text =
    state.user === null
      ? "Search for an item or click an answer. Every item you add changes the recommendations."
      : "The store has no event of this user, so popular items are shown.";
  return element(
    "div",
    { class: "state" },
    element("p", { class: "state-title", text: "No history yet" }),
    element("p", { text }),
  );
}

/** The contribution of each entry by its key, so that a moved entry keeps its bar. */
function contributions() {
  if (state.detail?.kind !== "why" || state.explanation === null) return null;
  const { keys, contributions: all } = state.explanation;
  const values = new Map(all.map(({ contribution }, index) => [keys[index], contribution]));
  const alone = all.filter(({ known }) => known).length === 1;
  return {
    values,
    alone,
    largest: Math.max(...[...values.values()].map(value => Math.abs(value ?? 0)), Number.MIN_VALUE),
  };
}

function row(one, index, drawing) {
  const name = titleOf(one.id) ?? one.id;
  const short = brief(name);
  const last = state.entries.length - 1;
  return element(
    "li",
    {
      class: one.known ? "entry" : "entry unknown",
      draggable: "true",
      "data-row": String(one.key),
      on: {
        dragstart: event => startDrag(event, one),
        dragend: () => endDrag(),
        dragover: event => overDrag(event),
        drop: event => dropDrag(event, one),
        keydown: event => moveByKey(event, one, index),
      },
    },
    element("span", { class: "grip" }, icon("grip")),
    element("span", { class: "position", text: String(index + 1), "aria-hidden": "true" }),
    element(
      "div",
      { class: "entry-body" },
      element("bdi", { class: "entry-title", text: name }),
      meta(one),
      bar(drawing, one),
    ),
    element(
      "div",
      { class: "entry-buttons" },
      iconButton("up", `Move ${short} up, to newer`, () => move(one.key, index + 1), {
        "data-focus": `newer ${one.key}`,
        disabled: index === last,
      }),
      iconButton("down", `Move ${short} down, to older`, () => move(one.key, index - 1), {
        "data-focus": `older ${one.key}`,
        disabled: index === 0,
      }),
      iconButton("near", `Items similar to ${short}`, () => similarTo(one), {
        "data-focus": `near ${one.key}`,
        disabled: !one.known,
      }),
      iconButton("close", `Remove ${short}`, () => remove(one.key), { "data-focus": `remove ${one.key}` }),
    ),
  );
}

function meta(one) {
  const parts = [];
  if (titleOf(one.id)) parts.push(element("bdi", { class: "id", text: one.id }));
  if (one.time !== undefined) parts.push(element("span", { text: day(one.time) }));
  if (one.kind !== undefined) parts.push(element("bdi", { text: one.kind }));
  if (!one.known) parts.push(element("span", { class: "badge warn", text: "unknown to the model" }));
  return element("div", { class: "meta" }, ...parts);
}

/** The contribution of an entry as a signed bar. */
function bar(drawing, one) {
  const value = drawing?.values.get(one.key);
  if (value === undefined) return null;
  if (value === null) {
    const reason = drawing.alone ? "the only item that the model knows" : "older than the model’s window";
    return one.known ? element("div", { class: "meta", text: reason }) : null;
  }
  return element(
    "div",
    { class: "contribution" },
    signedBar(value, drawing.largest),
    element("span", { class: "contribution-value", text: signed(value) }),
  );
}

const similarTo = one => showDetail({ kind: "similar", model: shownModels()[0].name, id: one.id });

function moveByKey(event, one, index) {
  const steps = { ArrowUp: 1, ArrowDown: -1 }; // the newest is on top
  if (!event.altKey || !(event.key in steps)) return;
  event.preventDefault();
  move(one.key, index + steps[event.key]);
}

function startDrag(event, one) {
  dragged = one;
  event.dataTransfer.effectAllowed = "move";
  event.dataTransfer.setData("text/plain", one.id);
  event.currentTarget.classList.add("dragged");
}

function overDrag(event) {
  if (dragged === null) return;
  event.preventDefault();
  for (const row of byId("history").children) row.classList.toggle("target", row === event.currentTarget);
}

function dropDrag(event, onto) {
  if (dragged === null) return;
  event.preventDefault();
  const { key } = dragged;
  dragged = null;
  move(
    key,
    state.entries.findIndex(one => one.key === onto.key),
  );
}

function endDrag() {
  dragged = null;
  emit("entries");
}
