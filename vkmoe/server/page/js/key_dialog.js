// Asks for the API key of a server that was started with one.

import { h } from "./dom.js";

/**
 * Make what asks for the key.
 * @param {HTMLDialogElement} dialog
 * @returns {() => Promise<string | null>} null where the user gave none
 */
export function keyAsker(dialog) {
  let wasAsked = false;
  return () =>
    new Promise((resolve) => {
      const field = h("input", { id: "api-key", type: "password", autocomplete: "off", required: true });
      const words = wasAsked
        ? "That key was not taken. It is the one that vkmoe serve has as --api-key."
        : "It is the one that vkmoe serve has as --api-key. It is forgotten when this tab is closed.";
      const form = h(
        "form",
        { method: "dialog" },
        h("header", {}, h("h2", { id: "key-title" }, "This server asks for an API key")),
        h("p", { class: "muted" }, words),
        h("label", { htmlFor: "api-key" }, "API key"),
        field,
        h(
          "footer",
          {},
          h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
          h("button", { type: "submit", class: "primary", value: "given" }, "Continue"),
        ),
      );
      dialog.returnValue = "";
      dialog.replaceChildren(form);
      dialog.onclose = () => {
        const isGiven = dialog.returnValue === "given" && field.value;
        wasAsked = Boolean(isGiven);
        resolve(isGiven ? field.value : null);
      };
      dialog.showModal();
    });
}
