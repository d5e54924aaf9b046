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

{
  // The list of sections shows where the reader is: what lies a quarter down the window.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((found) => {
    for (const one of found) links.get(one.target.id).ariaCurrent = one.isIntersecting ? "true" : null;
  }, { rootMargin: "-25% 0px -75%" });
  for (const name of links.keys()) seen.observe(document.getElementById(name));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const heads = [...table.tHead.rows[0].cells];
  // A text that is a number is its own key; what has none, n/a among them, comes after all that have.
  const key = (cell) => +(cell.dataset.key || cell.textContent || NaN);
  const compare = (a, b) => key(a) - key(b) ||
    isNaN(key(a)) - isNaN(key(b)) || (isNaN(key(a)) ? a.textContent.localeCompare(b.textContent) : 0);
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

const views = document.getElementById("views");
if (views) {
  // Beside each text stands its data, a value a token: hundredths of nats, ranks, [text, thousandths,
  // ...] of the likely; held: hexadecimal percents; missed: marks from a token on.
  const texts = [...document.querySelectorAll(".tokens")];
  const facts = document.getElementById("facts");
  const edges = views.dataset.edges.split(" ").map(Number);
  const choices = { missed: document.getElementById("missed"), held: document.getElementById("held") };
  const read = new Map();
  const data = (text) => {
    if (!read.has(text)) read.set(text, JSON.parse(text.nextElementSibling.textContent));
    return read.get(text);
  };
  const chosen = (text, view) => choices[view] ? data(text)[view][choices[view].selectedIndex] : null;
  const heldAt = (held, place) => held ? parseInt(held[0].slice(2 * place, 2 * place + 2), 16) : NaN;
  const markAt = (missed, place) => missed && missed[1][place - missed[0]] || "-";
  const ofNats = (value) => value === null ? "q" : "e" + edges.filter((edge) => value >= edge).length;
  const looks = {
    entropy: (text, place) => ofNats(data(text).entropy[place]),
    surprisal: (text, place) => ofNats(data(text).surprisal[place]),
    missed: (text, place, missed) => ({ ".": "e0", x: "m", "-": "q" })[markAt(missed, place)],
    held: (text, place, held) => {
      const part = heldAt(held, place);
      const look = part === 0 ? "x" : part <= 100 ? "e" + (1 + Math.floor((part - 1) / 25 + (part > 99))) : "q";
      return held && held[1] === place ? look + " c" : look;
    },
  };

  let view = "entropy", current = null;
  const paint = () => {
    for (const one of document.querySelectorAll("[data-views]")) one.hidden = !one.dataset.views.split(" ").includes(view);
    for (const text of texts) {
      const choice = chosen(text, view);
      let place = 0;
      for (const token of text.children) {
        const marks = token.className.match(/ [sgb](?= |$)/g) || [];
        token.className = looks[view](text, place++, choice) + marks.join("");
      }
      text.previousElementSibling.lastElementChild.textContent = choice ? ". " + choice[2] : "";
    }
  };

  const spaced = (text) => text.replaceAll(" ", "\u2423");
  const percent = (thousandths) => (thousandths === 999 ? "> 99.8" : thousandths / 10) + "\u00a0%";
  const told = (text, place) => {
    const known = data(text), lines = [];
    if (known.entropy[place] === null) lines.push("not predicted: it is the first");
    else {
      const nats = (value) => (value / 100).toFixed(2) + " nats";
      const rank = known.rank[place], likely = known.likely[place], names = [];
      lines.push("entropy " + nats(known.entropy[place]), "surprisal " + nats(known.surprisal[place]),
        "rank " + rank + (rank ? "" : " (the most likely)"));
      for (let i = 0; i < likely.length; i += 2) names.push(spaced(known.texts[likely[i]]) + " " + percent(likely[i + 1]));
      if (names.length) lines.push("likely: " + names.join(" | "));
    }
    const missed = chosen(text, "missed"), held = chosen(text, "held");
    const mark = markAt(missed, place), part = heldAt(held, place);
    if (mark !== "-") lines.push((mark === "x" ? "wrongly pruned" : "a candidate") + " under " + choices.missed.value);
    if (part <= 100) lines.push("kept in " + part + "\u00a0% of the heads by " + choices.held.value);
    return lines.join(" \u00b7 ");
  };
  const leave = () => {
    if (current) current.classList.remove("now");
    facts.replaceChildren();
  };
  const point = (token) => {
    leave();
    current = token;
    current.classList.add("now");
    const text = token.parentElement, place = [...text.children].indexOf(token);
    const name = document.createElement("strong");
    name.textContent = spaced(token.textContent.replace(/\n$/, ""));
    const made = token.classList.contains("g") ? "generated" : "given";
    facts.replaceChildren(name, " \u00b7 position " + place + ", " + made + " \u00b7 " + told(text, place));
  };

  const textOf = (event) => event.target.closest(".tokens");
  const tokenOf = (event) => event.target.parentElement === textOf(event) ? event.target : null;
  const home = views.closest("section");
  // Scrolling by keyboard moves the text under a mouse that stands still: that is no pointing.
  let spot = "";
  const where = (event) => event.screenX + "," + event.screenY;
  home.addEventListener("mouseover", (event) => {
    const token = tokenOf(event);
    if (token && where(event) !== spot) point(token);
    else if (!textOf(event) && !document.activeElement.matches(".tokens")) leave();
    spot = where(event);
  });
  home.addEventListener("mousemove", (event) => { spot = where(event); });
  home.addEventListener("mouseleave", () => { if (!document.activeElement.matches(".tokens")) leave(); });
  home.addEventListener("focusin", (event) => {
    const text = textOf(event);
    if (text) point(current && current.parentElement === text ? current : text.firstElementChild);
  });
  home.addEventListener("focusout", (event) => { if (textOf(event)) leave(); });
  home.addEventListener("keydown", (event) => {
    const text = textOf(event);
    if (!text || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") leave();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...text.children];
    const next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(current) + step))];
    point(next);
    next.scrollIntoView({ block: "nearest" });
  });
  views.addEventListener("change", (event) => {
    const one = event.target.matches("select") ? event.target.parentElement.querySelector("input") : event.target;
    one.checked = true;
    view = one.value;
    paint();
  });
  views.hidden = false;
  // Where the browser remembers what was chosen before, the text must follow.
  const checked = views.querySelector("input:checked");
  if (checked && checked.value !== view) { view = checked.value; paint(); }
}

// Folded numbers stay out of what is printed.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not(.numbers)")) details.open = true;
});
