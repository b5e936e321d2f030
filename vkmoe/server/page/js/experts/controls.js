// Lets the user change slots, the policy and pins, and shows what the server says to it.

import { h, icon } from "../dom.js";
import { listPins } from "./state.js";

const MOST_PINS = 48; // that are listed one by one

/** Shows what can be changed of a state; `change` sends a change, and gives what is in force. */
export class Controls {
  /** @param {(change: object) => Promise<any>} change rejects with an Error that has a message */
  constructor(change) {
    this.change = change;
    this.isBusy = false;
    const range = { type: "range", min: 1, step: 1, "aria-label": "Slots of each layer" };
    const send = (event) => this.send({ slots: event.target.valueAsNumber });
    this.range = h("input", { ...range, onchange: send });
    this.range.addEventListener("input", () => this.write(this.range.valueAsNumber));
    const number = { type: "number", min: 1, step: 1, inputMode: "numeric" };
    const label = { "aria-label": "Number of slots of each layer" };
    this.number = h("input", { ...number, ...label, onchange: send });
    this.isTyped = false; // a number that was not sent yet, which deltas leave as it is
    this.number.addEventListener("input", () => (this.isTyped = true));
    this.number.addEventListener("blur", () => {
      this.isTyped = false;
      if (this.state && !this.isBusy) this.show(this.state);
    });
    this.most = h("span", { class: "x-muted" });
    const choose = (event) => this.send({ policy: event.target.value });
    this.policy = h("select", { "aria-label": "Policy", onchange: choose });
    this.policyText = h("span", { class: "x-muted" });
    this.pins = h("div", { class: "x-pins" });
    this.message = h("p", { class: "x-message", role: "status" });
    this.fields = h(
      "div",
      { class: "x-fields" },
      field("Slots a layer", this.range, this.number, this.most),
      field("Policy", this.policy, this.policyText),
      field("Pinned", this.pins),
    );
    this.refusal = h("p", { class: "x-refusal" });
    this.element = h(
      "section",
      { class: "x-card x-controls", "aria-label": "Slots, policy and pins" },
      h("h3", {}, "Change it while it runs"),
      this.refusal,
      this.fields,
      this.message,
    );
  }

  /** @param {import("./state.js").ExpertState} state */
  show(state) {
    this.state = state;
    const { cannot_change: refused, slots, most_slots: most, policy, policies } = state.info;
    this.refusal.hidden = !refused;
    if (refused) {
      this.refusal.textContent = `Nothing to change now: ${refused.reason}. To be able to, ${refused.hint}.`;
    }
    // A pool in host memory has a policy even where slots and pins cannot be changed.
    this.fields.hidden = Boolean(refused) && policy === null;
    this.fields.classList.toggle("only-policy", Boolean(refused));
    const nMost = Math.max(1, ...most);
    this.range.max = this.number.max = nMost;
    this.most.textContent = `of ${nMost}`;
    if (!this.isBusy) this.write(Math.max(0, ...slots));
    if (!this.policy.options.length) {
      const options = Object.keys(policies).map((value) => h("option", { value }, value));
      this.policy.append(...options);
    }
    if (policy !== null) this.policy.value = policy;
    this.policy.disabled = policy === null;
    this.policyText.textContent = policy === null ? "nothing moves" : `${policies[policy]} leaves`;
    this.showPins(state);
  }

  /**
   * Send a change, and show what comes of it.
   * @param {object} change a body for PATCH /experts
   */
  async send(change) {
    this.isBusy = true;
    this.isTyped = false;
    this.element.classList.add("is-busy");
    try {
      await this.change(change);
      this.say("");
    } catch (error) {
      this.say(`${error.message}.`.replace(/\.\.$/, "."), true);
    } finally {
      this.isBusy = false;
      this.element.classList.remove("is-busy");
      if (this.state) this.show(this.state);
    }
  }

  say(text, isError = false) {
    this.message.textContent = text;
    this.message.classList.toggle("is-error", isError);
  }

  write(slots) {
    if (!this.isTyped) this.number.value = slots;
    if (this.range.valueAsNumber !== slots) this.range.value = slots;
    const least = Number(this.range.min);
    const share = (slots - least) / Math.max(1, Number(this.range.max) - least);
    this.range.style.setProperty("--filled", `${100 * share}%`);
  }

  showPins(state) {
    const pins = listPins(state);
    const text = JSON.stringify(pins);
    if (text === this.pinned) return;
    this.pinned = text;
    const chips = pins.slice(0, MOST_PINS).map((pin) => {
      const [layer, expert] = [state.info.layers[pin[0]], pin[1]];
      const label = `Unpin expert ${expert} of layer ${layer}`;
      const props = { class: "x-chip", type: "button", "aria-label": label, title: label };
      const name = `${layer} · ${expert}`;
      return h("button", { ...props, onclick: () => this.send({ unpin: [pin] }) }, name, icon("close"));
    });
    const rest = pins.length - chips.length;
    if (rest > 0) chips.push(h("span", { class: "x-muted" }, `and ${rest} more`));
    if (pins.length > 1) {
      const props = { class: "x-chip x-chip-all", type: "button" };
      chips.push(h("button", { ...props, onclick: () => this.send({ unpin: pins }) }, "Unpin all"));
    }
    const none = h("span", { class: "x-muted" }, "none: choose an expert in the map");
    this.pins.replaceChildren(...(pins.length ? chips : [none]));
  }
}

function field(name, ...parts) {
  return h("div", { class: "x-field" }, h("span", { class: "x-name" }, name), h("div", {}, ...parts));
}
