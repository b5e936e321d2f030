// Keeps conversations in the browser's own database. Where there is none, they last until the page
// is closed.

const NAME = "vkmoe";
const STORE = "conversations";

/** @returns {Promise<IDBDatabase | null>} */
function open() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
    request.onblocked = () => resolve(null);
  });
}

/** Keeps conversations by their ids. */
export class Storage {
  #opened = open();
  /** Says whether what is saved outlasts the page; known after `all`. */
  isLasting = true;

  /**
   * @param {IDBTransactionMode} mode
   * @param {(store: IDBObjectStore) => IDBRequest} ask
   */
  async #ask(mode, ask) {
    const database = await this.#opened;
    if (!database) {
      this.isLasting = false;
      return undefined;
    }
    return new Promise((resolve) => {
      const failed = () => {
        this.isLasting = false;
        resolve(undefined);
      };
      try {
        const request = ask(database.transaction(STORE, mode).objectStore(STORE));
        request.onsuccess = () => resolve(request.result);
        request.onerror = failed;
      } catch {
        failed();
      }
    });
  }

  /**
   * Return all conversations, the one that changed last first.
   * @returns {Promise<import("./conversation.js").Conversation[]>}
   */
  async all() {
    const found = (await this.#ask("readonly", (store) => store.getAll())) ?? [];
    return found.sort((a, b) => b.changed - a.changed);
  }

  /** @param {import("./conversation.js").Conversation} conversation */
  async save(conversation) {
    await this.#ask("readwrite", (store) => store.put(conversation));
  }

  /** @param {string} id */
  async remove(id) {
    await this.#ask("readwrite", (store) => store.delete(id));
  }
}
