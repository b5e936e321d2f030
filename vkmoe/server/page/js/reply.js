// Has the server write a reply, and says what came.

import * as api from "./api.js";

/**
 * @typedef {object} Progress how far the prompt is read
 * @property {number} read tokens
 * @property {number} total tokens
 */

/**
 * Stream a reply into a message, which this function mutates.
 * @param {import("./conversation.js").Message} message an empty reply
 * @param {object} body of the request, without what makes it a stream
 * @param {AbortSignal} signal ends the reply; what came stays
 * @param {(progress: Progress | null, rate: number) => void} onNews called when something came;
 *   `rate` is in tokens a second
 * @returns {Promise<void>} throws ApiError; `ended` of the message says what became of it
 */
export async function stream(message, body, signal, onNews) {
  const began = performance.now();
  let first = null; // ms since `began`, of the first token
  let thought = null; // of the first token that is no thought
  let pieces = 0;
  message.ended = "running";
  const rate = () => {
    const seconds = (performance.now() - began - first) / 1e3;
    return pieces > 1 && seconds > 0.2 ? (pieces - 1) / seconds : 0;
  };
  const count = (found) => {
    message.statistics = {
      tokens: found.usage?.completion_tokens ?? found.timings?.predicted_n ?? pieces,
      rate: found.timings?.predicted_per_second ?? message.statistics?.rate ?? rate(),
      firstMs: first,
      thoughtMs: message.thoughts && first !== null ? (thought ?? performance.now() - began) - first : null,
      promptTokens: found.usage?.prompt_tokens ?? message.statistics?.promptTokens ?? 0,
    };
  };
  const asked = {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    timings_per_token: true, // a delta may hold several tokens: counting deltas would be wrong
  };
  try {
    const found = api.events("/v1/chat/completions", { method: "POST", body: asked, signal });
    for await (const { data } of found) {
      if (data === "[DONE]") break;
      const { delta, finish_reason: reason } = data.choices?.[0] ?? {};
      if (delta?.content || delta?.reasoning_content) {
        pieces += 1;
        first ??= performance.now() - began;
        if (delta.content) thought ??= performance.now() - began;
        message.text += delta.content ?? "";
        message.thoughts += delta.reasoning_content ?? "";
      }
      if (reason) message.ended = reason === "length" ? "length" : "stop";
      if (data.usage || data.timings) count(data);
      const progress = data.prompt_progress;
      const speed = message.statistics?.rate ?? rate();
      onNews(progress && { read: progress.processed, total: progress.total }, speed);
    }
    if (message.ended === "running") {
      throw new api.ApiError(0, "The connection ended before the reply did.");
    }
  } catch (error) {
    if (message.statistics === null) count({});
    message.ended = signal.aborted ? "stopped" : "error";
    if (!signal.aborted) throw error;
  }
}
