// Starts the page: loads the served models, then the state in the address, then the answers.

import { models } from "./api.js";
import { startAnswers } from "./answers.js";
import { startCard } from "./card.js";
import { startDetail } from "./detail.js";
import { byId, element, icon, segments } from "./dom.js";
import { startFilters } from "./filters.js";
import { startHistory } from "./history.js";
import { startPlan } from "./plan.js";
import { problemCard } from "./problem.js";
import { startSearch } from "./search.js";
import { choose, emit, on, readAddress, state } from "./state.js";
import { lookUp } from "./titles.js";
import { reopen, startUsers, take } from "./users.js";

const DEPTHS = [5, 10, 20, 50, 100];
const ALL = ""; // the choice of all models: no run has this name

async function start() {
  let served;
  byId("answers").replaceChildren(element("p", { class: "hint waiting", text: "Loading the models …" }));
  try {
    served = await models();
  } catch (problem) {
    byId("answers").replaceChildren(problemCard(problem, start));
    return;
  }
  serve(served);
  open();
}

function serve({ active, models: served }) {
  Object.assign(state, { active, models: served });
  if (!served.some(({ name }) => name === state.model)) state.model = null;
  emit("models");
}

/** Show the state in the address. */
function open() {
  const user = readAddress();
  if (user !== null) return reopen(user);
  emit("query");
  if (state.detail?.kind !== "why") emit("detail"); // the explanation is fetched with every query
  lookUp([...state.entries.map(({ id }) => id), ...(state.detail === null ? [] : [state.detail.id])], () =>
    emit("entries"),
  );
}

/** Load the models again after a switch to another run. */
async function follow() {
  const names = () => JSON.stringify(state.models.map(({ name }) => name));
  const before = names();
  try {
    serve(await models());
    if (names() !== before) emit("query");
  } catch {
    // the answers stay; the next query shows the problem
  }
}

function drawSettings() {
  const { models: served, model, k, keepSeen } = state;
  const depths = [...new Set([...DEPTHS, k])].sort((one, other) => one - other);
  byId("k").replaceChildren(...depths.map(depth => element("option", { value: depth, text: depth })));
  byId("k").value = k;
  byId("keep-seen").checked = keepSeen ?? served[0]?.seen === "kept";
  const options = [
    { value: ALL, label: "Side by side" },
    ...served.map(({ name }) => ({ value: name, label: name })),
  ];
  const holder = byId("models-choice");
  holder.hidden = served.length < 2;
  if (holder.hidden || holder.contains(document.activeElement)) return;
  holder.replaceChildren(
    segments("Model", "model", options, model ?? ALL, name => choose({ model: name === ALL ? null : name })),
  );
}

function startSettings() {
  byId("k").addEventListener("change", event => choose({ k: Number(event.target.value) }));
  byId("keep-seen").addEventListener("change", event => choose({ keepSeen: event.target.checked }));
  on("query", drawSettings);
  on("models", drawSettings);
  on("switched", follow);
  drawSettings();
}

function startTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const draw = () => {
    const label = dark() ? "Use the light theme" : "Use the dark theme";
    byId("theme").replaceChildren(icon(dark() ? "sun" : "moon"));
    byId("theme").setAttribute("aria-label", label);
    byId("theme").title = label;
    dispatchEvent(new Event("themechange"));
  };
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("segue-theme", root.dataset.theme);
    } catch {
      // storage may be disabled: the choice lasts until a reload
    }
    draw();
  });
  system.addEventListener("change", draw);
  draw();
}

/** The skip link for keyboards: a plain link would overwrite the state in the address. */
function startSkipLink() {
  document.querySelector(".skip").addEventListener("click", event => {
    event.preventDefault();
    byId("search").focus();
  });
}

startTheme();
startSkipLink();
startHistory();
startUsers();
startSettings();
startFilters();
startAnswers(take);
startPlan(take);
startDetail(take);
startCard();
startSearch(item => take({ id: item.id, title: item.title }));
addEventListener("hashchange", () => state.models.length && open());
start();
