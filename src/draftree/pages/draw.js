// What draftree's pages draw with: elements, tokens as text, steps as bars, draft trees. Texts are set as text, never as markup.
"use strict";
const Draw = (() => {
  const LINES = ["solid", "double", "dashed", "dotted", "wavy"];
  const STATES = { root: "newest certain token", accepted: "accepted", refused: "verified, refused",
    pruned: "pruned inside the pass", own: "the model's own token" };
  const GLYPHS = { accepted: "✓ ", pruned: "✕ " };
  const RANK = { accepted: 0, own: 1, refused: 2, pruned: 3 };
  const CHAR = 7.6, SMALL = 6.4, HIGH = 22, PITCH = 29, GAP = 30, LONGEST = 22;
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function draw(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  const colours = {}; // by drafter, and of "other" ones: the package's own, which `fill` puts behind this file
  // The drafter in `colours` that the source of a draft token names, as `draftree.pages.drafter_of` finds it.
  function drafterOf(source) {
    if (source.includes("+")) return "several";
    while (source && !Object.hasOwn(colours, source)) source = source.replace(/(^|[-/])[^-/]*$/, "");
    return source || "other";
  }
  const tint = (source) => `color-mix(in srgb, ${colours[drafterOf(source)]} 40%, var(--card))`;
  // Spaces and line breaks are what tokens differ by most often, so they are shown.
  const visible = (text) => text === "" ? "∅" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\r/g, "␍")
    .replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f-\u009f]/g, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);
  const short = (text) => [...text].length > LONGEST ? [...text].slice(0, LONGEST - 1).join("") + "…" : text;

  // Marks a token's element by who drafted it: by colour, and by a line that does without.
  function mark(element, source) {
    if (source === null) return element;
    const drafter = drafterOf(source);
    element.style.backgroundColor = tint(source);
    element.style.textDecorationLine = "underline";
    element.style.textDecorationColor = colours[drafter];
    element.style.textDecorationStyle = LINES[Object.keys(colours).indexOf(drafter) % LINES.length];
    return element;
  }

  // A bar for each {all, hit}; its group has data-step.
  function strip(steps, wide) {
    const high = 54, most = Math.max(1, ...steps.map(({ all }) => all));
    const svg = draw("svg", { width: wide * steps.length + 2, height: high, role: "img", "aria-label": "Draft tokens by step" });
    steps.forEach(({ all, hit }, number) => {
      const [full, part] = [all, hit].map((count) => (high - 6) * count / most);
      svg.append(draw("g", { "data-step": number, transform: `translate(${wide * number + 1} 0)` },
        draw("rect", { class: "all", x: 1, y: high - full, width: wide - 2, height: full }),
        draw("rect", { class: "hit", x: 1, y: high - part, width: wide - 2, height: part }),
        draw("rect", { class: "spot", x: 0, y: 1, width: wide, height: high - 2 })));
    });
    return svg;
  }

  // ---- the tree: a column for each depth, a line for each leaf

  function arrange(nodes) {
    nodes.forEach((node, i) => {
      node.below = [];
      node.depth = i ? nodes[node.parent].depth + 1 : 0;
      if (i) nodes[node.parent].below.push(i);
    });
    for (const node of nodes) {
      node.below.sort((a, b) => RANK[nodes[a].state] - RANK[nodes[b].state] || (nodes[b].chance || 0) - (nodes[a].chance || 0) || a - b);
    }
  }
  function place(nodes) {
    let line = 0;
    const stack = [0], order = [];
    while (stack.length) {
      const i = stack.pop();
      order.push(i);
      if (!nodes[i].below.length) nodes[i].y = line++;
      stack.push(...[...nodes[i].below].reverse());
    }
    for (const i of order.reverse()) if (nodes[i].below.length) nodes[i].y = nodes[nodes[i].below[0]].y;
    const widths = [];
    for (const node of nodes) {
      node.glyph = GLYPHS[node.state] || "";
      node.odds = node.chance === null ? "" : node.chance < 0.005 ? "<.01" : node.chance.toFixed(2);
      node.wide = CHAR * [...node.glyph + node.text].length + 16 + (node.odds ? SMALL * node.odds.length + 7 : 0);
      widths[node.depth] = Math.max(widths[node.depth] || 0, node.wide);
    }
    const lefts = [10];
    widths.forEach((wide, depth) => { lefts[depth + 1] = lefts[depth] + wide + GAP; });
    return { lefts, wide: lefts[widths.length] - GAP + 10, high: line * PITCH + 14 };
  }
  function box(node, x, y) {
    const group = draw("g", { class: `node ${node.state}`, transform: `translate(${x} ${y})` });
    const shape = draw("rect", { width: node.wide, height: HIGH, rx: node.state === "own" ? 11 : 5 });
    if (node.source !== null && node.state !== "pruned") shape.style.fill = tint(node.source);
    else if (node.state === "accepted" || node.state === "refused") shape.style.fill = "none";
    const text = draw("text", { x: 8, y: 15.5 }, node.glyph + node.text);
    group.append(shape, text);
    if (node.odds) group.append(draw("text", { class: "chance", x: node.wide - 7, y: 15.5, "text-anchor": "end" }, node.odds));
    const who = node.source === null ? "" : `\nfrom ${node.source}`;
    const odds = node.chance === null ? "" : `\npath probability, by the drafter: ${node.chance.toPrecision(3)}`;
    group.append(draw("title", {}, `${node.full}\n${STATES[node.state]}${who}${odds}`));
    return group;
  }
  // An SVG of nodes {text, parent, source, chance, state}: a parent before its children, the root first; source and
  // chance may be null.
  function tree(nodes) {
    for (const node of nodes) {
      node.full = node.text;
      node.text = short(node.text);
    }
    arrange(nodes);
    const { lefts, wide, high } = place(nodes);
    const drafted = nodes.filter(({ state }) => state !== "root" && state !== "own").length;
    const svg = draw("svg", { width: wide, height: high, role: "img", "aria-label": `Tree of ${drafted} draft tokens` });
    const top = (node) => 7 + node.y * PITCH;
    nodes.forEach((node, i) => {
      if (!i) return;
      const above = nodes[node.parent], x0 = lefts[above.depth] + above.wide, y0 = top(above) + HIGH / 2;
      const x2 = lefts[node.depth], x1 = x2 - GAP, y1 = top(node) + HIGH / 2, middle = x1 + GAP / 2;
      svg.append(draw("path", { class: `edge ${node.state}`,
        d: `M${x0} ${y0} L${x1} ${y0} C${middle} ${y0} ${middle} ${y1} ${x2} ${y1}` }));
    });
    nodes.forEach((node) => svg.append(box(node, lefts[node.depth], top(node))));
    return svg;
  }
  // What the states look like, but for those in `without`.
  function key(without = []) {
    return Object.keys(STATES).filter((state) => !without.includes(state)).map((state) => {
      const glyph = GLYPHS[state] || "";
      const node = { state, glyph, text: "ab", full: "", source: state === "accepted" || state === "refused" ? "other" : null, chance: null, odds: "" };
      node.wide = CHAR * (glyph + node.text).length + 16;
      const svg = draw("svg", { width: node.wide + 3, height: HIGH + 3, "aria-hidden": "true" }, box(node, 1.5, 1.5));
      svg.querySelector("title").remove();
      return make("span", {}, svg, STATES[state]);
    });
  }

  return { colours, make, mark, visible, strip, tree, key };
})();
