// An explanation → what item-to-item counts add to the score, in words.

import { element } from "./dom.js";
import { decimal, signed } from "./format.js";
import { signedBar } from "./bars.js";

const SHOWN = 6;

export function countsSection({ item, counts, counts_score: sum }) {
  const largest = Math.abs(counts[0].score); // the largest is first
  const hidden = counts.length - SHOWN;
  const others = hidden > 0 ? ` ${hidden} smaller ${hidden === 1 ? "one is" : "ones are"} not shown.` : "";
  return element(
    "section",
    { class: "detail-section" },
    element("h2", { text: "What the counts add" }),
    element("ul", { class: "counts" }, ...counts.slice(0, SHOWN).map(one => countRow(one, largest))),
    element("p", {
      class: "hint",
      text:
        `Of the score, ${decimal(item.score - sum)} is the model’s; counts of the training log add ` +
        `${signed(sum)}.${others}`,
    }),
  );
}

const countRow = (one, largest) =>
  element(
    "li",
    {},
    element("span", { class: "count-sentence" }, ...sentence(one)),
    signedBar(one.score, largest),
    element("span", { class: "contribution-value", text: signed(one.score) }),
  );

/** The sentence, in which the name is isolated from the text direction around it. */
function sentence({ item, title, kind, sentence: text }) {
  if (kind === "repeated") return [text];
  const begin = text.indexOf("“") + 1;
  const end = begin + (title || item).length;
  return [text.slice(0, begin), element("bdi", { text: text.slice(begin, end) }), text.slice(end)];
}
