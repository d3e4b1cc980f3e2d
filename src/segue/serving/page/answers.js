// The question as it stands → each model's answers, with how far every item moved since the answer before.

import { answers, latest, superseded, userAnswers } from "./api.js";
import { byId, element, gliding, iconButton, redrawn, say } from "./dom.js";
import { brief, counted, decimal, nameOf } from "./format.js";
import { problemCard } from "./problem.js";
import {
  emit,
  historyToSend,
  markUnknown,
  modelToSend,
  on,
  ownHistory,
  showDetail,
  shownModels,
  state,
} from "./state.js";
import { scoreBar } from "./score-bar.js";
import { meet } from "./titles.js";

const PATIENCE = 200; // milliseconds before waiting shows: most answers are quicker, and a flicker says nothing

const columns = new Map(); // model name → {answer, question, moves, problem, took, slow}
let takeItem = null;

/** `take` gets an item that was clicked. */
export function startAnswers(take) {
  takeItem = take;
  on("question", askAll);
  on("detail", draw);
}

function askAll() {
  const names = shownModels().map(({ name }) => name);
  for (const name of columns.keys()) if (!names.includes(name)) columns.delete(name);
  for (const name of names) ask(name);
}

async function ask(name) {
  const column = columns.get(name) ?? {
    answer: null,
    question: null,
    moves: new Map(),
    problem: null,
    took: 0,
    slow: false,
  };
  columns.set(name, column);
  const signal = latest(`answers ${name}`);
  const waiting = setTimeout(
    () => {
      column.slow = true;
      draw();
    },
    column.answer === null ? 0 : PATIENCE,
  );
  const { k, keepSeen, where } = state;
  const settings = { k, keepSeen, where, model: modelToSend(name) };
  const question = JSON.stringify([historyToSend(), keepSeen, where]);
  const began = performance.now();
  try {
    const answer = await (ownHistory()
      ? userAnswers(state.user, settings, signal)
      : answers(historyToSend(), settings, signal));
    if (signal.aborted) return;
    arrived(name, column, answer, question);
    column.took = performance.now() - began;
  } catch (error) {
    if (superseded(error)) return;
    column.problem = error;
    if (error.status === 404) emit("swapped"); // the model is not served any more
  } finally {
    clearTimeout(waiting);
    if (!signal.aborted) {
      column.slow = false;
      draw();
    }
  }
}

function arrived(name, column, answer, question) {
  meet(answer.items);
  column.problem = null;
  column.moves = question === column.question ? new Map() : moves(column.answer, answer);
  column.answer = answer;
  column.question = question;
  if (name !== shownModels()[0].name) return;
  markUnknown(answer.unknown);
  const first = answer.items[0];
  say(first ? `${counted(answer.items.length, "answer")}. First: ${nameOf(first)}.` : "No item may be an answer.");
  if (answer.model !== undefined && !state.models.some(model => model.name === answer.model)) emit("swapped");
}

/** id → places moved since the answer before (up is positive), or null for an item that was not in it. */
function moves(before, after) {
  if (before === null) return new Map();
  const places = new Map(before.items.map(({ id }, place) => [id, place]));
  return new Map(after.items.map(({ id }, place) => [id, places.has(id) ? places.get(id) - place : null]));
}

function draw() {
  const parent = byId("answers");
  const shown = shownModels().filter(({ name }) => columns.has(name));
  parent.classList.toggle("two", shown.length > 1);
  const wanted = shown.map(({ name }) => name);
  if (JSON.stringify([...parent.children].map(child => child.dataset.model)) !== JSON.stringify(wanted))
    parent.replaceChildren(...wanted.map(name => element("div", { class: "answer-column", "data-model": name })));
  redrawn(parent, () => {
    for (const [index, { name }] of shown.entries())
      drawColumn(parent.children[index], index, name, shown.length > 1 ? shared(shown) : null);
  });
}

/** The ids that every shown model answers. */
function shared(shown) {
  const [first, ...others] = shown.map(({ name }) => new Set(columns.get(name).answer?.items.map(({ id }) => id)));
  return new Set([...first].filter(id => others.every(ids => ids.has(id))));
}

