// Numbers and names → texts of the page.

const whole = new Intl.NumberFormat("en");

export const count = number => whole.format(number);

/** A number with its noun in the singular or plural. */
export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A score or an attention weight with about three digits. */
export const decimal = number => {
  const size = Math.abs(number);
  if (size !== 0 && size < 0.001) return number.toExponential(1);
  return number.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
};

/** The same with its sign. */
export const signed = number => `${number > 0 ? "+" : number < 0 ? "−" : "±"}${decimal(Math.abs(number))}`;

export const percent = share => `${(100 * share).toFixed(1)} %`;

/** Seconds as s, min or h. */
export const duration = seconds =>
  seconds < 90
    ? `${Math.round(seconds)} s`
    : seconds < 5400
      ? `${Math.round(seconds / 60)} min`
      : `${(seconds / 3600).toFixed(1)} h`;

export const day = time => new Date(time).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });

/** An item's title, or its id if it has none. */
export const nameOf = item => (item.title ? item.title : item.id);

/** A name, shortened for a sentence. */
export const brief = (text, length = 44) =>
  [...text].length > length ? `${[...text].slice(0, length - 1).join("")}…` : text;
