// Ids → titles met so far, so that a reload or a link shows names and not bare ids.

import { latest, searchItems, superseded } from "./api.js";

const PLACE = "segue-titles";
const MOST_KEPT = 2000;
const AT_ONCE = 4;
const MOST_LOOKED_UP = 60; // of the newest entries; older ones show their id

const met = remembered();
let saving = null;

function remembered() {
  try {
    return new Map(JSON.parse(sessionStorage.getItem(PLACE)) ?? []);
  } catch {
    return new Map();
  }
}

export const titleOf = id => met.get(id) ?? null;

/** Keep the titles of items the service named. */
export function meet(items) {
  for (const { id, title } of items) {
    met.delete(id); // so that the newest are last
    met.set(id, title);
  }
  clearTimeout(saving);
  saving = setTimeout(save, 300);
}

function save() {
  try {
    sessionStorage.setItem(PLACE, JSON.stringify([...met].slice(-MOST_KEPT)));
  } catch {
    // full or switched off: titles are looked up again
  }
}

addEventListener("pagehide", save);

/** Look up those not met yet, newest first; `show` is called after each. */
export async function lookUp(ids, show) {
  const signal = latest("titles");
  const wanted = [...new Set(ids)]
    .filter(id => !met.has(id))
    .slice(-MOST_LOOKED_UP)
    .reverse();
  const work = async () => {
    for (let id = wanted.shift(); id !== undefined; id = wanted.shift()) {
      meet(await found(id, signal));
      show();
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  } catch (error) {
    if (!superseded(error)) wanted.length = 0; // ids stand for titles; the answers' panel says what is wrong
  }
}

/** The item of exactly this id comes first. An id too long to search for is shown as it is. */
async function found(id, signal) {
  try {
    return (await searchItems(id, 1, signal)).items;
  } catch (error) {
    if (error.status === 400) return [];
    throw error;
  }
}
