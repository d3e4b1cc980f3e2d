// What the person did → what is asked, kept in the address so that a reload or a link shows the same.

import { meet } from "./titles.js";

const MOST_UNDONE = 100;
const USUAL_K = 10;

/**
 * entries: the history, oldest first: {key, id, known, time?, kind?, value?}.
 * user: the known user whose history was opened, or null; edited: the history is no longer that user's own.
 * model: the name of the one whose answers are shown, or null for all that are served, side by side.
 * detail: what the third column shows: null, {kind: "why", model, id} or {kind: "similar", model, id}.
 */
export const state = {
  active: null,
  models: [],
  entries: [],
  user: null,
  edited: false,
  recording: false,
  model: null,
  k: USUAL_K,
  keepSeen: null,
  where: {},
  detail: null,
  explanation: null,
};

const listeners = new Map();
const done = [];
let lastKey = 0;

/** Topics: models, question (ask again), entries (titles or marks changed), detail, explanation. */
export function on(topic, listener) {
  listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

export function emit(topic) {
  for (const listener of listeners.get(topic) ?? []) listener();
}

export const entry = (id, more = {}) => ({ key: ++lastKey, id, known: true, ...more });

/** The models whose answers are shown. */
export function shownModels() {
  const { models, model } = state;
  return model === null ? models : models.filter(({ name }) => name === model);
}

/** The name to send: only needed where there is a choice, and a lone model may be swapped for another meanwhile. */
export const modelToSend = name => (state.models.length > 1 ? name : null);

export const modelNamed = name => state.models.find(model => model.name === name) ?? state.models[0];

/** The history as the service takes it. */
export const historyToSend = () =>
  state.entries.map(({ id, time, kind, value }) =>
    time === undefined && kind === undefined && value === undefined ? id : { item: id, time, kind, value },
  );

/** Whether the service's own history of the user is what is asked about. */
export const ownHistory = () => state.user !== null && !state.edited;

function snapshot() {
  const { entries, user, edited } = state;
  done.push({ entries, user, edited });
  if (done.length > MOST_UNDONE) done.shift();
}

export const canUndo = () => done.length > 0;

export function undo() {
  const before = done.pop();
  if (before === undefined) return;
  Object.assign(state, before, { recording: false });
  asked();
}

function edit(entries) {
  snapshot();
  Object.assign(state, { entries, edited: true, recording: false });
  asked();
}

/** Add an item at the end, now. */
export function add(item) {
  meet([item]);
  edit([...state.entries, newest(item.id)]);
}

/** A new last entry; it has a time where all others have one. */
export function newest(id) {
  const timed = state.entries.length > 0 && state.entries.every(({ time }) => time !== undefined);
  return entry(id, timed ? { time: new Date().toISOString() } : {});
}

export function remove(key) {
  edit(state.entries.filter(one => one.key !== key));
}

/** Move an entry to another place. Times stay with the places, or the service would sort the entry back. */
export function move(key, place) {
  const from = state.entries.findIndex(one => one.key === key);
  const to = Math.max(0, Math.min(state.entries.length - 1, place));
  if (from < 0 || from === to) return;
  const entries = [...state.entries];
  entries.splice(to, 0, ...entries.splice(from, 1));
  edit(
    entries.map((one, index) => {
      const { time, ...rest } = one;
      const here = state.entries[index].time;
      return here === undefined ? rest : { ...rest, time: here };
    }),
  );
}

export function clear() {
  snapshot();
  Object.assign(state, { entries: [], user: null, edited: false, recording: false });
  asked();
}

/** Show a user's own history. */
export function openUser(user, events) {
  snapshot();
  showUser(user, events);
  asked();
}

/** The same without a way back: after a recorded event, or on a reload. */
export function showUser(user, events) {
  meet(events.filter(({ known }) => known).map(({ item, title }) => ({ id: item, title })));
  const entries = events.map(({ item, time, kind, value, known }) =>
    entry(item, { known, time, ...(kind === null ? {} : { kind }), ...(value === null ? {} : { value }) }),
  );
  Object.assign(state, { entries, user, edited: false });
}

/** An event of the open user was recorded: it is part of their own history, and cannot be undone. */
export function recorded(item, known) {
  done.length = 0;
  state.entries = [...state.entries, { ...newest(item.id), known }];
  asked();
}

/** Something that is no edit of the history: how many answers, which model, which items may be answers. */
export function choose(settings) {
  Object.assign(state, settings);
  asked();
}

export function showDetail(detail) {
  state.detail = detail;
  state.explanation = null;
  writeAddress();
  emit("detail");
}

/** Mark the entries that the model does not know. */
export function markUnknown(ids) {
  const unknown = new Set(ids);
  let changed = false;
  for (const one of state.entries) {
    const known = !unknown.has(one.id);
    changed ||= one.known !== known;
    one.known = known;
  }
  if (changed) emit("entries");
}

function asked() {
  writeAddress();
  emit("question");
}

function writeAddress() {
  const { user, edited, model, k, keepSeen, where, detail, entries } = state;
  const parts = new URLSearchParams();
  if (user !== null) parts.set("user", user);
  if (user === null || edited) parts.set("history", JSON.stringify(entries.map(({ id }) => id)));
  if (model !== null) parts.set("model", model);
  if (k !== USUAL_K) parts.set("k", k);
  if (keepSeen !== null) parts.set("keep_seen", keepSeen);
  if (Object.keys(where).length) parts.set("where", JSON.stringify(where));
  if (detail !== null) parts.set("detail", JSON.stringify([detail.kind, detail.model, detail.id]));
  history.replaceState(null, "", `#${parts.toString().replaceAll("+", "%20")}`);
}

/** The address → the state. Gives the user whose history has to be fetched, or null. */
export function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const ids = parsed(parts.get("history"));
  const user = parts.get("user");
  const k = Number(parts.get("k"));
  const names = state.models.map(({ name }) => name);
  Object.assign(state, {
    entries: Array.isArray(ids)
      ? ids.filter(id => ["string", "number"].includes(typeof id)).map(id => entry(String(id)))
      : [],
    user,
    edited: user !== null && Array.isArray(ids),
    recording: false,
    model: names.includes(parts.get("model")) ? parts.get("model") : null,
    k: Number.isInteger(k) && k >= 1 && k <= 100 ? k : USUAL_K,
    keepSeen: { true: true, false: false }[parts.get("keep_seen")] ?? null,
    where: filtersOf(parsed(parts.get("where"))),
    detail: detailOf(parsed(parts.get("detail"))),
    explanation: null,
  });
  return ownHistory() ? user : null;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Filters from the address, as far as they are ones. */
function filtersOf(where) {
  if (where === null || typeof where !== "object" || Array.isArray(where)) return {};
  return Object.fromEntries(
    Object.entries(where)
      .filter(([, values]) => Array.isArray(values) && values.length)
      .map(([column, values]) => [column, values.map(String)]),
  );
}

function detailOf(detail) {
  const [kind, model, id] = Array.isArray(detail) ? detail : [];
  return ["why", "similar"].includes(kind) && typeof id === "string" ? { kind, model: String(model), id } : null;
}
