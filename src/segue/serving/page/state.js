// The state of the page, stored in the address so that a reload or a link shows the same.

import { storeTitles } from "./titles.js";

const MAX_UNDO = 100;
const DEFAULT_K = 10;

/**
 * entries: the history, oldest first: {key, id, known, time?, kind?, value?}.
 * user: the user whose history was opened, or null; edited: the history was changed since.
 * model: the name of the model whose answers are shown, or null for all served models, side by side.
 * detail: the content of the third column: null, {kind: "why", model, id} or {kind: "similar", model, id}.
 */
export const state = {
  active: null,
  models: [],
  entries: [],
  user: null,
  edited: false,
  recording: false,
  model: null,
  k: DEFAULT_K,
  keepSeen: null,
  where: {},
  detail: null,
  explanation: null,
};

const listeners = new Map();
const undoStack = [];
let lastKey = 0;

/** Topics: models, query (send it again), entries (titles or marks changed), detail, explanation, switched. */
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

/** The name to send: null for a single model, which may be switched meanwhile. */
export const modelToSend = name => (state.models.length > 1 ? name : null);

export const modelNamed = name => state.models.find(model => model.name === name) ?? state.models[0];

/** The history in the form of the API. */
export const historyToSend = () =>
  state.entries.map(({ id, time, kind, value }) =>
    time === undefined && kind === undefined && value === undefined ? id : { item: id, time, kind, value },
  );

/** Whether the query is about the user's history in the store. */
export const ownHistory = () => state.user !== null && !state.edited;

function snapshot() {
  const { entries, user, edited } = state;
  undoStack.push({ entries, user, edited });
  if (undoStack.length > MAX_UNDO) undoStack.shift();
}

export const canUndo = () => undoStack.length > 0;

export function undo() {
  const before = undoStack.pop();
  if (before === undefined) return;
  Object.assign(state, before, { recording: false });
  queryAgain();
}

function edit(entries) {
  snapshot();
  Object.assign(state, { entries, edited: true, recording: false });
  queryAgain();
}

/** Add an item at the end. */
export function add(item) {
  storeTitles([item]);
  edit([...state.entries, newest(item.id)]);
}

/** A new last entry; it has a time if all others have one. */
export function newest(id) {
  const timed = state.entries.length > 0 && state.entries.every(({ time }) => time !== undefined);
  return entry(id, timed ? { time: new Date().toISOString() } : {});
}

export function remove(key) {
  edit(state.entries.filter(one => one.key !== key));
}

/** Move an entry to another index. Times stay at their index, or the service would sort the entry back. */
export function move(key, index) {
  const from = state.entries.findIndex(one => one.key === key);
  const to = Math.max(0, Math.min(state.entries.length - 1, index));
  if (from < 0 || from === to) return;
  const entries = [...state.entries];
  entries.splice(to, 0, ...entries.splice(from, 1));
  edit(
    entries.map((one, at) => {
      const { time, ...rest } = one;
      const here = state.entries[at].time;
      return here === undefined ? rest : { ...rest, time: here };
    }),
  );
}

export function clear() {
  snapshot();
  Object.assign(state, { entries: [], user: null, edited: false, recording: false });
  queryAgain();
}

/** Show a user's history. */
export function openUser(user, events) {
  snapshot();
  showUser(user, events);
  queryAgain();
}

/** The same without an undo, for a reload. */
export function showUser(user, events) {
  storeTitles(events.filter(({ known }) => known).map(({ item, title }) => ({ id: item, title })));
  const entries = events.map(({ item, time, kind, value, known }) =>
    entry(item, { known, time, ...(kind === null ? {} : { kind }), ...(value === null ? {} : { value }) }),
  );
  Object.assign(state, { entries, user, edited: false });
}

/** Show a recorded event of the open user, which cannot be undone. */
export function addRecorded(item, known) {
  undoStack.length = 0;
  state.entries = [...state.entries, { ...newest(item.id), known }];
  queryAgain();
}

/** Change settings other than the history: the number of answers, the model, the filters. */
export function choose(settings) {
  Object.assign(state, settings);
  queryAgain();
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

function queryAgain() {
  writeAddress();
  emit("query");
}

function writeAddress() {
  const { user, edited, model, k, keepSeen, where, detail, entries } = state;
  const parts = new URLSearchParams();
  if (user !== null) parts.set("user", user);
  if (user === null || edited) parts.set("history", JSON.stringify(entries.map(({ id }) => id)));
  if (model !== null) parts.set("model", model);
  if (k !== DEFAULT_K) parts.set("k", k);
  if (keepSeen !== null) parts.set("keep_seen", keepSeen);
  if (Object.keys(where).length) parts.set("where", JSON.stringify(where));
  if (detail !== null) parts.set("detail", JSON.stringify([detail.kind, detail.model, detail.id]));
  history.replaceState(null, "", `#${parts.toString().replaceAll("+", "%20")}`);
}

/** Read the state from the address. Returns the user whose history must be fetched, or null. */
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
    k: Number.isInteger(k) && k >= 1 && k <= 100 ? k : DEFAULT_K,
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

/** The valid filters in the address. */
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
