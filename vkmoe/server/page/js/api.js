// Asks the server: JSON answers, streams of events, and the API key that goes along.

const KEY = "vkmoe.key";

/** Describes why a request has no answer; `status` is 0 where the server was not reached. */
export class ApiError extends Error {
  /**
   * @param {number} status an HTTP status, or 0
   * @param {string} message
   * @param {{code?: string}} [more] fields of the server's error
   */
  constructor(status, message, more = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = more.code ?? null;
  }
}

/** @type {Promise<void> | null} the dialog that asks for the key now */
let asking = null;
/** @type {() => Promise<string | null>} */
let askForKey = async () => null;

/**
 * Set what asks the user for the API key; it gives null where the user does not have one.
 * @param {() => Promise<string | null>} ask
 */
export function onKeyWanted(ask) {
  askForKey = ask;
}

async function keyFromUser() {
  asking ??= askForKey()
    .then((key) => {
      if (key === null) throw new ApiError(401, "This server asks for an API key.");
      sessionStorage.setItem(KEY, key);
    })
    .finally(() => {
      asking = null;
    });
  await asking;
}

/**
 * Send a request; asks for the key, as often as it is refused.
 * @param {string} path such as "/health"
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>} an answer that is no error; throws ApiError, or the signal's reason
 */
async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const text = body === undefined ? undefined : JSON.stringify(body);
    let response;
    try {
      const address = new URL(path.replace(/^\//, ""), document.baseURI);
      response = await fetch(address, { method, headers, body: text, signal, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "The server cannot be reached.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (key === sessionStorage.getItem(KEY)) await keyFromUser(); // else another request asked
  }
}

/** @param {Response} response */
async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy answers with a page of its own: the status has to do.
  }
  return new ApiError(response.status, error.message ?? `HTTP ${response.status}`, error);
}

/**
 * Ask for JSON.
 * @param {string} path
 * @param {{signal?: AbortSignal}} [options]
 * @returns {Promise<any>} throws ApiError
 */
export async function getJson(path, options = {}) {
  return (await request(path, options)).json();
}

/**
 * Send JSON, and return the JSON that is answered.
 * @param {string} method such as "PATCH"
 * @param {string} path
 * @param {unknown} body
 * @returns {Promise<any>} throws ApiError
 */
export async function sendJson(method, path, body) {
  return (await request(path, { method, body })).json();
}

/**
 * Yield the events of a stream as they come. An event whose data is {error: ...} is thrown.
 * @param {string} path
 * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
 * @yields {{event: string, data: any}} data is parsed JSON, or the text "[DONE]"
 */
export async function* events(path, options = {}) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (options.signal?.aborted) throw error;
        throw new ApiError(0, "The connection was lost.");
      }
      if (part.done) return;
      const blocks = (rest + part.value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = parse(block);
        if (found?.data?.error) {
          const { error } = found.data;
          throw new ApiError(error.status ?? 500, error.message ?? "The reply failed.", error);
        }
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @param {string} block the lines of one event; null for a comment */
function parse(block) {
  let event = "message";
  const lines = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) lines.push(line.slice(6));
  }
  if (!lines.length) return null;
  const text = lines.join("\n");
  return { event, data: text === "[DONE]" ? text : JSON.parse(text) };
}
