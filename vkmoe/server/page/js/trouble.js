// Says what went wrong with a reply, and what to try.

import { h, icon } from "./dom.js";

/**
 * Find the words for an error.
 * @param {import("./api.js").ApiError} error
 * @returns {{title: string, text: string, advice: string, isPassing: boolean}} `isPassing` says
 *   that the same may work when the server is ready again
 */
export function wordsFor(error) {
  const { status, code } = error;
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  if (code === "context_length_exceeded") {
    return {
      title: "This conversation is too long for the model's context",
      text: message,
      advice: "Begin a new conversation, edit an earlier message to branch off there, or shorten the system prompt.",
      isPassing: false,
    };
  }
  if (code === "queue_full") {
    return { title: "The server is busy", text: message, advice: "Try again in a moment.", isPassing: false };
  }
  if (status === 0) {
    return {
      title: "The connection to the server was lost",
      text: message,
      advice: "Is vkmoe still running? This page goes on looking for it.",
      isPassing: true,
    };
  }
  if (status === 401) {
    return {
      title: "The server asks for an API key",
      text: message,
      advice: "Try again and give the key that the server was started with (--api-key).",
      isPassing: false,
    };
  }
  if (status === 503) {
    const isLoading = message.startsWith("Loading");
    return {
      title: isLoading ? "The model is still loading" : "The model is not there",
      text: isLoading ? "The reply begins when the model is there." : message,
      advice: isLoading ? "The dot at the top turns green then." : "The server's log says more.",
      isPassing: true,
    };
  }
  if (status === 400) {
    return {
      title: "The server did not take this request",
      text: message,
      advice: "If it names a setting, change it in the settings.",
      isPassing: false,
    };
  }
  return {
    title: "The reply failed",
    text: message,
    advice: "Try again; if it comes back, the server's log says more.",
    isPassing: false,
  };
}

/**
 * Make a card that shows an error.
 * @param {import("./api.js").ApiError} error
 * @param {() => void} again
 * @returns {HTMLElement}
 */
export function troubleCard(error, again) {
  const { title, text, advice } = wordsFor(error);
  return h(
    "div",
    { class: "trouble", role: "alert" },
    icon("warning"),
    h("div", {}, h("strong", {}, title), h("p", {}, text), h("p", { class: "muted" }, advice)),
    h("button", { type: "button", class: "quiet", onclick: again }, "Try again"),
  );
}
