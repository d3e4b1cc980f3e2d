// The question as it stands → the next items as one plan, where a model that is shown can plan.

import { latest, plan, superseded } from "./api.js";
import { byId, element, redrawn } from "./dom.js";
import { nameOf, percent } from "./format.js";
import { problemCard } from "./problem.js";
import { historyToSend, modelToSend, on, ownHistory, shownModels, state } from "./state.js";
import { meet } from "./titles.js";

const ITEMS = 5;

let takeItem = null;
let answer = null;
let problem = null;

/** `take` gets an item that was clicked. */
export function startPlan(take) {
  takeItem = take;
  on("question", ask);
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
    const whose = ownHistory() ? { user: state.user } : { history: historyToSend() };
    const found = await plan(whose, ITEMS, { model: modelToSend(model.name), keepSeen, where }, signal);
    if (signal.aborted) return;
    meet(found.items);
    answer = found;
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
    yield element("p", { class: "hint", text: "No item may be part of a plan." });
    return;
  }
  yield element("ol", { class: "plan-steps", "aria-labelledby": "plan-title" }, ...answer.items.map(step));
  const note =
    answer.fallback === "popularity"
      ? "The history has nothing the model knows: these are the most frequent items."
      : "Each is chosen knowing those before it; beside it is its chance to come there.";
  yield element("p", { class: "hint", text: note });
}

const step = (item, place) =>
  element(
    "li",
    {},
    element(
      "button",
      {
        type: "button",
        class: "plan-step",
        "aria-label": `Step ${place + 1}: ${nameOf(item)}. Add to the history`,
        title: "Add to the history",
        "data-focus": `plan ${place}`,
        on: { click: () => takeItem(item) },
      },
      element("span", { class: "place", text: String(place + 1) }),
      element("bdi", { class: "plan-name", text: nameOf(item) }),
      element("span", { class: "plan-chance", text: percent(Math.exp(item.log_probability)) }),
    ),
  );
