// The server's own page: asks over the API as any client does, and shows what comes. Texts are set as text, never as markup.
"use strict";
(() => {
  const { make, mark, visible } = Draw;
  const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
  const OPENAI = ["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice", // its
    "response_format"]; // package has these as arguments
  const EXAMPLES = [ // each with what to ask next
    ["Write a Python class for a bank account with deposit and withdraw.", "Now write it again, with type hints."],
    ["Describe the water cycle in five numbered steps.", "Write the steps again, and add a title."],
    ["Write a short letter that asks a landlord to repair the heating.", "Write it again, more politely."],
  ];
  const $ = (id) => document.getElementById(id);
  const kind = () => document.querySelector("[name=kind]:checked").value;
  const plural = (number, one) => `${number} ${one}${number === 1 ? "" : one.endsWith("s") ? "es" : "s"}`;
  let about = { model: null, drafter: null };
  let turns = []; // {role: "user" or "tool", text, kind, ...} and {role: "assistant", runs, ...}, by turns, and their elements
  let last = null; // the body sent last
  let running = null; // the AbortController of what is under way
  let editing = null; // the turn of the question that is being edited
  let then = ""; // what an example asks next
  let inspected = null; // the answer beside the dialogue
  let lifted = null; // the question that is to go to the top once the page is long enough
  let at = 0, follow = true; // its step, and whether that is the newest

  // ---- asking

  // Messages of turns; of an answer that has neither text nor calls, its question is left out as well.
  function messages(list) {
    const found = [];
    list.forEach((turn, i) => {
      const answer = turn.role === "assistant" ? turn : list[i + 1];
      if (turn.kind === "completion" || (answer && answer.role === "assistant" && !worth(answer))) return;
      if (turn.role === "user") found.push({ role: "user", content: turn.text });
      else if (turn.role === "tool") found.push({ role: "tool", tool_call_id: turn.call.id, content: turn.text });
      else {
        const { text, calls } = turn.runs[0];
        const own = calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
        found.push({ role: "assistant", content: text, ...(own.length ? { tool_calls: own } : {}) });
      }
    });
    return found;
  }
  const worth = ({ runs }) => runs[0].text !== "" || runs[0].calls.length > 0;
  // The call that the next text is the result of; null where the next text is a question.
  function pending() {
    const i = turns.findLastIndex(({ role }) => role === "assistant");
    if (i < 0 || editing || kind() !== "chat") return null;
    const done = turns.slice(i + 1).filter(({ role }) => role === "tool").map(({ call }) => call);
    return turns[i].runs[0].calls.find((call) => !done.includes(call)) || null;
  }
  // The body that asks for what follows `list`; throws an error whose message says what is wrong in the form.
  function request(list) {
    const body = about.model === null ? {} : { model: about.model };
    if (kind() === "chat") {
      const system = $("system").value.trim();
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages(list)];
    } else body.prompt = list[list.length - 1].text;
    for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
    const stop = $("stop").value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if ($("node_budget").value !== "") body.draftree = { node_budget: Number($("node_budget").value) };
    if (!$("more").value.trim()) return body;
    let more;
    try {
      more = JSON.parse($("more").value);
    } catch (error) {
      throw new Error(`The other fields are not JSON: ${error.message}.`);
    }
    if (more === null || typeof more !== "object" || Array.isArray(more)) throw new Error("The other fields are no JSON object: write {...}.");
    return { ...body, ...more };
  }
  // What is to be copied: the next request if there is a text for it, and the last one otherwise.
  const current = () => $("prompt").value === "" && last ? last : request([...before(), question()]);
  const before = () => editing ? turns.slice(0, turns.indexOf(editing)) : turns;
  function question() {
    const call = pending();
    return { role: call ? "tool" : "user", kind: kind(), text: $("prompt").value, call };
  }
  const path = () => kind() === "chat" ? "v1/chat/completions" : "v1/completions";
  const headers = () => $("key").value === "" ? {} : { Authorization: `Bearer ${$("key").value}` };

  // Events of a stream, each as the object in it.
  async function* events(body, signal) {
    const response = await fetch(path(), {
      method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers() } });
    if (!response.ok) throw new Error(await sentence(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The server closed the stream before the answer was over.");
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a comment, to keep the connection
        if (part === "data: [DONE]") return;
        const found = JSON.parse(part.slice(6));
        if (found.error) throw new Error(found.error.message);
        yield found;
      }
    }
  }
  async function sentence(response) {
    try {
      return (await response.json()).error.message;
    } catch {
      return `The server answered with status ${response.status}.`;
    }
  }

  const empty = () => ({ text: "", reasoning: "", calls: [], raw: "", ends: [], ids: [], tokens: [], trees: [], owner: [],
    first: null, seconds: 0, finish: null, usage: null });
  // Reads one answer into `run`.
  async function answer(run, body, signal) {
    const began = performance.now();
    for await (const event of events(body, signal)) {
      const now = (performance.now() - began) / 1000;
      for (const choice of event.choices.filter(({ index }) => index === 0)) {
        const delta = choice.delta || { content: choice.text };
        run.text += delta.content || "";
        run.reasoning += delta.reasoning_content || "";
        for (const call of delta.tool_calls || []) run.calls.push({ id: call.id, name: call.function.name, args: call.function.arguments });
        run.ids.push(...(choice.token_ids || []));
        if ((choice.token_ids || []).length) {
          run.first = run.first === null ? now : run.first;
          run.seconds = now;
        }
        const told = choice.draftree || { pieces: [], drafters: [], trees: [] };
        told.pieces.forEach((piece, i) => {
          run.tokens.push(told.drafters[i]);
          run.raw += piece;
          run.ends.push(run.raw.length);
        });
        for (const tree of told.trees) {
          for (let i = 0; i < tree.emitted.length; i++) run.owner.push(run.trees.length);
          run.trees.push(tree);
        }
        run.finish = choice.finish_reason || run.finish;
      }
      if (event.usage) run.usage = event.usage;
      soon();
    }
  }

  // Asks what follows `list` and shows it.
  async function ask(list) {
    if (running) return;
    let body;
    try {
      body = request(list);
    } catch (error) {
      complain(error.message);
      return;
    }
    const drafting = about.drafter === null ? "off" : $("drafting").value;
    if (drafting === "both" && body.temperature !== 0 && body.seed === undefined) body.seed = Math.floor(Math.random() * 2 ** 31);
    last = body;
    const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    // The plain answer is a user's of its own, so that it does not find in the cache what the other has just read.
    const plain = { ...asked, ...(drafting === "both" ? { user: "plain" } : {}), draftree: { ...(about.drafter ? { drafter: "off" } : {}), trees: true } };
    asked.draftree = { ...body.draftree, trees: true };
    running = new AbortController();
    const turn = { role: "assistant", kind: kind(), runs: [empty()], verdict: "", error: "", drafted: drafting !== "off", seed: body.seed };
    turns = [...list, turn];
    inspected = turn;
    follow = true;
    $("error").hidden = true;
    $("state").textContent = "Answering …";
    $("said").replaceChildren();
    buttons();
    show();
    lifted = list[list.length - 1].article;
    lifted.scrollIntoView({ block: "start" });
    try {
      await answer(turn.runs[0], turn.drafted ? asked : plain, running.signal);
      if (drafting === "both") {
        turn.runs.push(empty());
        await answer(turn.runs[1], plain, running.signal);
        turn.verdict = verdict(turn);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.verdict = turn.runs.length > 1 ? "The comparison was stopped." : "Stopped.";
      else turn.error = error.message;
    }
    if (turn.runs.length > 1 && !turn.runs[1].finish) turn.runs.pop();
    running = null;
    if (then && worth(turn)) $("prompt").value = then;
    then = "";
    buttons();
    show();
    $("state").textContent = turn.error || `The answer is complete. ${turn.verdict}`;
  }
  function send() {
    if (running || !$("prompt").value.trim() || !$("form").reportValidity()) return;
    const list = [...before(), question()];
    try {
      request(list);
    } catch (error) {
      complain(error.message);
      return;
    }
    edit(null);
    $("prompt").value = "";
    turns = list;
    show();
    if (!pending()) ask(turns); // otherwise the next text is another call's result
  }
  function again() { // the last answer, anew
    if (!running && turns.length) ask(turns.slice(0, -1));
  }
  function edit(turn) {
    editing = turn;
    $("editing").hidden = turn === null;
    $("prompt").value = turn === null ? "" : turn.text;
    $("prompt").focus({ preventScroll: turn === null });
    show();
  }
  function complain(text) {
    $("error").textContent = text;
    $("error").hidden = false;
  }
  function verdict(turn) {
    const [drafted, plain] = turn.runs, found = unequal(turn);
    const chosen = turn.seed === undefined ? "" : ` (seed ${turn.seed})`;
    if (found !== null) return `Not equal: the answers differ from token ${found + 1} on${chosen}.`;
    const ratio = plain.seconds / drafted.seconds;
    const sooner = ratio >= 1 ? `${ratio.toFixed(1)} times as fast` : `at ${ratio.toFixed(2)} of the speed`;
    return `Equal: the same ${plural(drafted.ids.length, "token")}${chosen}, ${sooner}`
      + ` (${drafted.seconds.toFixed(2)} s, plain decoding ${plain.seconds.toFixed(2)} s).`;
  }
  // Where the two answers part; null where they do not.
  function unequal({ runs }) {
    const [a, b] = runs.map((run) => run.ids), most = Math.max(a.length, b.length);
    for (let i = 0; i < most; i++) if (a[i] !== b[i]) return i;
    return null;
  }

  // ---- the dialogue

  let asked = false;
  function soon() { // ten pictures a second: drawing must not take from the model the processor that both may share
    if (asked) return;
    asked = true;
    setTimeout(() => requestAnimationFrame(() => { asked = false; show(); }), 100);
  }
  function show() {
    const box = $("transcript"), stay = box.scrollTop + box.clientHeight > box.scrollHeight - 60;
    $("empty").hidden = turns.length > 0;
    for (const turn of turns) if (!turn.article) turn.article = article(turn);
    const articles = turns.map((turn) => turn.article), there = [...box.querySelectorAll(":scope > article")];
    for (const old of there) if (!articles.includes(old)) old.remove();
    for (const one of articles) if (!one.isConnected) box.append(one);
    for (const turn of turns) if (turn.role === "assistant") showAnswer(turn);
    const call = pending();
    $("prompt-label").textContent = call ? `Result of ${call.name}` : kind() === "chat" ? "Message" : "Text";
    if (!turns.includes(inspected)) inspected = turns.findLast(({ role }) => role === "assistant") || null;
    inspect();
    if (stay) box.scrollTop = box.scrollHeight;
    if (lifted && !$("inspector").hidden) { // the answer grows below its question
      lifted.scrollIntoView({ block: "start" });
      lifted = null;
    }
  }
  function article(turn) {
    const button = (name, act) => {
      const made = make("button", { type: "button", class: "small" }, name);
      made.addEventListener("click", () => act(made));
      return made;
    };
    if (turn.role !== "assistant") {
      const name = turn.role === "user" ? "You" : `Result of ${turn.call.name}`;
      const act = turn.role === "user" ? [button("Edit", () => { if (!running) edit(turn); })] : [];
      return make("article", { class: `turn ${turn.role}`, "aria-label": name }, make("h2", {}, name), make("div", { class: "said" }, turn.text),
        make("div", { class: "acts" }, ...act));
    }
    const made = make("article", { class: "turn assistant", "aria-label": "Answer" }, make("h2", {}, about.model || "Answer"),
      make("details", { class: "reasoning", hidden: "" }, make("summary", {}, "Reasoning"), make("div", { class: "prose" })),
      make("div", { class: "answer prose" }), make("div", { class: "calls" }), make("p", { class: "failed", hidden: "" }),
      make("details", { class: "other", hidden: "" }, make("summary", {}, "The answer by plain decoding"), make("div", { class: "text plain" })),
      make("p", { class: "verdict" }), make("p", { class: "hint counted" }),
      make("div", { class: "acts" }, button("Copy", () => copy(turn.runs[0].text, "text")), button("Answer again", again),
        button("Source", (own) => {
          turn.source = !turn.source;
          own.setAttribute("aria-pressed", turn.source);
          show();
        }), button("Passes", () => {
          inspected = turn;
          follow = false;
          at = best(turn.runs[0]);
          inspect();
          $("inspector").scrollIntoView({ block: "nearest" });
        })));
    made.querySelector(".acts").lastChild.previousSibling.setAttribute("aria-pressed", "false");
    return made;
  }
  // Nodes of a part of the raw text, a span for each token; of `part` itself where it is not in the raw text.
  function tokens(run, part, from, own) {
    const base = run.raw.indexOf(part, from);
    return base < 0 ? (at, piece) => [piece] : (at, piece) => {
      const found = [];
      let begin = base + at, low = 0, high = run.ends.length;
      while (low < high) { // the token that `begin` is in
        const middle = (low + high) >> 1;
        if (run.ends[middle] > begin) high = middle; else low = middle + 1;
      }
      for (const stop = begin + piece.length; begin < stop; low++) {
        const end = Math.min(stop, run.ends[low]);
        const span = make("span", own ? { class: "token", "data-token": low } : {}, run.raw.slice(begin, end));
        span.title = run.tokens[low] ? `drafted by ${run.tokens[low]}` : "the model's own";
        found.push(mark(span, run.tokens[low]));
        begin = end;
      }
      return found;
    };
  }
  function showAnswer(turn) {
    const [run, plain] = turn.runs, { article } = turn, part = (name) => article.querySelector(name), busy = running && turn === turns[turns.length - 1];
    const state = [turn.source, run.ids.length, run.text.length, run.finish, run.calls.length, plain && plain.ids.length, turn.verdict, turn.error, busy].join();
    part(".acts").children[1].hidden = turn !== turns[turns.length - 1] || Boolean(running);
    if (turn.state === state) return;
    turn.state = state;
    const reasoning = part(".reasoning"), text = part(".answer");
    reasoning.hidden = run.reasoning === "";
    reasoning.open = turn.begun ? reasoning.open : !run.text && !run.calls.length; // open until the answer itself begins
    turn.begun = turn.begun || Boolean(run.text || run.calls.length);
    const thought = Math.max(0, run.raw.indexOf(run.reasoning)), leaf = tokens(run, run.text, thought + run.reasoning.length, true);
    Markdown.show(reasoning.lastChild, run.reasoning, tokens(run, run.reasoning, 0, true));
    text.classList.toggle("text", turn.source === true || turn.kind === "completion");
    if (text.classList.contains("text")) {
      text.replaceChildren(...leaf(0, run.text));
      text.shown = [];
    } else {
      if (!(text.shown || []).length) text.replaceChildren();
      Markdown.show(text, run.text, leaf);
    }
    text.classList.toggle("waiting", Boolean(busy) && !run.finish);
    part(".calls").replaceChildren(...run.calls.map(({ name, args }) => make("div", { class: "code" },
      make("div", { class: "bar" }, make("span", {}, `calls ${name}`), make("button", { type: "button", class: "copy" }, "Copy")),
      make("pre", { tabindex: "0", "aria-label": `Arguments of ${name}` }, make("code", {}, pretty(args))))));
    part(".failed").hidden = turn.error === "";
    part(".failed").textContent = turn.error;
    part(".other").hidden = !plain;
    if (plain) {
      part(".plain").replaceChildren(...tokens(plain, plain.text, 0, false)(0, plain.text));
      const parts = plain.finish ? unequal(turn) : null;
      if (parts !== null) {
        part(".other").open = true;
        const span = article.querySelector(`.answer [data-token="${parts}"]`);
        if (span) span.classList.add("differs");
      }
    }
    part(".verdict").textContent = turn.verdict || (plain ? `Plain decoding, to compare: ${plain.ids.length} of ${plural(run.ids.length, "token")} …` : "");
    part(".counted").textContent = counted(run);
  }
  function pretty(args) {
    try {
      return JSON.stringify(JSON.parse(args), null, 2);
    } catch {
      return args;
    }
  }
  const speed = (run) => run.seconds > run.first && run.ids.length > 1 ? (run.ids.length - 1) / (run.seconds - run.first) : null;
  const whole = (value, digits = 0) => value === null ? "" : value.toFixed(digits);
  function read({ usage }) {
    const cached = usage === null ? 0 : usage.prompt_tokens_details.cached_tokens;
    return usage === null ? "" : String(usage.prompt_tokens) + (cached ? ` (${cached} cached)` : "");
  }
  function counted(run) {
    const told = run.ids.length ? [`${plural(run.ids.length, "token")} in ${plural(run.trees.length, "pass")}`] : [];
    if (run.finish && speed(run) !== null) told.push(`${whole(speed(run), 1)} tokens per second`);
    if (run.usage) told.push(`${run.usage.prompt_tokens} prompt tokens${read(run).slice(String(run.usage.prompt_tokens).length)}`);
    if (run.finish === "length") told.push("cut at max_tokens");
    return told.join(" · ");
  }

  // ---- one answer's passes

  const hits = (tree) => tree.accepted.length - 1;
  const best = ({ trees }) => trees.reduce((most, tree, i) => hits(tree) > hits(trees[most]) ? i : most, 0);
  function inspect() {
    const run = inspected && inspected.runs[0];
    $("inspector").hidden = !run || !run.ids.length;
    document.body.classList.toggle("talking", !$("inspector").hidden);
    for (const { article } of turns) article.classList.toggle("inspected", inspected !== null && article === inspected.article);
    if ($("inspector").hidden) return;
    showFigures(inspected.runs, inspected.drafted);
    $("stepping").hidden = $("depths-part").hidden = run.trees.length === 0;
    if (!run.trees.length) return;
    if (follow) at = running ? run.trees.length - 1 : best(run); // the newest, and in the end the best
    at = Math.max(0, Math.min(at, run.trees.length - 1));
    showStrip(run.trees);
    showStep(run);
    showDepths(run.trees);
  }
  function showFigures(runs, drafted) {
    const accepted = (run) => run.trees.reduce((sum, tree) => sum + hits(tree), 0);
    const rows = [
      ["tokens", (run) => String(run.ids.length)],
      ["passes of the model", (run) => String(run.trees.length)],
      ["draft tokens accepted", (run) => String(accepted(run))],
      ["acceptance length", (run) => run.trees.length ? whole(1 + accepted(run) / run.trees.length, 2) : ""],
      ["tokens per second, after the first", (run) => whole(speed(run), 1)],
      ["seconds to the first token", (run) => whole(run.first, 3)],
      ["seconds in all", (run) => whole(run.seconds, 3)],
      ["prompt tokens", read],
      ["ended by", (run) => run.finish || ""],
    ];
    const titles = [drafted ? "drafted" : "plain", "plain"].slice(0, runs.length);
    $("headline").textContent = `${plural(runs[0].ids.length, "token")} in ${plural(runs[0].trees.length, "pass")}`;
    $("figures").replaceChildren(
      make("thead", {}, make("tr", {}, make("td"), ...titles.map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, ...rows.map(([title, say]) => make("tr", { "data-row": title }, make("th", { scope: "row" }, title),
        ...runs.map((run) => make("td", {}, say(run)))))));
    const names = [...new Set(runs[0].tokens.filter(Boolean))];
    const counts = names.map((name) => runs[0].tokens.filter((source) => source === name).length);
    $("sources").replaceChildren(...names.map((name, i) => make("span", {},
      mark(make("span", { class: "sample" }, "abc"), name), ` from ${name}: ${counts[i]}`)),
      ...(names.length ? [make("span", {}, "unmarked: the model's own")] : []));
  }
  function showStrip(trees) {
    const strip = $("strip"), wide = Math.max(9, Math.min(22, Math.floor((strip.clientWidth - 4) / trees.length)));
    strip.replaceChildren(Draw.strip(trees.map((tree) => ({ all: tree.tokens.length - 1, hit: hits(tree) })), wide));
    $("slider").max = trees.length - 1;
    strip.querySelector(`[data-step="${at}"]`).classList.add("now");
    const x = wide * at;
    if (x < strip.scrollLeft || x + wide > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = x - strip.clientWidth / 2;
  }
  function showStep({ trees, owner }) {
    const tree = trees[at], count = hits(tree);
    $("which").textContent = `Pass ${at + 1} of ${trees.length}`;
    $("slider").value = at;
    $("back").disabled = at === 0;
    $("forth").disabled = at === trees.length - 1;
    $("facts").textContent = `${plural(tree.tokens.length - 1, "draft token")} verified, ${count} accepted, `
      + `${tree.emitted.length} emitted: ${tree.emitted.map(visible).join(" ")}`;
    const nodes = tree.tokens.map((token, i) => ({ text: visible(token), parent: tree.parents[i], source: tree.drafters[i] || null,
      chance: null, state: i === 0 ? "root" : tree.accepted.includes(i) ? "accepted" : "refused" }));
    if (tree.emitted.length > count) {
      nodes.push({ text: visible(tree.emitted[count]), parent: tree.accepted[count], source: null, chance: null, state: "own" });
    }
    $("tree").replaceChildren(Draw.tree(nodes));
    document.querySelectorAll(".token.now").forEach((span) => span.classList.remove("now"));
    if (!running) inspected.article.querySelectorAll(".token").forEach((span) => {
      span.classList.toggle("now", owner[Number(span.dataset.token)] === at);
    });
  }
  function showDepths(trees) {
    const deepest = Math.max(...trees.map(hits)), rows = [];
    for (let depth = 1; depth <= deepest; depth++) {
      const share = trees.filter((tree) => tree.accepted.length > depth).length / trees.length;
      const bar = make("i"), percent = `${(100 * share).toFixed(0)} %`;
      bar.style.width = `${100 * share}%`;
      rows.push(make("span", {}, `depth ${depth}`), make("div", { class: "bar" }, bar), make("span", {}, percent));
    }
    $("depths").replaceChildren(...(rows.length ? rows : [make("span", {}, "none yet")]));
  }
  function buttons() {
    $("send").disabled = $("clear").disabled = running !== null;
    $("halt").disabled = running === null;
  }

  // ---- the request as code

  const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  function python(value) {
    if (value === null) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
    if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`).join(", ")}}`;
    return JSON.stringify(value);
  }
  function asCurl() {
    const key = $("key").value === "" ? "" : ' -H "Authorization: Bearer $DRAFTREE_API_KEY"';
    const address = shell(new URL(path(), location.href).href);
    return `curl -s ${address} -H 'Content-Type: application/json'${key} -d ${shell(JSON.stringify(current()))}\n`;
  }
  function asPython() {
    const body = Object.entries(current());
    const own = body.filter(([name]) => OPENAI.includes(name)), more = body.filter(([name]) => !OPENAI.includes(name));
    if (about.model === null) own.unshift(["model", "draftree"]);
    const given = own.map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
    const extra = more.length ? `    extra_body=${python(Object.fromEntries(more))},\n` : "";
    const key = $("key").value === "" ? '"none"' : 'os.environ["DRAFTREE_API_KEY"]';
    const [method, said] = kind() === "chat" ? ["chat.completions", "message.content"] : ["completions", "text"];
    return ($("key").value === "" ? "" : "import os\n\n") + "import openai\n\n"
      + `client = openai.OpenAI(base_url=${JSON.stringify(new URL("v1", location.href).href)}, api_key=${key})\n`
      + `answer = client.${method}.create(\n${given}${extra})\nprint(answer.choices[0].${said})\n`;
  }
  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      $("said").textContent = `Copied as ${what}.`;
    } catch { // pages that are not served over TLS or from this machine have no clipboard
      $("said").replaceChildren(make("textarea", { rows: 5, "aria-label": `Copy as ${what}`, readonly: "" }, text));
      $("said").firstChild.select();
    }
  }

  // ---- moving

  function go(number) {
    const { trees } = inspected.runs[0];
    at = Math.max(0, Math.min(number, trees.length - 1));
    follow = at === trees.length - 1 && running !== null;
    inspect();
  }
  function halt() {
    if (running) running.abort();
    else if (editing) edit(null);
  }
  function clear() {
    turns = [];
    last = null;
    $("said").replaceChildren();
    $("error").hidden = true;
    edit(null);
  }
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("halt").addEventListener("click", halt);
  $("clear").addEventListener("click", clear);
  $("keep").addEventListener("click", () => edit(null));
  for (const [id, say] of [["curl", asCurl], ["python", asPython]]) $(id).addEventListener("click", () => {
    try {
      copy(say(), id === "curl" ? id : "Python");
    } catch (error) {
      complain(error.message);
    }
  });
  $("kind").addEventListener("change", () => {
    $("system-part").hidden = kind() !== "chat";
    show();
  });
  $("marks").addEventListener("change", () => document.body.classList.toggle("marked", $("marks").checked));
  $("key").addEventListener("change", () => learn());
  $("slider").addEventListener("input", () => go(Number($("slider").value)));
  $("back").addEventListener("click", () => go(at - 1));
  $("forth").addEventListener("click", () => go(at + 1));
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".token"), bar = event.target.closest("#strip g"), code = event.target.closest(".copy");
    if (code) copy(code.closest(".code").querySelector("pre").textContent, "code");
    else if (bar) go(Number(bar.dataset.step));
    else if (token && !event.target.closest("a")) {
      inspected = turns.find(({ article }) => article.contains(token));
      go(inspected.runs[0].owner[Number(token.dataset.token)]);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") halt();
    if (event.key === "Enter" && event.target === $("prompt") && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });

  // Asks the server what it is.
  async function learn() {
    try {
      const response = await fetch("server_info", { headers: headers() });
      $("key-part").hidden = response.status !== 401 && $("key").value === "";
      if (!response.ok) throw new Error(await sentence(response));
      about = await response.json();
      $("error").hidden = true;
      const known = await (await fetch("tokenizer_info", { headers: headers() })).json();
      if (!known.chat_template) { // the model goes on with texts alone
        const [chat, completion] = document.querySelectorAll("[name=kind]");
        chat.disabled = true;
        if (chat.checked) completion.click();
      }
      const drafter = about.drafter === null ? "none" : about.drafter;
      $("parts").replaceChildren(...[["Model", about.model], ["Drafter", drafter], ["Runner", about.runner]].flatMap(
        ([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
      for (const one of $("drafting").options) one.disabled = about.drafter === null && one.value !== "off";
      if (about.drafter === null) $("drafting").value = "off";
      $("about").textContent = `${about.model} · drafter ${drafter}`;
    } catch (error) {
      complain(error.message);
    }
  }
  $("examples").replaceChildren(...EXAMPLES.map(([first, next]) => {
    const made = make("button", { type: "button" }, make("b", {}, first), ` then: ${next}`);
    made.addEventListener("click", () => {
      if (running) return;
      $("prompt").value = first;
      then = next;
      send();
    });
    return made;
  }));
  $("legend").replaceChildren(...Draw.key(["pruned"]));
  learn();
})();
