// Turns what a model wrote into elements. A model may write anything, also what another put into
// its prompt: nothing of it runs, and nothing of it makes the browser ask another server.

import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { h, icon } from "./dom.js";

const TAGS = [
  ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "code"],
  ...["ul", "ol", "li", "input", "table", "thead", "tbody", "tr", "th", "td"],
  ...["a", "strong", "em", "del", "sub", "sup", "kbd"],
];
const ATTRIBUTES = ["href", "title", "align", "start", "class", "checked", "disabled", "type"];
const HARMLESS = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i; // HTML that models write within markdown

const escaped = (text) =>
  text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // Tags are shown as they were written: they are part of the answer.
    html: ({ text }) => (HARMLESS.test(text.trim()) ? text : escaped(text)),
    // A picture would be fetched from where the model says: it becomes a link.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

/**
 * Keep of HTML what markdown needs.
 * @param {string} html
 * @returns {DocumentFragment} without scripts, styles, pictures, and links that run anything
 */
export function sanitised(html) {
  const found = DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ADD_URI_SAFE_ATTR: ["align", "start", "type"], // else their values would have to be addresses
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of found.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const input of found.querySelectorAll("input")) {
    if (input.type !== "checkbox") input.remove();
    input.disabled = true;
  }
  for (const pre of found.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of found.querySelectorAll("table")) {
    const frame = h("div", { class: "table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return found;
}

/** @param {HTMLPreElement} pre */
function codeBlock(pre) {
  const language = /language-([\w+#-]{1,20})/.exec(pre.firstElementChild?.className ?? "")?.[1];
  const label = h("span", {}, "Copy");
  const copy = h("button", { type: "button", class: "copy-code" }, icon("copy"), label);
  copy.addEventListener("click", async () => {
    const isDone = await copyText(pre.textContent);
    label.textContent = isDone ? "Copied" : "Not allowed";
    setTimeout(() => (label.textContent = "Copy"), 1500);
  });
  const head = h("div", { class: "code-head" }, h("span", {}, language ?? "text"), copy);
  pre.tabIndex = 0; // so that long lines can be scrolled by keyboard
  return h("div", { class: "code" }, head, pre.cloneNode(true));
}

/**
 * Copy a text to the clipboard, also where the page has no secure address.
 * @param {string} text
 * @returns {Promise<boolean>} whether that was allowed
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { value: text, class: "hidden-visually" });
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

/** Split a text into blocks; one that is nested too deeply for the parser is a single one. */
function blocksOf(text) {
  try {
    return marked.lexer(text).filter(({ type }) => type !== "space" && type !== "def");
  } catch {
    return [{ type: "text", raw: text, text }];
  }
}

/** Draw a block; one that cannot be is shown as it was written. */
function drawn(token) {
  try {
    return sanitised(marked.parser([token]));
  } catch {
    return token.raw;
  }
}

/** Shows a text that grows: blocks that did not change keep their elements. */
export class Prose {
  element = h("div", { class: "prose" });
  /** @type {{raw: string, node: HTMLElement}[]} */
  #blocks = [];

  /**
   * Show a text. Mutates the element.
   * @param {string} text markdown
   */
  show(text) {
    const found = blocksOf(text);
    found.forEach((token, index) => {
      const known = this.#blocks[index];
      if (known?.raw === token.raw) return;
      const node = h("div", { class: "block" }, drawn(token));
      if (known) known.node.replaceWith(node);
      else this.element.append(node);
      this.#blocks[index] = { raw: token.raw, node };
    });
    for (const { node } of this.#blocks.splice(found.length)) node.remove();
  }
}
