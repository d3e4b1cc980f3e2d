// Calls of the service's API: each returns its answer or throws a Problem with the reason.

import { askForKey, key } from "./key.js";

const TITLES = {
  0: "The service does not answer",
  400: "The service cannot use this request",
  401: "A key is needed",
  403: "This key does not allow that",
  404: "Not found",
  413: "The request is too large",
  429: "Too many requests",
  500: "The service failed",
  503: "The service is busy",
};

/** Why a request has no answer. Status 0: there was no response. */
class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
    this.title = TITLES[status] ?? `The service answered ${status}`;
    this.detail = detail;
  }
}

const controllers = new Map();

/** A signal for the latest request of a kind: the next call aborts the request before, whose answer is dropped. */
export function latest(kind) {
  controllers.get(kind)?.abort();
  const controller = new AbortController();
  controllers.set(kind, controller);
  return controller.signal;
}

/** An id as a piece of a path. Browsers remove "." and ".." from paths, even encoded. */
function piece(id) {
  if (id === "." || id === "..") throw new Problem(400, `The id “${id}” cannot be part of a web address.`);
  try {
    return encodeURIComponent(id);
  } catch {
    throw new Problem(400, "The id has a lone surrogate (half a character), which cannot be part of a web address.");
  }
}

async function request(method, path, { query = [], body, signal } = {}) {
  const search = new URLSearchParams(query.filter(([, value]) => value !== null && value !== undefined));
  const address = search.size ? `${path}?${search}` : path;
  for (;;) {
    const current = key();
    const response = await send(method, address, body, current, signal);
    if (response.ok) return response.json();
    if (response.status !== 401) throw await refusal(response);
    if (key() === current) await askForKey(current !== null, await refusal(response));
    signal?.throwIfAborted();
  }
}

async function send(method, address, body, current, signal) {
  const headers = { accept: "application/json" };
  if (current !== null) headers.authorization = `Bearer ${current}`;
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
    // a proxy answered, and not in JSON
  }
  const wait = response.headers.get("retry-after");
  const waiting = wait !== null && /^\d+$/.test(wait) ? ` Wait ${wait} s.` : "";
  return new Problem(response.status, (detail || "It gave no reason.") + waiting);
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
  request("POST", "/recommendations", { body: withoutDefaults({ history, k, model, keep_seen: keepSeen, where }), signal });

/** `subject`: {history}, or {user} for the user's history in the store. */
export const explanation = (subject, item, { model, keepSeen, where }, signal) =>
  request("POST", "/explanations", { body: withoutDefaults({ ...subject, item, model, keep_seen: keepSeen, where }), signal });

export const plan = (subject, n, { model, keepSeen, where }, signal) =>
  request("POST", "/plans", { body: withoutDefaults({ ...subject, n, model, keep_seen: keepSeen, where }), signal });

export const record = event => request("POST", "/events", { body: event });

/** The fields that were set; the service has defaults for the others. */
function withoutDefaults(body) {
  return Object.fromEntries(
    Object.entries(body).filter(
      ([name, value]) => value !== null && value !== undefined && !(name === "where" && !Object.keys(value).length),
    ),
  );
}

/** Whether an error only means that a newer request replaced this one. */
export const superseded = error => error instanceof DOMException && error.name === "AbortError";
