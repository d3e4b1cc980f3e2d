// The theme that was chosen here before → an attribute on the page, set before anything is drawn so that nothing
// flashes. It is a plain script for that reason: modules run after the first paint.
"use strict";

{
  const chosen = (() => {
    try {
      return localStorage.getItem("segue-theme");
    } catch {
      return null; // storage may be switched off
    }
  })();
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
