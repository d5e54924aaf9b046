"use strict";
{
  const root = document.documentElement;
  const names = { "": "as the system", light: "light", dark: "dark" };
  const button = document.getElementById("theme");
  const show = () => { button.textContent = "Theme: " + names[root.dataset.theme || ""]; };
  button.hidden = false;
  button.addEventListener("click", () => {
    const order = Object.keys(names);
    const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    try { localStorage.setItem("tracekit-theme", next); } catch (error) { /* not kept */ }
    show();
  });
  show();
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const heads = [...table.tHead.rows[0].cells];
  const compare = (a, b) => a.dataset.key && b.dataset.key
    ? a.dataset.key - b.dataset.key
    : (a.dataset.key ? -1 : b.dataset.key ? 1 : a.textContent.localeCompare(b.textContent));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      body.append(...[...body.rows].sort((a, b) => sign * compare(a.cells[column], b.cells[column])));
    });
  });
}

const facts = document.getElementById("facts");
for (const group of document.querySelectorAll(".tokens")) {
  let current = null;
  for (const token of group.children) {
    token.dataset.facts = token.title;
    token.removeAttribute("title");
  }
  const point = (token) => {
    if (current) current.classList.remove("now");
    current = token;
    current.classList.add("now");
    facts.hidden = false;
    facts.textContent = token.textContent.trim() + " \u00b7 " + token.dataset.facts;
  };
  const leave = () => {
    if (current) current.classList.remove("now");
    facts.hidden = true;
  };
  // Scrolling by keyboard moves the text under a mouse that stands still: that is no pointing.
  let spot = "";
  const where = (event) => event.screenX + "," + event.screenY;
  group.addEventListener("mouseover", (event) => {
    if (where(event) !== spot && event.target.dataset.facts) point(event.target);
    spot = where(event);
  });
  group.addEventListener("mousemove", (event) => { spot = where(event); });
  group.addEventListener("mouseleave", () => { if (document.activeElement !== group) leave(); });
  group.addEventListener("focus", () => point(current || group.firstElementChild));
  group.addEventListener("blur", leave);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...group.children];
    const next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(current) + step))];
    point(next);
    next.scrollIntoView({ block: "nearest" });
  });
}

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
