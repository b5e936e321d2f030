// The conversation that is shown, and the one reply that may be on its way.

import { Composer } from "./composer.js";
import * as tree from "./conversation.js";
import { h, iconButton } from "./dom.js";
import { MessageView } from "./message_view.js";
import { stream } from "./reply.js";
import { troubleCard, wordsFor } from "./trouble.js";

const SAVE_MS = 2_000; // between two times that a growing reply is saved
const NEAR = 80; // pixels from the end at which the view follows the text
const EXAMPLES = [
  "Explain mixture-of-experts models to a curious teenager",
  "Write a haiku about graphics cards",
  "Plan a weekend in Lisbon, as a table",
];
const STARTS = ["Once upon a time", "The little dog", "It was a cold day and"];

/** Shows one conversation; emits "change" where its title or time changed, and "rate". */
export class Chat extends EventTarget {
  /** @type {{reply: tree.Message, conversation: tree.Conversation, control: AbortController,
   *   isDeleted: boolean} | null} */
  running = null;
  #views = new Map();
  #frame = 0;
  #progress = null;
  #follows = true;
  #top = 0;
  #error = null;
  #resent = new Set(); // messages of the user

  /**
   * @param {HTMLElement} element
   * @param {{settings: import("./settings.js").Settings, storage: import("./storage.js").Storage,
   *   server: import("./server_state.js").ServerState}} parts
   */
  constructor(element, { settings, storage, server }) {
    super();
    Object.assign(this, { settings, storage, server });
    this.conversation = tree.newConversation();
    this.thread = h("div", { class: "thread" });
    this.scroller = h("div", { class: "scroller", tabIndex: -1 }, this.thread);
    this.live = h("div", { class: "hidden-visually", role: "status", "aria-live": "polite" });
    this.toEnd = iconButton("down", "Go to the end", () => this.#scroll(true));
    this.toEnd.classList.add("to-end");
    this.toEnd.hidden = true;
    const foot = h("div", { class: "composer" });
    element.append(this.scroller, h("div", { class: "foot" }, this.toEnd, foot), this.live);
    this.composer = new Composer(foot, {
      send: (text) => this.send(text),
      stop: () => this.stop(),
    });
    this.scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.#scroll()).observe(this.thread);
    server.addEventListener("change", () => this.#serverChanged());
    this.show(this.conversation);
  }

  /**
   * Show another conversation. A reply that is on its way goes on.
   * @param {tree.Conversation} conversation
   */
  show(conversation) {
    this.conversation = conversation;
    this.#error = null;
    this.#rebuild();
    this.#scroll(true);
  }

  /** Have a reply to what the user wrote. @returns {boolean} whether that can be now */
  send(text) {
    if (this.running || this.server.now.name === "failed") return false;
    const last = tree.shown(this.conversation).at(-1);
    const message = tree.add(this.conversation, "user", text, last?.id ?? null);
    this.#reply(message);
    return true;
  }

  /**
   * End the reply; what came of it stays.
   * @param {boolean} isDeleted whether its conversation is: then it is not saved again
   */
  stop(isDeleted = false) {
    if (!this.running) return;
    this.running.isDeleted ||= isDeleted;
    this.running.control.abort();
  }

  /** @param {tree.Message} message what the reply answers */
  async #reply(message) {
    const { conversation } = this;
    const reply = tree.add(conversation, "assistant", "", message.id);
    const control = new AbortController();
    this.running = { reply, conversation, control, isDeleted: false };
    this.#error = null;
    this.#progress = null;
    reply.ended = "running";
    this.#rebuild();
    this.#scroll(true);
    this.composer.show(true);
    this.live.textContent = "The reply is being written.";
    this.#save(conversation);
    let saved = performance.now();
    const body = {
      ...this.settings.fields,
      messages: tree.asked(conversation, reply, this.settings.system),
    };
    try {
      await stream(reply, body, control.signal, (progress, rate) => {
        this.#progress = progress ?? this.#progress;
        this.#emit("rate", rate);
        this.#later();
        if (performance.now() - saved > SAVE_MS) {
          saved = performance.now();
          this.storage.save(conversation);
        }
      });
      if (this.server.now.name === "locked") this.server.look(); // the key was given meanwhile
    } catch (error) {
      this.#failed(conversation, message, reply, error);
    }
    const { isDeleted } = this.running;
    this.running = null;
    if (!reply.text && !reply.thoughts && reply.ended !== "stop" && reply.ended !== "length") {
      tree.remove(conversation, reply);
    }
    this.#emit("rate", 0);
    if (!isDeleted) this.#save(conversation);
    this.composer.show(false);
    if (this.conversation !== conversation) return;
    this.live.textContent = this.#error ? "" : `Reply: ${reply.text}`;
    this.#rebuild();
    this.#scroll();
  }

  #failed(conversation, message, reply, error) {
    if (!("status" in error)) console.error(error); // a mistake of the page
    const hasBegun = Boolean(reply.text || reply.thoughts);
    if (this.conversation === conversation) this.#error = { error, message, hasBegun };
    this.server.look();
  }

