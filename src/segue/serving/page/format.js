// Numbers and names → the words the page shows.

const whole = new Intl.NumberFormat("en");

export const count = number => whole.format(number);

/** `one` or `many` after a number. */
export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A score, an attention weight: three figures are enough to compare. */
export const decimal = number => {
  const size = Math.abs(number);
  if (size !== 0 && size < 0.001) return number.toExponential(1);
  return number.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
};

/** The same with its sign, and a real minus. */
export const signed = number => `${number > 0 ? "+" : number < 0 ? "−" : "±"}${decimal(Math.abs(number))}`;

export const percent = share => `${(100 * share).toFixed(1)} %`;

/** Seconds as a person says them. */
export const duration = seconds =>
  seconds < 90
    ? `${Math.round(seconds)} s`
    : seconds < 5400
      ? `${Math.round(seconds / 60)} min`
      : `${(seconds / 3600).toFixed(1)} h`;

export const day = time => new Date(time).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });

/** What an item is called: its title, or else its id. */
export const nameOf = item => (item.title ? item.title : item.id);

/** A name cut for a sentence. */
export const brief = (text, length = 44) =>
  [...text].length > length ? `${[...text].slice(0, length - 1).join("")}…` : text;
