// A user's id → their history on the page; and, where it is switched on, clicks → events of that user.

import { latest, record, superseded, userHistory } from "./api.js";
import { byId, element, iconButton, say } from "./dom.js";
import { counted } from "./format.js";
import { problemCard } from "./problem.js";
import { add, clear, emit, on, openUser, recorded, showUser, state } from "./state.js";
import { meet } from "./titles.js";

const LEAST_READ = 100;
const MOST_READ = 1000;

let problem = null; // {problem, retry}: why a history could not be opened or an event not be recorded
let more = false; // the user has older events than those shown
let busy = false;

export function startUsers() {
  byId("user-form").addEventListener("submit", event => {
    event.preventDefault();
    const id = byId("user").value;
    if (id !== "") open(id);
  });
  on("question", draw);
}

/** As many events as the longest model reads. */
const limit = () => Math.min(MOST_READ, Math.max(LEAST_READ, ...state.models.map(({ length }) => length)));

async function fetched(id, show) {
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
    problem = { problem: error, retry: () => fetched(id, show) };
    draw();
  }
}

const open = id =>
  fetched(id, answer => {
    byId("user").value = "";
    openUser(answer.user, answer.events);
    say(`Opened user ${answer.user} with ${counted(answer.events.length, "event")}.`);
  });

/** Show the user whose id is in the address, without an undo. */
export const reopen = id =>
  fetched(id, answer => {
    showUser(answer.user, answer.events);
    emit("question");
    if (state.detail?.kind === "similar") emit("detail");
  });

/** An item was clicked: an event of the user where recording is on, else part of a history that is only asked about. */
export async function take(item) {
  if (!state.recording) {
    add(item);
    return say(`Added ${item.title ?? item.id} to the history.`);
  }
  meet([item]);
  await write(state.user, item, `page-${randomText()}`);
}

/** The event's id makes a second try harmless. */
async function write(user, item, id) {
  problem = null;
  try {
    const answer = await record({ user, item: item.id, id });
    if (state.user !== user) return;
    recorded(item, !answer.unknown.includes(item.id));
    say(`Recorded ${item.title ?? item.id} as an event of user ${user}.`);
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
      ? element("p", { class: "hint" }, "This is no longer what the user did. ", backButton())
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
  say(recording ? `Clicks are now recorded as events of user ${state.user}.` : "Clicks are no longer recorded.");
}
