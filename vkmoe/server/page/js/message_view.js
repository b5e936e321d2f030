// Shows one message: its text, thoughts, figures, and what can be done with it.

import { branches } from "./conversation.js";
import { h, icon, iconButton } from "./dom.js";
import { Prose, copyText } from "./markdown.js";

/**
 * @typedef {object} Actions what a message lets the user do
 * @property {(message: import("./conversation.js").Message) => void} again have another reply
 * @property {(message: import("./conversation.js").Message, text: string) => void} edit send it anew
 * @property {(message: import("./conversation.js").Message) => void} choose show this branch
 */

const number = new Intl.NumberFormat("en");

/** Shows a message that may still grow: `draw` brings the element up to date. */
export class MessageView {
  #prose = new Prose();
  #thoughts = new Prose();
  #drawn = "";
  #drawnThoughts = "";
  #isOpened = false; // the user chose to see the thoughts, or not to

  /**
   * @param {import("./conversation.js").Conversation} conversation
   * @param {import("./conversation.js").Message} message
   * @param {Actions} actions
   */
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.summary = h("summary", { onclick: () => (this.#isOpened = true) });
    this.details = h("details", { class: "thoughts", hidden: true }, this.summary, this.#thoughts.element);
    this.body = h("div", { class: "body" });
    this.waiting = h("div", { class: "waiting", hidden: true });
    this.bar = h("div", { class: "bar" });
    const label = message.role === "user" ? "You" : "Reply";
    this.element = h(
      "article",
      { class: `message ${message.role}`, "aria-label": label },
      this.details,
      this.waiting,
      this.body,
      this.bar,
    );
    if (message.role === "user") this.body.textContent = message.text;
    else this.body.append(this.#prose.element);
    this.draw(null);
  }

  /**
   * Show what the message is now.
   * @param {import("./reply.js").Progress | null} progress how far the prompt is read
   */
  draw(progress) {
    const { role, text, thoughts, ended } = this.message;
    const isRunning = ended === "running";
    this.element.classList.toggle("running", isRunning);
    if (role === "assistant") {
      if (this.#drawn !== text) this.#prose.show(text);
      this.#drawn = text;
      this.#drawThoughts(thoughts, isRunning && !text);
      this.waiting.hidden = !isRunning || Boolean(text || thoughts);
      if (!this.waiting.hidden) this.#drawWaiting(progress);
    }
    if (isRunning) this.bar.replaceChildren();
    else if (!this.element.classList.contains("editing")) this.#drawBar();
  }

  #drawThoughts(thoughts, isThinking) {
    this.details.hidden = !thoughts;
    if (!thoughts) return;
    const ms = this.message.statistics?.thoughtMs;
    const done = ms >= 50 ? `Thought for ${(ms / 1e3).toFixed(1)} s` : "Thoughts";
    this.summary.textContent = isThinking ? "Thinking…" : done;
    this.summary.classList.toggle("shimmer", isThinking);
    if (!this.#isOpened) this.details.open = false;
    if (this.#drawnThoughts !== thoughts) this.#thoughts.show(thoughts);
    this.#drawnThoughts = thoughts;
  }

  #drawWaiting(progress) {
    const share = progress?.total ? progress.read / progress.total : 0;
    const words = progress?.total
      ? `Reading the prompt · ${number.format(progress.read)} of ${number.format(progress.total)} tokens`
      : "Waiting for the model";
    this.waiting.replaceChildren(h("span", { class: "dots" }, h("i"), h("i"), h("i")), words);
    this.waiting.style.setProperty("--share", `${100 * share}%`);
  }

  #drawBar() {
    const { message, actions } = this;
    const copy = iconButton("copy", "Copy this text", async () => {
      if (!(await copyText(message.text))) return;
      copy.replaceChildren(icon("check"));
      setTimeout(() => copy.replaceChildren(icon("copy")), 1500);
    });
    const buttons =
      message.role === "user"
        ? [
            iconButton("edit", "Edit and send anew", () => this.#edit()),
            ...(message.next ? [] : [iconButton("again", "Have a reply", () => actions.again(message))]),
          ]
        : [iconButton("again", "Write another reply", () => actions.again(message))];
    this.bar.replaceChildren(...this.#branches(), copy, ...buttons, ...this.#figures());
  }

  /** List the branches beside this one: buttons to go to them, where there are any. */
  #branches() {
    const all = branches(this.conversation, this.message);
    if (all.length < 2) return [];
    const at = all.indexOf(this.message);
    const to = (name, label, other) => {
      const button = iconButton(name, label, () => this.actions.choose(all[other]));
      button.disabled = !all[other];
      return button;
    };
    return [
      to("left", "Show the version before", at - 1),
      h("span", { class: "count" }, `${at + 1} / ${all.length}`),
      to("right", "Show the next version", at + 1),
    ];
  }

  #figures() {
    const { statistics, ended } = this.message;
    const words = { length: "stopped at its limit of tokens", stopped: "stopped", error: "broken off" };
    const found = [];
    if (statistics) {
      if (statistics.rate > 0) found.push(`${statistics.rate.toFixed(1)} tok/s`);
      if (statistics.firstMs !== null) {
        found.push(`${(statistics.firstMs / 1e3).toFixed(2)} s to the first token`);
      }
      found.push(`${number.format(statistics.tokens)} tokens`);
    }
    if (words[ended]) found.push(words[ended]);
    return found.length ? [h("span", { class: "figures" }, found.join(" · "))] : [];
  }

  /** Put a field in the place of the text, until it is sent or given up. */
  #edit() {
    const field = h("textarea", { value: this.message.text, "aria-label": "Edit your message" });
    const fit = () => {
      field.style.height = "auto";
      field.style.height = `${field.scrollHeight + 2}px`;
    };
    const close = () => {
      this.element.classList.remove("editing");
      this.body.textContent = this.message.text;
      this.#drawBar();
      this.bar.querySelector("[aria-label^=Edit]").focus();
    };
    const send = () => {
      if (field.value.trim()) this.actions.edit(this.message, field.value);
    };
    field.addEventListener("input", fit);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // which would stop a reply
        close();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    });
    this.element.classList.add("editing");
    this.body.replaceChildren(field);
    this.bar.replaceChildren(
      h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: send }, "Send"),
    );
    fit();
    field.focus();
  }
}
