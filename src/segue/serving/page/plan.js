// The current query → the next items as one plan, if a shown model can plan.

import { latest, plan, superseded } from "./api.js";
import { byId, element, redrawn } from "./dom.js";
import { nameOf, percent } from "./format.js";
import { problemCard } from "./problem.js";
import { historyToSend, modelToSend, on, ownHistory, shownModels, state } from "./state.js";
import { storeTitles } from "./titles.js";

const ITEMS = 5;

let takeItem = null;
let answer = null;
let problem = null;

/** `take` gets an item that was clicked. */
export function startPlan(take) {
  takeItem = take;
  on("query", ask);
}

/** The first of the shown models that can plan. */
const planner = () => shownModels().find(model => model.plan);

async function ask() {
  const model = planner();
  const signal = latest("plan");
  if (model === undefined) {
    byId("plan").hidden = true;
    return;
  }
  const { keepSeen, where } = state;
  try {
    const subject = ownHistory() ? { user: state.user } : { history: historyToSend() };
    const received = await plan(subject, ITEMS, { model: modelToSend(model.name), keepSeen, where }, signal);
    if (signal.aborted) return;
    storeTitles(received.items);
    answer = received;
    problem = null;
  } catch (error) {
    if (superseded(error)) return;
    problem = error;
  }
  draw();
}

function draw() {
  const parent = byId("plan");
  parent.hidden = false;
  redrawn(parent, () => {
    parent.replaceChildren(
      element("h2", { id: "plan-title", text: "As one plan" }),
      ...(problem === null ? steps() : [problemCard(problem, ask)]),
    );
  });
}

function* steps() {
  if (!answer.items.length) {
    yield element("p", { class: "hint", text: "The rules allow no item in the plan." });
    return;
  }
  yield element("ol", { class: "plan-steps", "aria-labelledby": "plan-title" }, ...answer.items.map(step));
  const note =
    answer.fallback === "popularity"
      ? "The model knows no item of the history: these are the most frequent items."
      : "Each item is chosen given the items before it; the number is its probability.";
  yield element("p", { class: "hint", text: note });
}

const step = (item, index) =>
  element(
    "li",
    {},
    element(
      "button",
      {
        type: "button",
        class: "plan-step",
        "aria-label": `Step ${index + 1}: ${nameOf(item)}. Add to the history`,
        title: "Add to the history",
        "data-focus": `plan ${index}`,
        on: { click: () => takeItem(item) },
      },
      element("span", { class: "position", text: String(index + 1) }),
      element("bdi", { class: "plan-name", text: nameOf(item) }),
      element("span", { class: "plan-chance", text: percent(Math.exp(item.log_probability)) }),
    ),
  );
