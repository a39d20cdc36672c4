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

const keys = new WeakMap();

// Fills an element only where that changes something, so that what has the focus keeps it.
export function fill(element, key, build) {
  const text = JSON.stringify(key) ?? "";
  if (keys.get(element) === text) return;
  element.replaceChildren(...[build()].flat().filter(isSome));
  keys.set(element, text);
}

// A child for each item, redrawn only where its item is another than before.
export function fillEach(element, items, build) {
  while (element.children.length > items.length) element.lastElementChild.remove();
  while (element.children.length < items.length) element.append(h("div"));
  items.forEach((item, index) => fill(element.children[index], item, () => build(item, index)));
}

// Says something above all else; nothing hides it.
export function say(text) {
  const message = byId("message");
  message.hidden = !text;
  // Text that stays is not read out again.
  if (message.textContent !== text) message.textContent = text;
}
