// Puts the page together: header, list of conversations, chat, experts.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { newConversation } from "./conversation.js";
import { ConversationList } from "./conversation_list.js";
import { mountExperts } from "./experts/panel.js";
import { keyAsker } from "./key_dialog.js";
import { mountLayout } from "./layout.js";
import { ServerState } from "./server_state.js";
import { Settings } from "./settings.js";
import { Storage } from "./storage.js";
import { mountTheme } from "./theme.js";

const get = (id) => document.getElementById(id);
const WORDS = {
  asking: "Connecting",
  ready: "Ready",
  loading: "Loading the model",
  failed: "No model",
  lost: "No connection",
  locked: "Needs a key",
};

api.onKeyWanted(keyAsker(get("key-dialog")));
mountTheme(get("theme"));
const server = new ServerState();
const storage = new Storage();
const settings = new Settings(get("settings-dialog"));
const chat = new Chat(get("chat"), { settings, storage, server });
/** @type {import("./conversation.js").Conversation[]} */
let conversations = [];

// The panel begins when the model is there, so that it asks for nothing in vain.
let experts = null;
let isShown = false;
const layout = mountLayout(get("page"), {
  pause: () => ((isShown = false), experts?.pause()),
  resume: () => ((isShown = true), experts?.resume()),
});

const list = new ConversationList(get("list"), {
  create: () => open(newConversation()),
  open,
  remove(id) {
    conversations = conversations.filter((each) => each.id !== id);
    storage.remove(id);
    if (chat.running?.conversation.id === id) chat.stop(true);
    if (chat.conversation.id === id) open(newConversation());
    else showList();
  },
  restore(conversation) {
    conversations.push(conversation);
    storage.save(conversation);
    showList();
  },
});

function showList() {
  list.show(conversations, chat.conversation.id);
}

function open(conversation) {
  chat.show(conversation);
  layout.leaveList();
  showList();
  if (!matchMedia("(pointer: coarse)").matches) chat.composer.field.focus();
}

function showServer() {
  const { name, text, props } = server.now;
  get("state").dataset.state = name;
  get("state-text").textContent = chat.running ? "Writing" : WORDS[name];
  get("state").title = text || WORDS[name];
  get("model").textContent = props?.model_alias ?? "";
  get("device").textContent = props?.device ?? "";
  document.title = props ? `${props.model_alias} · vkmoe` : "vkmoe";
  get("banner").hidden = !["loading", "failed", "lost", "locked"].includes(name);
  get("banner").textContent = {
    loading: `${text}… You can write already; the reply begins when the model is there.`,
    failed: `${text}. The server's log says more.`,
    locked: "This server asks for an API key. Load the page again to give it.",
    lost: "The server cannot be reached. Is vkmoe still running? This page goes on looking for it.",
  }[name] ?? "";
  if (name === "ready" && !experts) {
    experts = mountExperts(get("experts"), api);
    if (!isShown) experts.pause();
  }
}

chat.addEventListener("change", ({ detail }) => {
  if (!conversations.includes(detail)) conversations.push(detail);
  showList();
  showServer();
});
chat.addEventListener("rate", ({ detail }) => {
  get("rate").textContent = detail > 0 ? `${detail.toFixed(1)} tok/s` : "";
  get("state").classList.toggle("busy", Boolean(chat.running));
  get("state-text").textContent = chat.running ? "Writing" : WORDS[server.now.name];
});
server.addEventListener("change", showServer);
get("settings").addEventListener("click", () => settings.open(server.now.props));
document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented) return; // the map has a use for Escape of its own
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  else if (event.key === "/" && document.activeElement === document.body) {
    event.preventDefault();
    chat.composer.field.focus();
  }
});
addEventListener("pagehide", () => {
  if (chat.running) storage.save(chat.running.conversation);
});

conversations = await storage.all();
for (const conversation of conversations) {
  for (const message of Object.values(conversation.messages)) {
    if (message.ended === "running") message.ended = "stopped"; // the page was closed meanwhile
  }
}
showList();
server.start();
if (!matchMedia("(pointer: coarse)").matches) chat.composer.field.focus();
