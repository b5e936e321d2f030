// The list of conversations: to begin one, to go to one, to delete one.

import { h, iconButton } from "./dom.js";

const UNDO_MS = 8_000;
const DAY_MS = 86_400_000;

/** Shows conversations by the day on which they changed. */
export class ConversationList {
  /** @type {import("./conversation.js").Conversation[]} */
  #all = [];
  #shown = "";

  /**
   * @param {HTMLElement} element
   * @param {{create: () => void, open: (conversation: any) => void, remove: (id: string) => void,
   *   restore: (conversation: any) => void}} actions
   */
  constructor(element, actions) {
    this.actions = actions;
    const begin = h("button", { type: "button", class: "new", onclick: actions.create });
    begin.append(iconMark(), "New conversation");
    this.items = h("nav", { class: "items", "aria-label": "Conversations" });
    this.toast = h("div", { class: "toast", role: "status", hidden: true });
    element.append(begin, this.items, this.toast);
  }

  /**
   * Show these conversations.
   * @param {import("./conversation.js").Conversation[]} all
   * @param {string} shown id of the one that is open
   */
  show(all, shown) {
    this.#all = [...all].sort((a, b) => b.changed - a.changed);
    this.#shown = shown;
    const groups = new Map();
    for (const each of this.#all) {
      const name = dayName(each.changed);
      groups.set(name, [...(groups.get(name) ?? []), this.#item(each)]);
    }
    const found = [...groups].map(([name, items]) =>
      h("section", {}, h("h2", {}, name), h("ul", {}, ...items)),
    );
    if (!found.length) found.push(h("p", { class: "muted empty" }, "Nothing here yet."));
    this.items.replaceChildren(...found);
  }

  #item(conversation) {
    const title = conversation.title || "Untitled";
    const open = h(
      "button",
      { type: "button", class: "open", title, onclick: () => this.actions.open(conversation) },
      title,
    );
    if (conversation.id === this.#shown) open.setAttribute("aria-current", "true");
    const label = `Delete the conversation ${title}`;
    const remove = iconButton("trash", label, () => this.#remove(conversation));
    return h("li", {}, open, remove);
  }

  #remove(conversation) {
    this.actions.remove(conversation.id);
    clearTimeout(this.timer);
    const undo = () => {
      this.toast.hidden = true;
      this.actions.restore(conversation);
    };
    const button = h("button", { type: "button", class: "quiet", onclick: undo }, "Undo");
    this.toast.replaceChildren("Deleted.", button);
    this.toast.hidden = false;
    this.timer = setTimeout(() => (this.toast.hidden = true), UNDO_MS);
  }
}

/** Draw the mark of the button that begins a conversation. */
function iconMark() {
  return h("span", { class: "mark", "aria-hidden": "true" }, "+");
}

/** @param {number} time in milliseconds since 1970 */
function dayName(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 7 * DAY_MS) return "Last week";
  return "Before";
}
