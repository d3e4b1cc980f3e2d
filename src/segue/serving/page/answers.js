// The current query → each model's answers, with each item's change of rank since the previous answer.

import { answers, latest, superseded, userAnswers } from "./api.js";
import { byId, element, gliding, iconButton, redrawn, announce } from "./dom.js";
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
import { scoreBar } from "./bars.js";
import { storeTitles } from "./titles.js";

const PATIENCE = 200; // milliseconds before the page shows that it waits: most answers are faster

const columns = new Map(); // model name → {answer, query, moves, problem, milliseconds, slow}
let takeItem = null;

/** `take` gets an item that was clicked. */
export function startAnswers(take) {
  takeItem = take;
  on("query", askAll);
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
    query: null,
    moves: new Map(),
    problem: null,
    milliseconds: 0,
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
  const query = JSON.stringify([historyToSend(), keepSeen, where]);
  const start = performance.now();
  try {
    const answer = await (ownHistory()
      ? userAnswers(state.user, settings, signal)
      : answers(historyToSend(), settings, signal));
    if (signal.aborted) return;
    receive(name, column, answer, query);
    column.milliseconds = performance.now() - start;
  } catch (error) {
    if (superseded(error)) return;
    column.problem = error;
    if (error.status === 404) emit("switched"); // the model is no longer served
  } finally {
    clearTimeout(waiting);
    if (!signal.aborted) {
      column.slow = false;
      draw();
    }
  }
}

function receive(name, column, answer, query) {
  storeTitles(answer.items);
  column.problem = null;
  column.moves = query === column.query ? new Map() : moves(column.answer, answer);
  column.answer = answer;
  column.query = query;
  if (name !== shownModels()[0].name) return;
  markUnknown(answer.unknown);
  const first = answer.items[0];
  announce(first ? `${counted(answer.items.length, "answer")}. First: ${nameOf(first)}.` : "The rules allow no item.");
  if (answer.model !== undefined && !state.models.some(model => model.name === answer.model)) emit("switched");
}

/** id → ranks gained since the previous answer, or null for an item that was not in it. */
function moves(before, after) {
  if (before === null) return new Map();
  const ranks = new Map(before.items.map(({ id }, rank) => [id, rank]));
  return new Map(after.items.map(({ id }, rank) => [id, ranks.has(id) ? ranks.get(id) - rank : null]));
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

/** The ids in the answers of all shown models. */
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
  const rows = answer.items.map((item, rank) =>
    row(item, {
      rank,
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

/** Replace the children, but leave a list that stays in the document, so that its rows can be animated. */
function replace(parent, ...parts) {
  const wanted = parts.filter(part => part !== null);
  const list = wanted.find(part => part.tagName === "OL" && part.parentElement === parent);
  for (const child of [...parent.children]) if (child !== list) child.remove();
  if (list === undefined) return parent.append(...wanted);
  const index = wanted.indexOf(list);
  list.before(...wanted.slice(0, index));
  list.after(...wanted.slice(index + 1));
}

/** The filled share of a row's bar. Scores compare only within an answer, so its last item is near 0. */
const strength = (score, lowest, highest) =>
  highest > lowest ? 0.06 + (0.94 * (score - lowest)) / (highest - lowest) : 1;

function status({ answer, milliseconds }, both) {
  const same = both === null ? "" : ` · ${both.size} in both`;
  return element("p", {
    class: "answer-status",
    text: `${counted(answer.items.length, "answer")} in ${Math.max(1, Math.round(milliseconds))} ms${same}`,
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
    element("p", { class: "state-title", text: "The rules allow no item" }),
    element("p", { text: "Every item is seen or filtered out. Keep seen items, or remove a filter." }),
  );
}

function skeleton() {
  const lines = Array.from({ length: state.k }, () => element("li", { class: "skeleton" }));
  return element("ol", { class: "answers waiting", "aria-label": "Waiting for answers" }, ...lines);
}

function row(item, { rank, index, name, move, score, strength, shared }) {
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
        "aria-label": `${rank + 1}. ${nameOf(item)}${moveWords(move)}. Add to the history`,
        title: "Add to the history",
        "data-focus": `answer ${index} ${rank}`,
        on: { click: () => takeItem(item) },
      },
      element("span", { class: "rank", text: String(rank + 1) }),
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
      "data-focus": `near ${index} ${rank}`,
    }),
    element("button", {
      type: "button",
      class: "why-button",
      text: "Why",
      "aria-label": `Why ${nameOf(item)}?`,
      "aria-pressed": String(explained),
      "data-focus": `why ${index} ${rank}`,
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
