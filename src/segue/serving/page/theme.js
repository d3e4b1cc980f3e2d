// Sets the theme that was chosen earlier before the first paint, so that the page does not flash. Modules run after it,
// so this is a plain script.
"use strict";

{
  const chosen = (() => {
    try {
      return localStorage.getItem("segue-theme");
    } catch {
      return null; // storage may be disabled
    }
  })();
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
