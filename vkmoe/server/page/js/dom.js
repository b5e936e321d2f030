// Makes elements and icons without HTML texts.

const SVG = "http://www.w3.org/2000/svg";

/** Paths on a grid of 16, drawn as lines. */
const ICONS = {
  send: "M8 13V3.5M3.8 7.5 8 3.3l4.2 4.2",
  stop: "M4.5 4.5h7v7h-7z",
  copy: "M5.5 5.5h7v7h-7zM10.5 5.5v-2h-7v7h2",
  check: "m3.5 8.5 3 3 6-7",
  again: "M12.8 6.5A5 5 0 1 0 13 9M13 3v3.6H9.4",
  edit: "M10.8 3.2l2 2L5.5 12.5l-2.7.7.7-2.7zM9.3 4.7l2 2",
  left: "M9.8 4 6 8l3.8 4",
  right: "M6.2 4 10 8l-3.8 4",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.5 8.5h6l.5-8.5M6.8 7v3.8M9.2 7v3.8",
  list: "M2.5 3.5h11v9h-11zM6.3 3.5v9",
  experts: "M2.5 3.5h11v9h-11zM9.7 3.5v9",
  settings: "M2.5 5h5M10.5 5h3M9 3.3v3.4M2.5 11h3M8.5 11h5M7 9.3v3.4",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6zM8 1.6v1.3M8 13.1v1.3M1.6 8h1.3M13.1 8h1.3M3.5 3.5l.9.9M11.6 11.6l.9.9M12.5 3.5l-.9.9M4.4 11.6l-.9.9",
  moon: "M12.9 9.6A5.3 5.3 0 0 1 6.4 3.1a5.3 5.3 0 1 0 6.5 6.5z",
  auto: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11v-.6a4.9 4.9 0 0 0 0-9.8z",
  down: "M8 3v9.5M3.8 8.5 8 12.7l4.2-4.2",
  warning: "M8 2.6 14 13H2zM8 6.5v3M8 11.2v.1",
  close: "m4 4 8 8M12 4l-8 8",
};

/**
 * Make an element. Properties that begin with "on" are listeners, "class" and names with a dash
 * are attributes; children that are null or false are left out.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Node | string | null | false)} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

/**
 * Draw one of ICONS in the colour of the text around it.
 * @param {keyof typeof ICONS} name
 * @returns {SVGElement}
 */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/**
 * Make a button that shows an icon only; its label is read out and shown as a tooltip.
 * @param {keyof typeof ICONS} name
 * @param {string} label
 * @param {(event: MouseEvent) => void} onclick
 * @returns {HTMLButtonElement}
 */
export function iconButton(name, label, onclick) {
  const props = { class: "icon-button", type: "button", title: label, "aria-label": label };
  return h("button", { ...props, onclick }, icon(name));
}
