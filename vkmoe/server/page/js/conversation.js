// Holds conversations as plain values. Messages form a tree: to edit one or to have a reply again
// adds a branch beside it, so nothing that was written is lost.

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent id of the message before it
 * @property {"user" | "assistant"} role
 * @property {string} text
 * @property {string} thoughts of a reply
 * @property {"" | "running" | "stop" | "length" | "stopped" | "error"} ended how a reply ended
 * @property {Statistics | null} statistics of a reply
 * @property {string | null} next id of the branch that was shown last behind it
 */

/**
 * @typedef {object} Statistics
 * @property {number} tokens of the reply
 * @property {number} rate tokens a second
 * @property {number | null} firstMs milliseconds from the request to the first token
 * @property {number | null} thoughtMs milliseconds that its thoughts took
 * @property {number} promptTokens
 */

/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title empty until the first message
 * @property {number} changed milliseconds since 1970
 * @property {string | null} first id of the first message that is shown
 * @property {Record<string, Message>} messages by their ids
 */

const MOST_TITLE = 60; // characters

/** @returns {string} a name that no other value has */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) =>
    byte.toString(36).padStart(2, "0"),
  ).join("");
}

/** @returns {Conversation} one without messages */
export function newConversation() {
  return { id: newId(), title: "", changed: Date.now(), first: null, messages: {} };
}

/**
 * List the messages that are shown, from the first to the last.
 * @param {Conversation} conversation
 * @returns {Message[]}
 */
export function shown(conversation) {
  const found = [];
  let id = conversation.first;
  while (id !== null && conversation.messages[id]) {
    found.push(conversation.messages[id]);
    id = conversation.messages[id].next;
  }
  return found;
}

/**
 * List a message and the branches beside it, in the order in which they were made.
 * @param {Conversation} conversation
 * @param {Message} message
 * @returns {Message[]}
 */
export function branches(conversation, message) {
  return Object.values(conversation.messages).filter((each) => each.parent === message.parent);
}

/**
 * Show this branch. Mutates the conversation.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function choose(conversation, message) {
  if (message.parent === null) conversation.first = message.id;
  else conversation.messages[message.parent].next = message.id;
}

/**
 * Add a message behind another, and show it. Mutates the conversation.
 * @param {Conversation} conversation
 * @param {"user" | "assistant"} role
 * @param {string} text
 * @param {string | null} parent id of the message before it
 * @returns {Message}
 */
export function add(conversation, role, text, parent) {
  /** @type {Message} */
  const message = {
    id: newId(),
    parent,
    role,
    text,
    thoughts: "",
    ended: "",
    statistics: null,
    next: null,
  };
  conversation.messages[message.id] = message;
  conversation.changed = Date.now();
  if (!conversation.title) {
    const line = text.trim().split("\n", 1)[0];
    conversation.title = line.length > MOST_TITLE ? `${line.slice(0, MOST_TITLE - 1)}…` : line;
  }
  choose(conversation, message);
  return message;
}

/**
 * Take away a reply of which nothing came. Mutates the conversation.
 * @param {Conversation} conversation
 * @param {Message} message without messages behind it
 */
export function remove(conversation, message) {
  const others = branches(conversation, message).filter((each) => each !== message);
  delete conversation.messages[message.id];
  const left = others.at(-1)?.id ?? null;
  if (message.parent === null) conversation.first = left;
  else conversation.messages[message.parent].next = left;
}

/**
 * Write the messages before a reply as a request has them.
 * @param {Conversation} conversation
 * @param {Message} reply
 * @param {string} system the system prompt, or ""
 * @returns {{role: string, content: string}[]}
 */
export function asked(conversation, reply, system) {
  const found = [];
  for (let id = reply.parent; id !== null; id = conversation.messages[id].parent) {
    const { role, text } = conversation.messages[id];
    found.unshift({ role, content: text });
  }
  if (system.trim()) found.unshift({ role: "system", content: system });
  return found;
}
