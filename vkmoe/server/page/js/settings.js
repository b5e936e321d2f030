// Lets the user set the system prompt and how tokens are chosen. What is left empty is as the
// server has it.

import { h, iconButton } from "./dom.js";
import { keep, kept } from "./keep.js";

/** Fields of a request, with their labels and limits; `given` is their name in /props. */
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.01, hint: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.001, hint: "likeliest tokens up to this sum" },
  { name: "top_k", label: "Top-k", min: 0, step: 1, hint: "this many likeliest tokens; 0: all" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.001, hint: "share of the likeliest token's chance" },
  { name: "repeat_penalty", label: "Repeat penalty", min: 0.01, max: 5, step: 0.01, hint: "1: none" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, hint: "of a reply", given: "as many as fit" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "the same seed gives the same reply", given: "random" },
];
const EFFORTS = ["", "none", "low", "medium", "high"];

/** Holds the settings, which last in the browser, and the dialog that changes them. */
export class Settings {
  /** @type {{system: string, reasoning_effort: string, [name: string]: number | string}} */
  values = { system: "", reasoning_effort: "", ...kept("settings", {}) };

  /** @param {HTMLDialogElement} dialog */
  constructor(dialog) {
    this.dialog = dialog;
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // a click beside the form
    });
  }

  /** @returns {string} the system prompt, or "" */
  get system() {
    return String(this.values.system ?? "");
  }

  /** @returns {object} the fields of a request that the user has set */
  get fields() {
    const found = {};
    for (const { name } of NUMBERS) {
      if (typeof this.values[name] === "number") found[name] = this.values[name];
    }
    if (this.values.reasoning_effort) found.reasoning_effort = this.values.reasoning_effort;
    return found;
  }

  /**
   * Show the dialog.
   * @param {any} props what /props says, or null; its values show where a field is empty
   */
  open(props) {
    const given = props?.default_generation_settings?.params ?? {};
    const system = h("textarea", {
      id: "setting-system",
      rows: 4,
      value: this.system,
      placeholder: "None. What the model is to know or to heed in every conversation.",
      oninput: () => this.#set("system", system.value),
    });
    const effort = h(
      "select",
      { id: "setting-effort", onchange: () => this.#set("reasoning_effort", effort.value) },
      ...EFFORTS.map((value) => h("option", { value }, value || "as the model has it")),
    );
    effort.value = String(this.values.reasoning_effort ?? "");
    const form = h(
      "form",
      { method: "dialog" },
      h(
        "header",
        {},
        h("h2", { id: "settings-title" }, "Settings"),
        iconButton("close", "Close settings", () => this.dialog.close()),
      ),
      h("label", { htmlFor: "setting-system" }, "System prompt"),
      system,
      h("h3", {}, "Sampling"),
      h("p", { class: "muted" }, "Empty fields are as the server has them."),
      h("div", { class: "fields" }, ...NUMBERS.map((each) => this.#number(each, given))),
      h("label", { htmlFor: "setting-effort" }, "Thinking"),
      effort,
      h("p", { class: "muted" }, "How much a model that can think is to think."),
      h(
        "footer",
        {},
        h("button", { type: "button", class: "quiet", onclick: () => this.#reset(props) }, "Reset all"),
        h("button", { type: "submit", class: "primary" }, "Done"),
      ),
    );
    this.dialog.replaceChildren(form);
    if (!this.dialog.open) this.dialog.showModal();
  }

  /** Make a field for a number, which is kept when it is valid. */
  #number({ name, label, hint, given, ...limits }, params) {
    const id = `setting-${name}`;
    const usual = given ?? params[name] ?? "";
    const value = this.values[name] ?? "";
    const input = h("input", { id, type: "number", ...limits, value, placeholder: `${usual}` });
    input.setAttribute("aria-describedby", `${id}-hint`);
    input.addEventListener("input", () => {
      if (input.validity.valid) this.#set(name, input.value === "" ? null : input.valueAsNumber);
    });
    const text = h("small", { id: `${id}-hint` }, hint);
    return h("div", { class: "field" }, h("label", { htmlFor: id }, label), input, text);
  }

  #set(name, value) {
    this.values[name] = value;
    keep("settings", this.values);
  }

  #reset(props) {
    this.values = { system: "", reasoning_effort: "" };
    keep("settings", this.values);
    this.open(props);
  }
}
