// The field in which the user writes, with the button that sends or stops.

import { h, icon } from "./dom.js";

const MOST_HEIGHT = 240; // pixels

/** Calls `send` with a text, and `stop` while a reply is written. */
export class Composer {
  /**
   * @param {HTMLElement} element
   * @param {{send: (text: string) => boolean, stop: () => void}} actions `send` gives false where
   *   nothing can be sent now: then the text stays
   */
  constructor(element, actions) {
    this.actions = actions;
    this.field = h("textarea", {
      id: "message",
      rows: 1,
      placeholder: "Write a message",
      "aria-label": "Message",
      oninput: () => this.#changed(),
      onkeydown: (event) => this.#key(event),
    });
    this.button = h("button", { type: "button", class: "send", onclick: () => this.#press() });
    this.note = h("p", { class: "note" });
    const box = h("div", { class: "box" }, this.field, this.button);
    // A click anywhere in the box goes to the field.
    box.addEventListener("click", (event) => event.target === box && this.field.focus());
    element.append(box, this.note);
    this.isRunning = false;
    this.show(false);
  }

  /**
   * Show whether a reply is written.
   * @param {boolean} isRunning
   */
  show(isRunning) {
    this.isRunning = isRunning;
    this.button.classList.toggle("stop", isRunning);
    this.button.replaceChildren(icon(isRunning ? "stop" : "send"));
    this.button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
    this.button.setAttribute("aria-label", isRunning ? "Stop" : "Send");
    this.#changed();
  }

  /** @param {string} text what to put into the field */
  fill(text) {
    this.field.value = text;
    this.#changed();
    this.field.focus();
  }

  #changed() {
    const { field } = this;
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight, MOST_HEIGHT)}px`;
    this.button.disabled = !this.isRunning && !field.value.trim();
  }

  #key(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const isForced = event.ctrlKey || event.metaKey;
    // On phones Enter makes a line, as there is no Shift to hold.
    const isPlain = !event.shiftKey && !matchMedia("(pointer: coarse)").matches;
    if (isForced || isPlain) {
      event.preventDefault();
      if (!this.isRunning) this.#press();
    }
  }

  #press() {
    if (this.isRunning) this.actions.stop();
    else if (this.field.value.trim() && this.actions.send(this.field.value)) {
      this.field.value = "";
      this.#changed();
      this.field.focus();
    }
  }
}