function drawColumn(parent, index, name, both) {
  const column = columns.get(name);
  const { answer, problem, slow } = column;
  parent.setAttribute("aria-busy", String(slow));
  const head = both === null ? null : element("h2", { class: "column-title", text: name });
  if (problem !== null)
    return replace(
      parent,
      head,
      problemCard(problem, () => ask(name)),
    );
  if (answer === null) return replace(parent, head, slow ? skeleton() : null);
  const list = parent.querySelector("ol") ?? element("ol", { class: "answers" });
  list.setAttribute("aria-label", both === null ? "Answers, best first" : `Answers of ${name}, best first`);
  const highest = answer.items[0]?.score ?? 0;
  const lowest = answer.items.at(-1)?.score ?? 0;
  const rows = answer.items.map((item, place) =>
    row(item, {
      place,
      index,
      name,
      move: column.moves.get(item.id),
      score: answer.fallback === null ? decimal(item.score) : counted(item.score, "event"),
      strength: strength(item.score, lowest, highest),
      shared: both?.has(item.id) ?? false,
    }),
  );
  gliding(list, () => list.replaceChildren(...rows));
  replace(parent, head, status(column, both), notice(answer), answer.items.length ? list : nothing());
}

/** Only replaces what changed places, so that a list in its place keeps its rows' positions for gliding. */
function replace(parent, ...parts) {
  const wanted = parts.filter(part => part !== null);
  const list = wanted.find(part => part.tagName === "OL" && part.parentElement === parent);
  for (const child of [...parent.children]) if (child !== list) child.remove();
  if (list === undefined) return parent.append(...wanted);
  const place = wanted.indexOf(list);
  list.before(...wanted.slice(0, place));
  list.after(...wanted.slice(place + 1));
}

/** How full a row's bar is: scores only compare within an answer, so the last of it is the foot. */
const strength = (score, lowest, highest) =>
  highest > lowest ? 0.06 + (0.94 * (score - lowest)) / (highest - lowest) : 1;

function status({ answer, took }, both) {
  const same = both === null ? "" : ` · ${both.size} in both`;
  return element("p", {
    class: "answer-status",
    text: `${counted(answer.items.length, "answer")} in ${Math.max(1, Math.round(took))} ms${same}`,
  });
}

function notice(answer) {
  if (answer.fallback !== "popularity") return null;
  const why = state.entries.length
    ? "The model knows no item of this history, so these are the most frequent items."
    : "There is no history yet, so these are the most frequent items.";
  return element("p", { class: "notice" }, element("strong", { text: "Popular items. " }), why);
}

function nothing() {
  return element(
    "div",
    { class: "state" },
    element("p", { class: "state-title", text: "No item may be an answer" }),
    element("p", { text: "Every item is seen or filtered out. Keep seen items, or take a filter away." }),
  );
}

function skeleton() {
  const lines = Array.from({ length: state.k }, () => element("li", { class: "skeleton" }));
  return element("ol", { class: "answers waiting", "aria-label": "Waiting for answers" }, ...lines);
}

function row(item, { place, index, name, move, score, strength, shared }) {
  const { detail } = state;
  const explained = detail?.kind === "why" && detail.id === item.id && detail.model === name;
  const short = brief(nameOf(item));
  return element(
    "li",
    { class: explained ? "answer explained" : "answer", "data-row": item.id },
    element(
      "button",
      {
        type: "button",
        class: "answer-main",
        "aria-label": `${place + 1}. ${nameOf(item)}${moveWords(move)}. Add to the history`,
        title: "Add to the history",
        "data-focus": `answer ${index} ${place}`,
        on: { click: () => takeItem(item) },
      },
      element("span", { class: "rank", text: String(place + 1) }),
      moveBadge(move),
      element(
        "span",
        { class: "answer-text" },
        element("bdi", { class: "answer-title", text: nameOf(item) }),
        element(
          "span",
          { class: "meta" },
          item.title ? element("bdi", { class: "id", text: item.id }) : null,
          shared ? element("span", { class: "badge", text: "both" }) : null,
        ),
      ),
      scoreBar(score, strength),
    ),
    iconButton("near", `Items similar to ${short}`, () => showDetail({ kind: "similar", model: name, id: item.id }), {
      "data-focus": `near ${index} ${place}`,
    }),
    element("button", {
      type: "button",
      class: "why-button",
      text: "Why",
      "aria-label": `Why ${nameOf(item)}?`,
      "aria-pressed": String(explained),
      "data-focus": `why ${index} ${place}`,
      on: { click: () => showDetail(explained ? null : { kind: "why", model: name, id: item.id }) },
    }),
  );
}

function moveWords(move) {
  if (move === undefined || move === 0) return "";
  if (move === null) return ", new";
  return move > 0 ? `, up ${move}` : `, down ${-move}`;
}

function moveBadge(move) {
  if (move === undefined || move === 0) return element("span", { class: "move" });
  if (move === null) return element("span", { class: "move new", text: "new" });
  return move > 0
    ? element("span", { class: "move rise", text: `▲${move}` })
    : element("span", { class: "move fall", text: `▼${-move}` });
}
