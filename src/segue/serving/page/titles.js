// Ids → titles that the service has returned, so that a reload or a link shows titles and not ids.

import { latest, searchItems, superseded } from "./api.js";

const STORAGE_KEY = "segue-titles";
const MAX_STORED = 2000;
const CONCURRENT = 4;
const MAX_LOOKUPS = 60; // of the newest entries; older ones show their id

const titles = load();
let saving = null;

function load() {
  try {
    return new Map(JSON.parse(sessionStorage.getItem(STORAGE_KEY)) ?? []);
  } catch {
    return new Map();
  }
}

export const titleOf = id => titles.get(id) ?? null;

/** Store the titles of items that the service returned. */
export function storeTitles(items) {
  for (const { id, title } of items) {
    titles.delete(id); // so that the newest come last
    titles.set(id, title);
  }
  clearTimeout(saving);
  saving = setTimeout(save, 300);
}

function save() {
  try {
    sessionStorage.setItem(STORAGE_KEY, JSON.stringify([...titles].slice(-MAX_STORED)));
  } catch {
    // full or disabled: titles are looked up again
  }
}

addEventListener("pagehide", save);

/** Look up the titles that are missing, newest first; `show` is called after each. */
export async function lookUp(ids, show) {
  const signal = latest("titles");
  const wanted = [...new Set(ids)]
    .filter(id => !titles.has(id))
    .slice(-MAX_LOOKUPS)
    .reverse();
  const work = async () => {
    for (let id = wanted.shift(); id !== undefined; id = wanted.shift()) {
      storeTitles(await search(id, signal));
      show();
    }
  };
  try {
    await Promise.all(Array.from({ length: CONCURRENT }, work));
  } catch (error) {
    if (!superseded(error)) wanted.length = 0; // ids are shown instead; the answers' panel shows the problem
  }
}

/** The item of exactly this id comes first. An id too long to search for is shown as it is. */
async function search(id, signal) {
  try {
    return (await searchItems(id, 1, signal)).items;
  } catch (error) {
    if (error.status === 400) return [];
    throw error;
  }
}
