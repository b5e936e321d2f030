// Keeps small values in the browser: settings, sizes, choices. All of them may be missing.

/**
 * Return what is kept by a name, or `otherwise`.
 * @param {string} name
 * @param {any} otherwise
 */
export function kept(name, otherwise) {
  try {
    const text = localStorage.getItem(`vkmoe.${name}`);
    if (text === null) return otherwise;
    return typeof otherwise === "string" ? text : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/**
 * Keep a value: a text as it is, anything else as JSON.
 * @param {string} name
 * @param {any} value
 */
export function keep(name, value) {
  try {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    localStorage.setItem(`vkmoe.${name}`, text);
  } catch {
    // The browser keeps nothing for this page, or is full: the value holds until it is closed.
  }
}
