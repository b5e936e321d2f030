// Folds the lists beside the chat, moves the divider, and shows one part at a time on small screens.

import { keep, kept } from "./keep.js";

const LEAST = 24;
const MOST = 65; // per cent of the width that the experts may take
const NARROW = matchMedia("(max-width: 899px)");

/**
 * Let the user lay out the page.
 * @param {HTMLElement} root has the classes that say what is folded
 * @param {{pause: () => void, resume: () => void}} experts
 */
export function mountLayout(root, experts) {
  const get = (id) => document.getElementById(id);
  const state = { list: !NARROW.matches, experts: true, tab: "chat", width: 40, ...kept("layout", {}) };
  if (NARROW.matches) state.list = false;
  let wasShown = null;

  function apply() {
    const isNarrow = NARROW.matches;
    root.classList.toggle("list-folded", !state.list);
    root.classList.toggle("experts-folded", !state.experts);
    root.dataset.tab = state.tab;
    document.documentElement.style.setProperty("--experts", `${state.width}%`);
    get("divider").setAttribute("aria-valuenow", String(Math.round(state.width)));
    get("toggle-list").setAttribute("aria-expanded", String(state.list));
    get("toggle-experts").setAttribute("aria-expanded", String(state.experts));
    for (const name of ["chat", "experts"]) {
      get(`tab-${name}`).setAttribute("aria-selected", String(state.tab === name));
      get(`tab-${name}`).tabIndex = state.tab === name ? 0 : -1;
    }
    const isShown = !document.hidden && (isNarrow ? state.tab === "experts" : state.experts);
    if (isShown !== wasShown) isShown ? experts.resume() : experts.pause();
    wasShown = isShown;
    const { tab, list, ...kept } = state;
    keep("layout", isNarrow ? kept : { ...kept, list });
  }

  function change(changes) {
    Object.assign(state, changes);
    state.width = Math.min(MOST, Math.max(LEAST, state.width));
    apply();
  }

  get("toggle-list").addEventListener("click", () => change({ list: !state.list }));
  get("toggle-experts").addEventListener("click", () => change({ experts: !state.experts }));
  get("shade").addEventListener("click", () => change({ list: false }));
  for (const name of ["chat", "experts"]) {
    get(`tab-${name}`).addEventListener("click", () => change({ tab: name }));
  }
  get("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    change({ tab: state.tab === "chat" ? "experts" : "chat" });
    get(`tab-${state.tab}`).focus();
  });
  mountDivider(get("divider"), root, () => state.width, (width) => change({ width }));
  NARROW.addEventListener("change", () => change({ list: !NARROW.matches }));
  document.addEventListener("visibilitychange", apply);
  apply();
  /** Folds the list where it covers the chat. */
  return { leaveList: () => NARROW.matches && change({ list: false, tab: "chat" }) };
}

/**
 * Let an element be dragged, or moved by the arrow keys.
 * @param {HTMLElement} divider
 * @param {HTMLElement} root
 * @param {() => number} width
 * @param {(width: number) => void} change
 */
function mountDivider(divider, root, width, change) {
  divider.addEventListener("pointerdown", (event) => {
    divider.setPointerCapture(event.pointerId);
    root.classList.add("dragging");
  });
  divider.addEventListener("pointermove", (event) => {
    if (!divider.hasPointerCapture(event.pointerId)) return;
    change(100 * (1 - event.clientX / root.clientWidth));
  });
  const end = () => root.classList.remove("dragging");
  divider.addEventListener("pointerup", end);
  divider.addEventListener("pointercancel", end);
  divider.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 2, ArrowRight: -2 }[event.key];
    if (step) change(width() + step);
  });
  divider.addEventListener("dblclick", () => change(40));
}
