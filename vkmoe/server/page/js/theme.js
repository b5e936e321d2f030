// Lets the user choose light or dark colours, or those of the system.

import { icon } from "./dom.js";
import { keep, kept } from "./keep.js";

const CHOICES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

/** @param {string} choice one of CHOICES */
function apply(choice) {
  const isDark = choice === "dark" || (choice === "auto" && system.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

/**
 * Let a button go through the choices; each change sets data-theme of the root element.
 * @param {HTMLButtonElement} button
 */
export function mountTheme(button) {
  let choice = kept("theme", "auto");
  if (!CHOICES.includes(choice)) choice = "auto";
  const show = () => {
    apply(choice);
    const name = { auto: "as the system", light: "light", dark: "dark" }[choice];
    button.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[choice]));
    button.title = `Colours: ${name}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    keep("theme", choice);
    show();
  });
  system.addEventListener("change", () => apply(choice));
  show();
}
