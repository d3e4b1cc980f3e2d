// Questions → the service's answers, or a Problem that says in a sentence why there is none.

import { askForKey, key } from "./key.js";

const TITLES = {
  0: "The service does not answer",
  400: "The service cannot use this question",
  401: "A key is needed",
  403: "This key may not do that",
  404: "Not found",
  413: "The question is too large",
  429: "Too many questions at once",
  500: "Something went wrong in the service",
  503: "The service is busy",
};

/** Why a question has no answer. Status 0: nobody answered. */
class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
    this.title = TITLES[status] ?? `The service answered ${status}`;
    this.detail = detail;
  }
}

const running = new Map();

/** A signal for the latest question of its kind: asking again aborts the one before, whose answer is then dropped. */
export function latest(kind) {
  running.get(kind)?.abort();
  const controller = new AbortController();
  running.set(kind, controller);
  return controller.signal;
}

/** An id as a piece of a path. Browsers take "." and ".." out of paths, however they are written. */
function piece(id) {
  if (id === "." || id === "..") throw new Problem(400, `The id “${id}” cannot be part of a web address.`);
  try {
    return encodeURIComponent(id);
  } catch {
    throw new Problem(400, "The id holds half a character (a lone surrogate), which cannot be part of a web address.");
  }
}

async function request(method, path, { query = [], body, signal } = {}) {
  const search = new URLSearchParams(query.filter(([, value]) => value !== null && value !== undefined));
  const address = search.size ? `${path}?${search}` : path;
  for (;;) {
    const used = key();
    const response = await sent(method, address, body, used, signal);
    if (response.ok) return response.json();
    if (response.status !== 401) throw await refusal(response);
    if (key() === used) await askForKey(used !== null, await refusal(response));
    signal?.throwIfAborted();
  }
}

async function sent(method, address, body, used, signal) {
  const headers = { accept: "application/json" };
  if (used !== null) headers.authorization = `Bearer ${used}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(address, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    signal?.throwIfAborted();
    throw new Problem(0, `It may be stopped, or the network is down (${error.message}).`);
  }
}

async function refusal(response) {
  let detail = "";
  try {
    detail = String((await response.json()).detail ?? "");
  } catch {
    // something between here and the service answered, and not in JSON
  }
  const wait = response.headers.get("retry-after");
  const patience = wait !== null && /^\d+$/.test(wait) ? ` It asks to wait ${wait} s.` : "";
  return new Problem(response.status, (detail || "It gave no reason.") + patience);
}

export const models = signal => request("GET", "/model", { signal });

export const searchItems = (text, limit, signal) =>
  request("GET", "/items", {
    query: [
      ["search", text],
      ["limit", limit],
    ],
    signal,
  });

export const similarItems = async (id, { k, model }, signal) =>
  request("GET", `/items/${piece(id)}/similar`, {
    query: [
      ["k", k],
      ["model", model],
    ],
    signal,
  });

export const userHistory = async (user, limit, signal) =>
  request("GET", `/users/${piece(user)}/history`, { query: [["limit", limit]], signal });

export const userAnswers = async (user, { k, model, keepSeen, where }, signal) =>
  request("GET", `/users/${piece(user)}/recommendations`, {
    query: [
      ["k", k],
      ["model", model],
      ["keep_seen", keepSeen],
      ...Object.entries(where).flatMap(([column, values]) => values.map(value => ["where", `${column}:${value}`])),
    ],
    signal,
  });

export const answers = (history, { k, model, keepSeen, where }, signal) =>
  request("POST", "/recommendations", { body: stated({ history, k, model, keep_seen: keepSeen, where }), signal });

/** `whose`: {history}, or {user} for the history that the service keeps. */
export const explanation = (whose, item, { model, keepSeen, where }, signal) =>
  request("POST", "/explanations", { body: stated({ ...whose, item, model, keep_seen: keepSeen, where }), signal });

export const plan = (whose, n, { model, keepSeen, where }, signal) =>
  request("POST", "/plans", { body: stated({ ...whose, n, model, keep_seen: keepSeen, where }), signal });

export const record = event => request("POST", "/events", { body: event });

/** Only what was chosen: what is left out is the service's own default. */
function stated(body) {
  return Object.fromEntries(
    Object.entries(body).filter(
      ([name, value]) => value !== null && value !== undefined && !(name === "where" && !Object.keys(value).length),
    ),
  );
}

/** Whether an error only means that a newer question took this one's place. */
export const superseded = error => error instanceof DOMException && error.name === "AbortError";
