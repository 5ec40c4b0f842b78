// Shows the trace that lies in the page. Texts are set as text, never as markup.
"use strict";
(() => {
  const trace = JSON.parse(document.getElementById("trace").textContent);
  const { make, mark, visible } = Draw;
  const STAGES = ["draft", "shape", "verify", "accept", "commit"];
  const $ = (id) => document.getElementById(id);
  const ids = Object.keys(trace.requests).map(Number);
  const parts = new Map(ids.map((id) => [id, []])); // request -> [{step, member, from}]
  for (const step of trace.steps) {
    for (const member of step.members) {
      const list = parts.get(member.request), before = list[list.length - 1];
      list.push({ step, member, from: before ? before.from + before.member.emitted.length : 0 });
    }
  }
  let request = ids[0], at = 0, wide = 9; // of the strip's bars, in pixels
  let owner = []; // output token -> number of the step it came from

  const run = () => trace.runs[trace.requests[request].run];
  const sourceOf = (member, node) => node ? run().sources[member.sources[node]] : null; // null for the root as well
  const milliseconds = (seconds) => `${(1000 * seconds).toFixed(2)} ms`;
  const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;
  const label = (token) => visible(trace.tokens[token] === undefined ? String(token) : trace.tokens[token]);
  // ---- counts: the same sums, in the same order, as the engine's own

  function tally(list) {
    const sum = { steps: 0, emitted: 0, drafted: 0, pruned: 0, accepted: 0, rollbacks: 0, by_depth: [], by_source: {},
      seconds: { draft: 0, verify: 0, accept: 0, commit: 0 } };
    for (const { step, member } of list) {
      const hits = member.accepted.filter((node) => node !== null);
      const names = trace.runs[step.run].sources;
      sum.steps += 1;
      sum.emitted += member.emitted.length;
      sum.drafted += member.tokens.length - 1;
      sum.pruned += member.pruned.length;
      sum.accepted += hits.length;
      if (hits.length < member.tokens.length - 1 && member.accepted[member.accepted.length - 1] === null) sum.rollbacks += 1;
      hits.forEach((node, depth) => {
        sum.by_depth[depth] = (sum.by_depth[depth] || 0) + 1;
        const name = names[member.sources[node]];
        sum.by_source[name] = (sum.by_source[name] || 0) + 1;
      });
      for (const stage of Object.keys(sum.seconds)) sum.seconds[stage] += step.seconds[stage] * (1 / step.members.length);
    }
    return sum;
  }
  function add(sums) {
    const total = tally([]);
    for (const sum of sums) {
      for (const name of ["steps", "emitted", "drafted", "pruned", "accepted", "rollbacks"]) total[name] += sum[name];
      sum.by_depth.forEach((hits, depth) => { total.by_depth[depth] = (total.by_depth[depth] || 0) + hits; });
      for (const [name, hits] of Object.entries(sum.by_source)) total.by_source[name] = (total.by_source[name] || 0) + hits;
      for (const stage of Object.keys(total.seconds)) total.seconds[stage] += sum.seconds[stage];
    }
    return total;
  }
  const sums = new Map(ids.map((id) => [id, tally(parts.get(id))]));
  const total = add([...sums.values()]);
  const length = (sum) => sum.steps ? 1 + sum.accepted / sum.steps : 0;

  function showCounts() {
    const list = parts.get(request);
    const columns = [["up to this step", tally(list.slice(0, at + 1))], ["this request", sums.get(request)]];
    if (ids.length > 1) columns.push(["all requests", total]);
    const whole = columns[columns.length - 1][1];
    const rows = [];
    const row = (name, title, value, say = String) => rows.push([name, title, value, say]);
    row("steps", "steps (target passes)", (s) => s.steps);
    row("emitted", "tokens emitted", (s) => s.emitted);
    row("acceptance_length", "acceptance length", length, (value) => value.toFixed(3));
    row("drafted", "draft tokens verified", (s) => s.drafted);
    row("pruned", "of them pruned inside the pass", (s) => s.pruned);
    row("accepted", "draft tokens accepted", (s) => s.accepted);
    row("rollbacks", "passes that rejected draft tokens", (s) => s.rollbacks);
    whole.by_depth.forEach((_, depth) =>
      row(`depth-${depth + 1}`, `accepted at depth ${depth + 1}`, (s) => s.by_depth[depth] || 0));
    for (const name of Object.keys(whole.by_source)) row(`source-${name}`, `accepted from ${name}`, (s) => s.by_source[name] || 0);
    for (const stage of Object.keys(whole.seconds)) row(`seconds-${stage}`, `time: ${stage}`, (s) => s.seconds[stage], milliseconds);
    const half = Math.ceil(rows.length / 2); // two tables beside each other, or below where the page is narrow
    $("counts").replaceChildren(...[rows.slice(0, half), rows.slice(half)].map((part) => {
      const head = make("thead", {}, make("tr", {}, make("td"), ...columns.map(([title]) => make("th", { scope: "col" }, title))));
      const body = make("tbody", {}, ...part.map(([name, title, value, say]) => make("tr", { "data-count": name },
        make("th", { scope: "row" }, title),
        ...columns.map(([, sum]) => make("td", { "data-value": value(sum) }, say(value(sum)))))));
      return make("div", { class: "wide" }, make("table", {}, head, body));
    }));
  }

  // ---- the text

  function showText() {
    const shown = trace.requests[request], output = $("output");
    $("prompt").textContent = shown.prompt_text;
    $("asked").open = shown.prompt_text.length < 400;
    output.replaceChildren();
    owner = [];
    parts.get(request).forEach(({ member }, number) => member.emitted.forEach((token, i) => {
      const source = sourceOf(member, member.accepted[i]);
      const span = make("span", { class: "token", "data-token": owner.length }, shown.pieces[owner.length]);
      mark(span, source);
      span.title = source === null ? "the model's own" : `drafted by ${source}`;
      owner.push(number);
      output.append(span);
    }));
    if (shown.finish_reason) output.append(make("span", { class: "gone" }, ` [${shown.finish_reason}]`));
    const hits = sums.get(request).by_source;
    $("sources").replaceChildren(...run().sources.map((name) => make("span", {},
      mark(make("span", { class: "sample" }, "abc"), name), ` ${name || "draft token"}: ${hits[name] || 0}`)));
  }

  // ---- the steps

  function showStrip() {
    const list = parts.get(request);
    wide = Math.max(9, Math.min(22, Math.floor(($("strip").clientWidth - 4) / list.length)));
    $("strip").replaceChildren(Draw.strip(list.map(({ member }) => (
      { all: member.tokens.length - 1, hit: member.accepted.filter((node) => node !== null).length })), wide));
    $("slider").max = list.length - 1;
  }

  function showTimes(step) {
    const seconds = { ...step.seconds, shape: step.shape_seconds, draft: step.seconds.draft - step.shape_seconds };
    const total = STAGES.reduce((sum, stage) => sum + seconds[stage], 0);
    const bar = make("div", { class: "bar" }), names = make("div", { class: "names" });
    STAGES.forEach((stage, i) => {
      const part = make("i");
      part.style.width = `${100 * seconds[stage] / total}%`;
      part.style.background = `var(--t${i})`;
      bar.append(part);
      const swatch = make("b");
      swatch.style.background = `var(--t${i})`;
      names.append(make("span", {}, swatch, `${stage} ${milliseconds(seconds[stage])}`));
    });
    names.append(make("span", {}, `together ${milliseconds(total)}`));
    $("times").replaceChildren(bar, names);
  }

  function showStep() {
    const list = parts.get(request), { step, member, from } = list[at];
    const hits = member.accepted.filter((node) => node !== null).length;
    $("which").textContent = `Step ${at + 1} of ${list.length}`;
    $("slider").value = at;
    $("first").disabled = $("back").disabled = at === 0;
    $("last").disabled = $("forth").disabled = at === list.length - 1;
    const facts = member.budget === null ? ["nothing was drafted"]
      : [`budget ${member.budget}`, `${member.drafted} drafted`];
    facts.push(`${member.tokens.length - 1} verified`);
    if (member.pruned.length) facts.push(`${member.pruned.length} pruned`);
    facts.push(`${hits} accepted`, count(member.emitted.length, "token emitted", "tokens emitted"));
    if (at === 0) facts.push("the prompt passes with it");
    $("facts").textContent = `${facts.join(", ")}; ${(1000 * step.at).toFixed(1)} ms after the first step began.`;
    const others = step.members.map((other) => other.request);
    $("batch").replaceChildren(...(others.length < 2 ? [] : [`Batch of ${others.length}:`, ...others.map((id) =>
      make("button", { "data-request": id, "data-at": parts.get(id).findIndex((part) => part.step === step),
        "aria-pressed": id === request }, trace.names[id]))]));
    showTimes(step);
    showTree(member);
    const emitted = member.emitted.map((token, i) => mark(make("span", {}, label(token)), sourceOf(member, member.accepted[i])));
    $("emitted").replaceChildren("emitted: ", ...emitted.flatMap((span) => [span, " "]));
    document.querySelectorAll(".token.now").forEach((span) => span.classList.remove("now"));
    for (let i = from; i < from + member.emitted.length; i++) {
      const span = $("output").querySelector(`[data-token="${i}"]`);
      span.classList.add("now");
      if (i === from) keepInView($("output"), span.offsetTop - $("output").offsetTop, span.offsetHeight);
    }
    document.querySelectorAll("#strip .now").forEach((group) => group.classList.remove("now"));
    const bar = $("strip").querySelector(`[data-step="${at}"]`);
    bar.classList.add("now");
    const strip = $("strip"), x = wide * at;
    if (x < strip.scrollLeft || x + wide > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = x - strip.clientWidth / 2;
    showCounts();
    history.replaceState(null, "", `#request=${ids.indexOf(request) + 1}&step=${at + 1}`);
  }
  function keepInView(box, top, height) {
    if (top < box.scrollTop || top + height > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
  }

  // ---- the tree

  function nodesOf(member) {
    const accepted = new Set(member.accepted.filter((node) => node !== null)), pruned = new Set(member.pruned);
    const nodes = member.tokens.map((token, i) => ({
      text: label(token), parent: member.parents[i], source: sourceOf(member, i),
      chance: i && member.logp[i] !== null ? Math.exp(member.logp[i]) : null,
      state: i === 0 ? "root" : accepted.has(i) ? "accepted" : pruned.has(i) ? "pruned" : "refused" }));
    const end = member.accepted.length - 1;
    if (end >= 0 && member.accepted[end] === null) {
      nodes.push({ text: label(member.emitted[end]), parent: member.path[end], source: null, chance: null, state: "own" });
    }
    return nodes;
  }
  function showTree(member) {
    $("tree").replaceChildren(Draw.tree(nodesOf(member)));
    $("tree").scrollTop = $("tree").scrollLeft = 0;
  }
  function showKey() {
    const used = trace.steps.some((step) => step.members.some((member) => member.pruned.length));
    $("key").replaceChildren(...Draw.key(used ? [] : ["pruned"]),
      make("span", { class: "hint" }, "Numbers: path probability, by the drafter; colour: source, as in the text."));
  }

  // ---- moving

  const hitsOf = ({ member }) => member.accepted.filter((node) => node !== null).length;
  // The step with the most accepted tokens.
  const best = (id) => parts.get(id).reduce((most, part, i, list) => hitsOf(part) > hitsOf(list[most]) ? i : most, 0);
  function headline() {
    const sum = sums.get(request), most = hitsOf(parts.get(request)[best(request)]);
    const drafted = sum.accepted ? `${sum.accepted} of them were draft tokens, up to ${most} in one step` : "no draft token was accepted";
    return `The answer's ${count(sum.emitted, "token", "tokens")} took ${count(sum.steps, "pass", "passes")} of the model; ${drafted}.`;
  }
  function showRequest() {
    $("headline").textContent = headline();
    const { model, dtype, device, runner, drafter, shape, pruner, acceptance, strict } = run();
    const facts = [`${model}, ${dtype} on ${device}, ${runner}`, `drafter ${drafter || "none"}`];
    if (shape) facts.push(`shape ${shape}`);
    if (pruner) facts.push(`pruned by ${pruner}`);
    facts.push(acceptance === "lossless" ? "lossless" : `${acceptance}: the text is not the model's own`);
    if (strict) facts.push("strict");
    const { sample, seed } = trace.requests[request];
    if (sample) facts.push(seed === null ? "sampled" : `sampled, seed ${seed}`);
    $("about").textContent = facts.join("; ");
    $("requests").replaceChildren(...(ids.length < 2 ? [] : ids.map((id) =>
      make("button", { "data-request": id, "data-at": best(id), "aria-pressed": id === request }, trace.names[id]))));
    showText();
    showStrip();
  }
  function go(number) {
    at = Math.max(0, Math.min(number, parts.get(request).length - 1));
    showStep();
  }
  function visit(id, number) {
    request = id;
    showRequest();
    go(number);
  }
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".token"), bar = event.target.closest("#strip g");
    const other = event.target.closest("button[data-request]");
    if (token) go(owner[Number(token.dataset.token)]);
    else if (bar) go(Number(bar.dataset.step));
    else if (other) visit(Number(other.dataset.request), Number(other.dataset.at));
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target === $("slider")) return;
    if (event.target === $("tree")) return; // there, arrows scroll
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key]);
  });
  $("slider").addEventListener("input", () => go(Number($("slider").value)));
  $("first").addEventListener("click", () => go(0));
  $("back").addEventListener("click", () => go(at - 1));
  $("forth").addEventListener("click", () => go(at + 1));
  $("last").addEventListener("click", () => go(Infinity));

  const address = new URLSearchParams(location.hash.slice(1));
  showKey();
  const shown = ids[(Number(address.get("request")) || 1) - 1] || ids[0];
  visit(shown, address.has("step") ? (Number(address.get("step")) || 1) - 1 : best(shown));
})();