  #serverChanged() {
    if (this.running) return;
    if (this.server.now.name === "ready" && this.#error && wordsFor(this.#error.error).isPassing) {
      const { message, hasBegun } = this.#error;
      this.#error = null;
      if (!hasBegun && !this.#resent.has(message)) {
        this.#resent.add(message); // once: it may be what the server fails at
        this.#reply(message);
        return;
      }
    }
    this.#rebuild();
  }

  #save(conversation) {
    conversation.changed = Date.now();
    this.storage.save(conversation);
    this.dispatchEvent(new CustomEvent("change", { detail: conversation }));
  }

  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** Draw the growing reply with the next frame: once, however much comes until then. */
  #later() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (!this.running || this.running.conversation !== this.conversation) return;
      this.#views.get(this.running.reply.id)?.draw(this.#progress);
      this.#scroll();
    });
  }

  /** Put the messages that are shown in order; elements of those that were there stay. */
  #rebuild() {
    const messages = tree.shown(this.conversation);
    const found = new Map();
    for (const message of messages) {
      let view = this.#views.get(message.id);
      if (view) view.draw(this.#progress);
      else view = new MessageView(this.conversation, message, this.#actions);
      found.set(message.id, view);
    }
    this.#views = found;
    const all = [...found.values()].map((view) => view.element);
    if (!messages.length) all.push(this.#welcome());
    if (this.#error) {
      const { error, message } = this.#error;
      all.push(troubleCard(error, () => !this.running && this.#reply(message)));
    }
    const now = this.thread.children;
    if (all.length !== now.length || all.some((element, i) => element !== now[i])) {
      this.thread.replaceChildren(...all); // else the focus and what is selected stay
    }
    this.#showContext(messages);
  }

  #actions = {
    again: (message) => {
      const isUser = message.role === "user";
      if (!this.running) this.#reply(isUser ? message : this.conversation.messages[message.parent]);
    },
    edit: (message, text) => {
      if (this.running) return;
      this.#reply(tree.add(this.conversation, "user", text, message.parent));
    },
    choose: (message) => {
      if (this.running) return;
      tree.choose(this.conversation, message);
      this.#error = null; // of a branch that is not shown any more
      this.#rebuild();
      this.storage.save(this.conversation);
      this.#views.get(message.id)?.element.querySelector(".bar button")?.focus();
    },
  };

  #showContext(messages) {
    const found = messages.findLast((message) => message.statistics?.promptTokens)?.statistics;
    const size = this.server.now.props?.default_generation_settings?.n_ctx;
    const used = (found?.promptTokens ?? 0) + (found?.tokens ?? 0);
    this.composer.note.textContent =
      found && size
        ? `${used.toLocaleString("en")} of ${size.toLocaleString("en")} tokens of the context used`
        : "Enter sends, Shift+Enter begins a line, Esc stops";
  }

  #welcome() {
    const { props } = this.server.now;
    const goesOn = props && props.has_chat_template === false;
    const words = goesOn
      ? "This model has no chat template: it goes on with the text that you write."
      : "What you write stays in this browser and on the server that runs the model.";
    const choices = (goesOn ? STARTS : EXAMPLES).map((text) =>
      h("button", { type: "button", class: "example", onclick: () => this.composer.fill(text) }, text),
    );
    return h(
      "div",
      { class: "welcome" },
      h("h1", {}, props?.model_alias ?? "vkmoe"),
      h("p", { class: "muted" }, words),
      h("div", { class: "examples" }, ...choices),
    );
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR;
    // Only the user goes up; where the text grew, the end is what moved away.
    this.#follows = isNear || (this.#follows && scrollTop >= this.#top);
    this.#top = scrollTop;
    this.toEnd.hidden = isNear;
  }

  /** Go to the end, unless the user looks at what was before. */
  #scroll(isForced = false) {
    this.#follows ||= isForced;
    if (this.#follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
