// Markdown as elements: `Markdown.show(box, text, leaf)`. No markup of the text is used, and links have safe schemes alone.
// `leaf(at, text)` returns the nodes of a piece of the source and is told where the piece begins, so that tokens can be marked.
"use strict";
const Markdown = (() => {
  const { make } = Draw;
  const DEEPEST = 12; // Nested lists, quotes and emphasis beyond this stay text.
  const LONGEST = 10000; // Characters of a paragraph beyond which its marks stay text, as a search goes over all of it.
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/, RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
  const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|(\d{1,9})[.)])([ \t]+|$)/, INDENTED = /^(?: {4}|\t)/;
  const DIVIDER = /^ {0,3}(?=.*\|)\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
  const SAFE = /^(?:https?:|mailto:)/i, ADDRESS = /https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_]/y;
  const TARGET = /\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))+)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
  const blank = (line) => line === undefined || !line.text.trim();
  const cut = ({ text, at }, from, to = text.length) => ({ text: text.slice(from, to), at: at + from });

  // ---- blocks: lines are {text, at}, `at` being their place in the source

  function linesOf(source) {
    const found = [];
    for (let at = 0; at <= source.length;) {
      const end = source.indexOf("\n", at), stop = end < 0 ? source.length : end;
      found.push({ text: source.slice(at, stop).replace(/\r$/, ""), at });
      at = stop + 1;
    }
    return found;
  }
  const isTable = (lines, i) => lines[i].text.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1].text);
  function begins(lines, i) { // whether a block other than a paragraph begins here, inside a paragraph
    const { text } = lines[i], item = ITEM.exec(text);
    return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || isTable(lines, i)
      || (item !== null && item[4] !== "" && (item[3] === undefined || item[3] === "1"));
  }
  // Blocks of lines, each {kind, lines, ...}.
  function split(lines) {
    const found = [];
    for (let i = 0; i < lines.length;) {
      const from = i, { text } = lines[i];
      let block;
      const fence = FENCE.exec(text), heading = HEADING.exec(text);
      if (blank(lines[i])) { i++; continue; }
      if (fence) {
        const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`), indent = /^ */.exec(text)[0].length;
        for (i++; i < lines.length && !end.test(lines[i].text);) i++;
        const body = lines.slice(from + 1, i++).map((line) => cut(line, Math.min(indent, /^ */.exec(line.text)[0].length)));
        block = { kind: "code", language: fence[2].trim().split(/\s/)[0], body };
      } else if (heading) {
        const end = text.replace(/(?:[ \t]+#*)?[ \t]*$/, "").length;
        block = { kind: "heading", level: heading[1].length, body: [cut(lines[i++], heading[0].length, Math.max(end, heading[0].length))] };
      } else if (RULE.test(text)) {
        block = { kind: "rule" };
        i++;
      } else if (QUOTE.test(text)) {
        while (i < lines.length && !blank(lines[i]) && (QUOTE.test(lines[i].text) || !begins(lines, i))) i++;
        block = { kind: "quote", body: lines.slice(from, i).map((line) => cut(line, (QUOTE.exec(line.text) || [""])[0].length)) };
      } else if (ITEM.test(text)) {
        block = { kind: "list", items: [] };
        i = items(lines, i, block);
      } else if (isTable(lines, i)) {
        for (i += 2; i < lines.length && !blank(lines[i]) && lines[i].text.includes("|");) i++;
        block = { kind: "table", body: lines.slice(from, i) };
      } else if (INDENTED.test(text)) {
        while (i < lines.length && (blank(lines[i]) || INDENTED.test(lines[i].text))) i++;
        while (blank(lines[i - 1])) i--;
        block = { kind: "code", language: "", body: lines.slice(from, i).map((line) => cut(line, (INDENTED.exec(line.text) || [""])[0].length)) };
      } else {
        for (i++; i < lines.length && !blank(lines[i]) && !begins(lines, i);) i++;
        block = { kind: "paragraph", body: lines.slice(from, i).map((line) => cut(line, /^[ \t]*/.exec(line.text)[0].length)) };
      }
      found.push({ ...block, lines: lines.slice(from, i) });
    }
    return found;
  }
  // Reads the items of a list from line `i` on into `block`; returns the line behind them.
  function items(lines, i, block) {
    const first = ITEM.exec(lines[i].text), bullet = first[3] === undefined;
    Object.assign(block, { ordered: !bullet, start: bullet ? 1 : Number(first[3]) });
    while (i < lines.length) {
      const mark = ITEM.exec(lines[i].text);
      if (!mark || (mark[3] === undefined) !== bullet || RULE.test(lines[i].text)) break;
      const inside = mark[0].length > mark[1].length + mark[2].length + 4 || !mark[4] ? mark[1].length + mark[2].length + 1 : mark[0].length;
      const body = [cut(lines[i], Math.min(inside, lines[i].text.length))];
      for (i++; i < lines.length; i++) {
        const indent = /^[ \t]*/.exec(lines[i].text)[0].length, next = lines.slice(i).find((line) => !blank(line));
        if (blank(lines[i]) ? !next || /^[ \t]*/.exec(next.text)[0].length <= mark[1].length + 1
          : indent <= mark[1].length + 1 && (ITEM.test(lines[i].text) || blank(lines[i - 1]) || begins(lines, i))) break;
        body.push(cut(lines[i], Math.min(indent, inside)));
      }
      block.items.push(body);
      const after = i;
      while (i < lines.length && blank(lines[i])) i++; // Blank lines between items belong to the list.
      const again = i < lines.length && ITEM.exec(lines[i].text);
      if (!again || again[1].length + 1 < first[1].length) return after;
    }
    return i;
  }

  function build(block, leaf, depth) {
    const { kind, body } = block;
    if (kind === "rule") return make("hr");
    if (kind === "code") {
      const code = make("code", {}, ...body.flatMap((line, i) => leaf(line.at, line.text + (i < body.length - 1 ? "\n" : ""))));
      const bar = make("div", { class: "bar" }, make("span", {}, block.language), make("button", { type: "button", class: "copy" }, "Copy"));
      return make("div", { class: "code" }, bar, make("pre", { tabindex: "0", "aria-label": `Code ${block.language}`.trim() }, code));
    }
    if (kind === "heading") return make(`h${Math.min(6, block.level + 2)}`, {}, ...words(body, leaf));
    if (kind === "table") return table(body, leaf);
    if (kind === "paragraph" || depth >= DEEPEST) return make("p", {}, ...words(body || block.lines, leaf));
    const within = (lines) => split(lines).map((one) => build(one, leaf, depth + 1));
    if (kind === "quote") return make("blockquote", {}, ...within(body));
    return make(block.ordered ? "ol" : "ul", block.start === 1 ? {} : { start: block.start }, ...block.items.map((lines) => {
      const box = /^\[([ xX])\][ \t]/.exec(lines[0].text);
      if (!box) return make("li", {}, ...within(lines));
      const state = make("input", { type: "checkbox", disabled: "", ...(box[1] === " " ? {} : { checked: "" }) });
      return make("li", { class: "task" }, state, ...within([cut(lines[0], box[0].length), ...lines.slice(1)]));
    }));
  }
  function table([head, divider, ...rows], leaf) {
    const sides = cells(divider).map(({ text }) => (text.startsWith(":") ? 1 : 0) + (text.endsWith(":") ? 2 : 0));
    const row = (line, tag) => make("tr", {}, ...cells(line).map((cell, i) => {
      const made = make(tag, tag === "th" ? { scope: "col" } : {}, ...words([cell], leaf));
      made.style.textAlign = ["left", "left", "right", "center"][sides[i] || 0];
      return made;
    }));
    const whole = make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((line) => row(line, "td"))));
    return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, whole);
  }
  function cells(line) {
    const trimmed = cut(line, /^\s*\|?/.exec(line.text)[0].length, line.text.replace(/\|?\s*$/, "").length), found = [];
    for (const part of trimmed.text.matchAll(/((?:\\.|`[^`]*`|[^|])*)(\||$)/g)) {
      if (part.index < trimmed.text.length || !found.length) {
        const from = part.index + /^\s*/.exec(part[1])[0].length;
        found.push(cut(trimmed, from, Math.max(from, part.index + part[1].trimEnd().length)));
      }
    }
    return found;
  }

  // ---- words: marks inside a paragraph

  function words(lines, leaf) {
    const text = lines.map((line) => line.text).join("\n"), places = [];
    for (const line of lines) for (let i = 0; i <= line.text.length; i++) places.push(line.at + i);
    return text.length > LONGEST ? plain({ text, places, leaf }, 0, text.length) : inline({ text, places, leaf }, 0, text.length, 0);
  }
  function plain({ text, places, leaf }, from, to) {
    const found = [];
    while (from < to) { // Lines one by one, as their places need not follow one another.
      const end = text.indexOf("\n", from), stop = end < 0 || end >= to ? to : end + 1;
      found.push(...leaf(places[from], text.slice(from, stop)));
      from = stop;
    }
    return found;
  }
  function run(text, at, to) {
    let end = at;
    while (end < to && text[end] === text[at]) end++;
    return end;
  }
  function codeEnd(text, at, to) { // behind the code that begins at a backtick; -1 if it does not end
    const begin = run(text, at, to);
    for (let i = text.indexOf("`", begin); i >= 0 && i < to;) {
      const end = run(text, i, to);
      if (end - i === begin - at) return end;
      i = text.indexOf("`", end);
    }
    return -1;
  }
  function closing(text, mark, at, to) { // where emphasis that `mark` begins before `at` is closed; -1 for nowhere
    for (let i = at; i < to; i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === "`") i = Math.max(codeEnd(text, i, to), run(text, i, to)) - 1;
      else if (text[i] === mark[0]) {
        const end = run(text, i, to), size = end - i;
        const fits = size >= mark.length && !(mark.length === 1 && size === 2) && !(mark[0] === "_" && /\w/.test(text[end] || ""));
        if (fits && i > at && !/\s/.test(text[i - 1])) return end - mark.length;
        i = end - 1;
      }
    }
    return -1;
  }
  function bracket(text, at, to) { // the bracket that closes the one at `at`; -1 for none near
    for (let i = at + 1, open = 1; i < Math.min(to, at + 1000); i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === "[") open++;
      else if (text[i] === "]" && --open === 0) return i;
    }
    return -1;
  }
  const link = (address, children) =>
    make("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address }, ...children);
  function inline(part, from, to, depth) {
    const { text } = part, found = [], never = new Set(); // marks that nothing closes from here on
    let i = from, begun = from; // the text from `begun` on is not yet in `found`
    const flush = (end) => { found.push(...plain(part, begun, end)); begun = end; };
    const take = (node, end) => { flush(i); found.push(node); i = begun = end; };
    const inner = (begin, end) => inline(part, begin, end, depth + 1);
    while (i < to) {
      const sign = text[i], end = run(text, i, to);
      if (sign === "\\" && i + 1 < to && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
        flush(i);
        begun = i + 1;
        i += 2;
      } else if (sign === "`") {
        const key = "`".repeat(end - i), stop = never.has(key) ? -1 : codeEnd(text, i, to), size = end - i;
        if (stop < 0) { never.add(key); i = end; continue; }
        const spaced = /^ .*[^ ].* $/s.test(text.slice(end, stop - size)) ? 1 : 0;
        take(make("code", {}, ...plain(part, end + spaced, stop - size - spaced)), stop);
      } else if ((sign === "[" || (sign === "!" && text[i + 1] === "[")) && depth < DEEPEST) {
        const open = sign === "!" ? i + 1 : i, close = bracket(text, open, to);
        TARGET.lastIndex = close + 1;
        const target = close < 0 || text[close + 1] !== "(" ? null : TARGET.exec(text);
        if (target && TARGET.lastIndex <= to && SAFE.test(target[1])) take(link(target[1], inner(open + 1, close)), TARGET.lastIndex);
        else i = open + 1;
      } else if (sign === "h" && !/\w/.test(text[i - 1] || "")) {
        ADDRESS.lastIndex = i;
        const address = ADDRESS.exec(text);
        if (address && ADDRESS.lastIndex <= to) take(link(address[0], plain(part, i, ADDRESS.lastIndex)), ADDRESS.lastIndex);
        else i++;
      } else if (/[*_~]/.test(sign)) {
        const mark = text.slice(i, end), word = sign === "_" && /\w/.test(text[i - 1] || "");
        const opens = end < to && mark.length <= 3 && !/\s/.test(text[end]) && !word && (sign !== "~" || mark.length === 2);
        const stop = opens && depth < DEEPEST && !never.has(mark) ? closing(text, mark, end, to) : -1;
        if (stop < 0) { if (opens) never.add(mark); i = end; continue; }
        const children = inner(end, stop), tag = sign === "~" ? "del" : mark.length === 1 ? "em" : "strong";
        take(make(tag, {}, ...(mark.length === 3 ? [make("em", {}, ...children)] : children)), stop + mark.length);
      } else i++;
    }
    flush(to);
    return found;
  }

  // Shows a text; blocks that are as they were stay, so that a text may grow by each frame. Another `version` renews all.
  function show(box, text, leaf = (at, piece) => [piece], version = "") {
    const blocks = split(linesOf(text)), shown = box.shown || [];
    const keys = blocks.map(({ kind, lines }) => {
      const last = lines[lines.length - 1];
      return `${version} ${kind} ${lines[0].at} ${text.slice(lines[0].at, last.at + last.text.length)}`;
    });
    const same = keys.findIndex((key, i) => key !== shown[i]), kept = same < 0 ? keys.length : same;
    while (box.childNodes.length > kept) box.lastChild.remove();
    box.append(...blocks.slice(kept).map((block) => build(block, leaf, 0)));
    box.shown = keys;
  }
  return { show };
})();
