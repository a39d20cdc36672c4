// Elements from plain values. Text is always text: names of jobs and DAGs never become markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "color") element.style.setProperty("--color", value);
    else if (name === "share") element.style.setProperty("--share", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(isSome));
  return element;
}

const isSome = (child) => child !== null && child !== undefined && child !== false;

export const byId = (id) => document.getElementById(id);

// Fills an element only where that changes something, so that what has the focus keeps it.
export function fill(element, key, build) {
  const text = JSON.stringify(key);
  if (element.dataset.key === text) return;
  element.dataset.key = text;
  element.replaceChildren(...[build()].flat().filter(isSome));
}
