// A user's id → their history on the page. If recording is on, clicks become events of that user.

import { latest, record, superseded, userHistory } from "./api.js";
import { byId, element, iconButton, announce } from "./dom.js";
import { counted } from "./format.js";
import { problemCard } from "./problem.js";
import { add, clear, emit, on, openUser, addRecorded, showUser, state } from "./state.js";
import { storeTitles } from "./titles.js";

const MIN_EVENTS = 100;
const MAX_EVENTS = 1000;

let problem = null; // {problem, retry} of a failed history or event
let more = false; // whether the user has older events than those shown
let busy = false;

export function startUsers() {
  byId("user-form").addEventListener("submit", event => {
    event.preventDefault();
    const id = byId("user").value;
    if (id !== "") open(id);
  });
  on("query", draw);
}

/** The number of events that the model with the longest window uses. */
const limit = () => Math.min(MAX_EVENTS, Math.max(MIN_EVENTS, ...state.models.map(({ length }) => length)));

async function fetchHistory(id, show) {
  const signal = latest("user");
  busy = true;
  problem = null;
  draw();
  try {
    const answer = await userHistory(id, limit(), signal);
    more = answer.more;
    busy = false;
    show(answer);
  } catch (error) {
    if (superseded(error)) return;
    busy = false;
    problem = { problem: error, retry: () => fetchHistory(id, show) };
    draw();
  }
}

const open = id =>
  fetchHistory(id, answer => {
    byId("user").value = "";
    openUser(answer.user, answer.events);
    announce(`Opened user ${answer.user} with ${counted(answer.events.length, "event")}.`);
  });

/** Show the user whose id is in the address, without an undo. */
export const reopen = id =>
  fetchHistory(id, answer => {
    showUser(answer.user, answer.events);
    emit("query");
    if (state.detail?.kind === "similar") emit("detail");
  });

/** Take a clicked item: as an event of the user if recording is on, else as an entry of the history shown. */
export async function take(item) {
  if (!state.recording) {
    add(item);
    return announce(`Added ${item.title ?? item.id} to the history.`);
  }
  storeTitles([item]);
  await write(state.user, item, `page-${randomText()}`);
}

/** Send an event. Its id makes a retry harmless. */
async function write(user, item, id) {
  problem = null;
  try {
    const answer = await record({ user, item: item.id, id });
    if (state.user !== user) return;
    addRecorded(item, !answer.unknown.includes(item.id));
    announce(`Recorded ${item.title ?? item.id} as an event of user ${user}.`);
  } catch (error) {
    problem = { problem: error, retry: () => write(user, item, id) };
    draw();
  }
}

const randomText = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");

function draw() {
  const parts = [];
  if (busy) parts.push(element("p", { class: "hint", text: "Opening …" }));
  if (state.user !== null && !busy) parts.push(chip());
  if (problem !== null) parts.push(problemCard(problem.problem, problem.retry));
  byId("user-state").replaceChildren(...parts);
}

function chip() {
  const name = element("p", { class: "user-name" }, "User ", element("bdi", { class: "id", text: state.user }));
  if (state.edited) name.append(element("span", { class: "badge", text: "what if" }));
  const head = element("div", { class: "user-head" }, name, iconButton("close", "Close this user", clear));
  const record = element("input", { type: "checkbox", role: "switch", id: "record" });
  record.checked = state.recording;
  record.addEventListener("change", () => switchRecording(record.checked));
  return element(
    "div",
    { class: "user-chip" },
    head,
    more && !state.edited
      ? element("p", { class: "hint", text: `The newest ${counted(state.entries.length, "event")} are shown.` })
      : null,
    state.edited
      ? element("p", { class: "hint" }, "This history was edited. ", backButton())
      : element(
          "label",
          { class: "switch" },
          record,
          element("span", { text: "Record clicks as events of this user" }),
        ),
  );
}

const backButton = () =>
  element("button", {
    type: "button",
    class: "text-button",
    text: "Back to their history",
    on: { click: () => open(state.user) },
  });

function switchRecording(recording) {
  state.recording = recording;
  announce(recording ? `Clicks are now recorded as events of user ${state.user}.` : "Clicks are no longer recorded.");
}
