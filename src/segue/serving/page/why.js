// One answer → why it is one: what each entry of the history contributed, and where the model's attention lies.

import { explanation, latest, superseded } from "./api.js";
import { detailHead } from "./detail-head.js";
import { element, say } from "./dom.js";
import { brief, counted, decimal, nameOf, signed } from "./format.js";
import { attentionView } from "./attention.js";
import { problemCard } from "./problem.js";
import { signedBar } from "./signed-bar.js";
import { emit, historyToSend, modelNamed, modelToSend, ownHistory, state } from "./state.js";
import { meet, titleOf } from "./titles.js";

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
      const answer = await explained(id, settings, signal);
      if (signal.aborted || state.detail?.kind !== "why") return;
      meet([answer.item]);
      state.explanation = { ...answer, keys };
      say(`Why ${nameOf(answer.item)}: ${headline(answer)}`);
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
        ? element("p", { class: "hint", text: "Asking without each item in turn …" })
        : problemCard(problem, ask);
      return;
    }
    yield detailHead("Why", nameOf(answer.item), facts(answer, model));
    yield contributionsSection(answer);
    if (answer.attention.length) yield attention.section(answer);
    else if (answer.fallback === null && !modelNamed(model).attention)
      yield element("p", { class: "hint", text: "This model has no attention to show." });
  }

  return { ask, draw };
}

/** As the answers: of a user's whole history as the service keeps it, though the page shows the newest of it alone. */
async function explained(id, settings, signal) {
  if (ownHistory()) {
    const { user, entries } = state;
    const whole = ofShown(await explanation({ user }, id, settings, signal), entries);
    if (whole !== null) return whole;
  }
  return explanation({ history: historyToSend() }, id, settings, signal);
}

/** An explanation in the places of the entries shown; null where events came meanwhile, or attention goes beyond them. */
function ofShown({ contributions, attention, ...answer }, entries) {
  const before = contributions.length - entries.length;
  if (before < 0 || entries.some(({ id }, at) => contributions[before + at].item !== id)) return null;
  const moved = places => places.map(place => (place === null ? null : place - before));
  const maps = attention.map(map => ({ ...map, rows: moved(map.rows), columns: moved(map.columns) }));
  if (maps.some(({ columns }) => columns.some(place => place !== null && place < 0))) return null;
  return { ...answer, contributions: contributions.slice(before), attention: maps };
}

function facts({ item, rank }, model) {
  const parts = [
    item.title ? element("bdi", { class: "id", text: item.id }) : null,
    element("span", { text: rank === null ? "not among the answers the rules allow" : `rank ${rank}` }),
    element("span", { text: `score ${decimal(item.score)}` }),
  ];
  if (state.models.length > 1) parts.push(element("bdi", { text: model }));
  return parts.filter(part => part !== null);
}

/** The strongest contributions first. */
function strongest({ contributions }) {
  return contributions
    .map((one, index) => ({ ...one, place: index + 1 }))
    .filter(({ contribution }) => contribution !== null)
    .sort((one, other) => Math.abs(other.contribution) - Math.abs(one.contribution));
}

function headline(answer) {
  if (answer.fallback === "popularity") return "It is here for being popular: the history has nothing the model knows.";
  const known = answer.contributions.filter(one => one.known);
  if (known.length === 1)
    return `“${brief(known[0].title ?? known[0].item)}” is all the model has to go by, so there is nothing to compare.`;
  const [first] = strongest(answer);
  if (first === undefined || first.contribution === 0) return "No single item of the history changes its score.";
  const name = brief(first.title ?? first.item);
  return first.contribution > 0
    ? `Without “${name}” its score would be ${decimal(first.contribution)} lower.`
    : `Without “${name}” its score would be ${decimal(-first.contribution)} higher.`;
}

function contributionsSection(answer) {
  const ordered = strongest(answer);
  const most = Math.max(...ordered.map(({ contribution }) => Math.abs(contribution)), Number.MIN_VALUE);
  const section = element(
    "section",
    { class: "detail-section" },
    element("h2", { text: "What each item contributed" }),
    element("p", { class: "headline", text: headline(answer) }),
  );
  if (!ordered.length) return section;
  section.append(
    element("ol", { class: "contributions" }, ...ordered.slice(0, SHOWN).map(one => contributionRow(one, most))),
    element("p", { class: "hint", text: note(answer, ordered.length) }),
  );
  return section;
}

const contributionRow = ({ item, title, place, contribution }, most) =>
  element(
    "li",
    {},
    element("span", { class: "place", text: String(place) }),
    element("bdi", { class: "contribution-name", text: title ?? item, title: title ?? item }),
    signedBar(contribution, most),
    element("span", { class: "contribution-value", text: signed(contribution) }),
  );

function note({ contributions }, measured) {
  const old = contributions.filter(({ known, contribution }) => known && contribution === null).length;
  const parts = [
    "The score with the whole history, less the score without the item. They need not add up to the score.",
  ];
  if (measured > SHOWN) parts.push("The history shows the rest.");
  if (old) parts.push(`${counted(old, "older item")} ${old === 1 ? "is" : "are"} beyond what the model reads.`);
  return parts.join(" ");
}
