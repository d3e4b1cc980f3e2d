// An answer → its explanation: what counts add, the contribution of each entry of the history, and the attention weights.

import { explanation, latest, superseded } from "./api.js";
import { detailHead } from "./detail-head.js";
import { element, announce } from "./dom.js";
import { brief, counted, decimal, nameOf, signed } from "./format.js";
import { attentionView } from "./attention.js";
import { countsSection } from "./counts.js";
import { problemCard } from "./problem.js";
import { signedBar } from "./bars.js";
import { emit, historyToSend, modelNamed, modelToSend, ownHistory, state } from "./state.js";
import { storeTitles, titleOf } from "./titles.js";

const SHOWN = 6; // contributions named here; the history shows them all

/** `redraw` is called when there is something new to draw. */
export function whyView(redraw) {
  let problem = null;
  const attention = attentionView(redraw);

  async function ask() {
    const signal = latest("why");
    const { id, model } = state.detail;
    const keys = state.entries.map(({ key }) => key);
    problem = null;
    try {
      const settings = { model: modelToSend(model), keepSeen: state.keepSeen, where: state.where };
      const answer = await fetchExplanation(id, settings, signal);
      if (signal.aborted || state.detail?.kind !== "why") return;
      storeTitles([answer.item]);
      state.explanation = { ...answer, keys };
      announce(`Why ${nameOf(answer.item)}: ${headline(answer)}`);
      emit("explanation");
    } catch (error) {
      if (superseded(error)) return;
      problem = error;
      state.explanation = null;
    }
    redraw();
  }

  function* draw() {
    const { id, model } = state.detail;
    const answer = state.explanation;
    const name = titleOf(id) ?? id;
    if (answer === null) {
      yield detailHead("Why", name, [element("bdi", { class: "id", text: id })]);
      yield problem === null
        ? element("p", { class: "hint", text: "Computing the score without each item …" })
        : problemCard(problem, ask);
      return;
    }
    yield detailHead("Why", nameOf(answer.item), facts(answer, model));
    if (answer.counts.length) yield countsSection(answer);
    yield contributionsSection(answer);
    if (answer.attention.length) yield attention.section(answer);
    else if (answer.fallback === null && !modelNamed(model).attention)
      yield element("p", { class: "hint", text: "This model has no attention to show." });
  }

  return { ask, draw };
}

/** The explanation of the user's whole history in the store, though the page shows only its newest events. */
async function fetchExplanation(id, settings, signal) {
  if (ownHistory()) {
    const { user, entries } = state;
    const whole = alignedWith(await explanation({ user }, id, settings, signal), entries);
    if (whole !== null) return whole;
  }
  return explanation({ history: historyToSend() }, id, settings, signal);
}

/** An explanation with the indices of the entries shown; null if events arrived meanwhile, or attention needs more. */
function alignedWith({ contributions, attention, ...answer }, entries) {
  const before = contributions.length - entries.length;
  if (before < 0 || entries.some(({ id }, at) => contributions[before + at].item !== id)) return null;
  const shifted = indices => indices.map(index => (index === null ? null : index - before));
  const maps = attention.map(map => ({ ...map, rows: shifted(map.rows), columns: shifted(map.columns) }));
  if (maps.some(({ columns }) => columns.some(index => index !== null && index < 0))) return null;
  return { ...answer, contributions: contributions.slice(before), attention: maps };
}

function facts({ item, rank }, model) {
  const parts = [
    item.title ? element("bdi", { class: "id", text: item.id }) : null,
    element("span", { text: rank === null ? "excluded by the rules" : `rank ${rank}` }),
    element("span", { text: `score ${decimal(item.score)}` }),
  ];
  if (state.models.length > 1) parts.push(element("bdi", { text: model }));
  return parts.filter(part => part !== null);
}

/** The strongest contributions first. */
function strongest({ contributions }) {
  return contributions
    .map((one, index) => ({ ...one, position: index + 1 }))
    .filter(({ contribution }) => contribution !== null)
    .sort((one, other) => Math.abs(other.contribution) - Math.abs(one.contribution));
}

function headline(answer) {
  if (answer.fallback === "popularity") return "It is recommended because it is popular: the model knows no item of the history.";
  const known = answer.contributions.filter(one => one.known);
  if (known.length === 1)
    return `“${brief(known[0].title ?? known[0].item)}” is the only item that the model knows, so no contribution can be computed.`;
  const [first] = strongest(answer);
  if (first === undefined || first.contribution === 0) return "No single item of the history changes its score.";
  const name = brief(first.title ?? first.item);
  return first.contribution > 0
    ? `Without “${name}” its score would be ${decimal(first.contribution)} lower.`
    : `Without “${name}” its score would be ${decimal(-first.contribution)} higher.`;
}

function contributionsSection(answer) {
  const ordered = strongest(answer);
  const largest = Math.max(...ordered.map(({ contribution }) => Math.abs(contribution)), Number.MIN_VALUE);
  const section = element(
    "section",
    { class: "detail-section" },
    element("h2", { text: "What each item contributed" }),
    element("p", { class: "headline", text: headline(answer) }),
  );
  if (!ordered.length) return section;
  section.append(
    element("ol", { class: "contributions" }, ...ordered.slice(0, SHOWN).map(one => contributionRow(one, largest))),
    element("p", { class: "hint", text: note(answer, ordered.length) }),
  );
  return section;
}

const contributionRow = ({ item, title, position, contribution }, largest) =>
  element(
    "li",
    {},
    element("span", { class: "position", text: String(position) }),
    element("bdi", { class: "contribution-name", text: title ?? item, title: title ?? item }),
    signedBar(contribution, largest),
    element("span", { class: "contribution-value", text: signed(contribution) }),
  );

function note({ contributions }, measured) {
  const old = contributions.filter(({ known, contribution }) => known && contribution === null).length;
  const parts = [
    "The score with the whole history minus the score without the item. Contributions need not sum to the score.",
  ];
  if (measured > SHOWN) parts.push("The history shows the others.");
  if (old) parts.push(`${counted(old, "older item")} ${old === 1 ? "is" : "are"} outside the model’s window.`);
  return parts.join(" ");
}
