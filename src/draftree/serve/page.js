// The server's own page: asks over the API as any client does, and shows what comes. Texts are set as text, never as markup.
"use strict";
(() => {
  const { make, mark, visible } = Draw;
  const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
  const OPENAI = ["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop"]; // arguments of its package
  const $ = (id) => document.getElementById(id);
  const kind = () => document.querySelector("[name=kind]:checked").value;
  let about = { model: null, drafter: null };
  let turns = []; // messages of the dialogue so far
  let last = null; // the request that was sent last: {turns: those before it, form: what the form asked for, body}
  let running = null; // the AbortController of what is under way
  let names = []; // of drafters, in the order in which they were seen
  let runs = []; // the answers shown: with drafting, and plain
  let at = 0, follow = true; // the step shown, and whether it is the newest

  // ---- asking

  // The request that the form asks for, behind the messages `before`.
  function request(before) {
    const body = about.model === null ? {} : { model: about.model };
    if (kind() === "chat") {
      const system = $("system").value.trim();
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: $("prompt").value }];
    } else body.prompt = $("prompt").value;
    for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
    const stop = $("stop").value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if ($("node_budget").value !== "") body.draftree = { node_budget: Number($("node_budget").value) };
    return body;
  }
  // What is to be copied: the request whose answer is shown, until the form is changed; then the next one.
  function current() {
    const shown = last !== null && JSON.stringify(request(last.turns)) === last.form;
    return shown ? last.body : request(turns);
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

  // Reads one answer into `run`.
  async function answer(run, body, signal) {
    const began = performance.now();
    for await (const event of events(body, signal)) {
      const now = (performance.now() - began) / 1000;
      for (const choice of event.choices) {
        const text = kind() === "chat" ? choice.delta.content : choice.text;
        run.text += text || "";
        run.ids.push(...(choice.token_ids || []));
        if ((choice.token_ids || []).length) {
          run.first = run.first === null ? now : run.first;
          run.seconds = now;
        }
        const told = choice.draftree || { pieces: [], drafters: [], trees: [] };
        told.pieces.forEach((piece, i) => run.tokens.push({ piece, drafter: told.drafters[i] }));
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
  const empty = () => ({ text: "", ids: [], tokens: [], trees: [], owner: [], first: null, seconds: 0, finish: null, usage: null });

  async function send() {
    if (running) return;
    const body = request(turns), comparing = $("compare").checked && about.drafter !== null;
    const form = JSON.stringify(body);
    if (comparing && body.temperature !== 0 && body.seed === undefined) body.seed = Math.floor(Math.random() * 2 ** 31);
    last = { turns: [...turns], form, body };
    const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    // The plain answer is a user's of its own, so that it does not find in the cache what the other has just read.
    const plain = { ...asked, user: "plain", draftree: { drafter: "off", trees: true } };
    asked.draftree = { ...body.draftree, trees: true };
    running = new AbortController();
    runs = [empty()];
    names = [];
    at = 0;
    follow = true;
    $("error").hidden = true;
    $("verdict").textContent = "";
    buttons();
    try {
      await answer(runs[0], asked, running.signal);
      if (comparing) {
        runs.push(empty());
        await answer(runs[1], plain, running.signal);
      }
      $("verdict").textContent = verdict(body.seed);
    } catch (error) {
      if (error.name === "AbortError") $("verdict").textContent = "Stopped.";
      else complain(error.message);
    }
    running = null;
    if (kind() === "chat" && runs[0].finish) {
      turns.push({ role: "user", content: $("prompt").value }, { role: "assistant", content: runs[0].text });
    }
    buttons();
    show();
  }
  function complain(text) {
    $("error").textContent = text;
    $("error").hidden = false;
  }
  function verdict(seed) {
    if (runs.length < 2) return "";
    const [drafted, plain] = runs, found = unequal();
    const chosen = seed === undefined ? "" : ` (seed ${seed})`;
    if (found !== null) return `Not equal: the answers differ from token ${found + 1} on${chosen}.`;
    const ratio = plain.seconds / drafted.seconds;
    const sooner = ratio >= 1 ? `${ratio.toFixed(2)} times as fast` : `at ${ratio.toFixed(2)} of the speed`;
    return `Equal: the same ${drafted.ids.length} tokens${chosen}, ${sooner}`
      + ` (${drafted.seconds.toFixed(2)} s against ${plain.seconds.toFixed(2)} s).`;
  }
  // Where the two answers part; null where they do not.
  function unequal() {
    const [a, b] = runs.map((run) => run.ids), most = Math.max(a.length, b.length);
    for (let i = 0; i < most; i++) if (a[i] !== b[i]) return i;
    return null;
  }

  // ---- showing

  let asked = false;
  function soon() { // many tokens come between two pictures of a screen
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; show(); });
  }
  function source(name) {
    if (!name) return null;
    if (!names.includes(name)) names.push(name);
    return name;
  }
  function show() {
    showHistory();
    $("plain-part").hidden = runs.length < 2;
    if (!runs.length) return;
    const parts = running || runs.length < 2 ? null : unequal();
    ["drafted", "plain"].slice(0, runs.length).forEach((id, i) => showText($(id), runs[i], parts, i === 0));
    showFigures();
    const { trees } = runs[0];
    $("stepping").hidden = $("depths-part").hidden = trees.length === 0;
    if (follow) at = Math.max(0, trees.length - 1);
    if (trees.length) {
      showStrip(trees);
      showStep();
      showDepths(trees);
    }
  }
  function showHistory() {
    const before = running || !runs.length || !runs[0].finish ? turns : turns.slice(0, -2);
    const key = JSON.stringify(before);
    if ($("history").dataset.key === key) return;
    $("history").dataset.key = key;
    $("history").replaceChildren(...before.map(({ role, content }) => make("p", { class: `turn ${role}` }, content)));
    $("history").scrollTop = $("history").scrollHeight;  // its end goes before what is asked now
  }
  // Tokens that are new since the last call are added; a piece beyond the text belongs to a stop string and is left out.
  function showText(box, run, parts, own) {
    if (Number(box.dataset.shown || 0) > run.tokens.length || box.run !== run) {
      box.replaceChildren();
      box.dataset.shown = 0;
      box.run = run;
    }
    const stay = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
    for (let i = Number(box.dataset.shown); i < run.tokens.length; i++) {
      const { piece, drafter } = run.tokens[i];
      const span = make("span", own ? { class: "token", "data-token": i } : {}, piece);
      mark(span, source(drafter));
      span.title = drafter ? `drafted by ${drafter}` : "the model's own";
      box.append(span);
    }
    box.dataset.shown = run.tokens.length;
    let left = run.text.length; // behind the answer's end nothing is shown; what a chat template takes out stays
    if (run.finish && run.tokens.map(({ piece }) => piece).join("").startsWith(run.text)) for (const span of box.children) {
      const text = span.textContent;
      if (left < text.length) span.textContent = text.slice(0, Math.max(0, left));
      left -= text.length;
    }
    if (parts !== null && box.children[parts]) box.children[parts].classList.add("differs");
    if (stay) box.scrollTop = box.scrollHeight;
  }
  function showFigures() {
    const speed = (run) => run.seconds > run.first && run.ids.length > 1 ? (run.ids.length - 1) / (run.seconds - run.first) : null;
    const accepted = (run) => run.trees.reduce((sum, tree) => sum + tree.accepted.length - 1, 0);
    const whole = (value, digits = 0) => value === null ? "" : value.toFixed(digits);
    const rows = [
      ["tokens", (run) => String(run.ids.length)],
      ["tokens a second, after the first", (run) => whole(speed(run))],
      ["seconds to the first token", (run) => whole(run.first, 3)],
      ["seconds in all", (run) => whole(run.seconds, 3)],
      ["steps", (run) => String(run.trees.length)],
      ["draft tokens accepted", (run) => String(accepted(run))],
      ["acceptance length", (run) => run.trees.length ? whole(1 + accepted(run) / run.trees.length, 2) : ""],
      ["prompt tokens, of them from the cache", (run) => run.usage === null ? ""
        : `${run.usage.prompt_tokens}, ${run.usage.prompt_tokens_details.cached_tokens}`],
      ["ended by", (run) => run.finish || ""],
    ];
    const titles = ["with drafting", "plain"].slice(0, runs.length);
    $("figures").replaceChildren(
      make("thead", {}, make("tr", {}, make("th"), ...titles.map((title) => make("th", { scope: "col" }, title)))),
      make("tbody", {}, ...rows.map(([title, say]) => make("tr", { "data-row": title }, make("th", { scope: "row" }, title),
        ...runs.map((run) => make("td", {}, say(run)))))));
    const counts = names.map((name) => runs[0].tokens.filter(({ drafter }) => drafter === name).length);
    $("sources").replaceChildren(...names.map((name, i) => make("span", {},
      mark(make("span", { class: "sample" }, "abc"), name), ` from ${name}: ${counts[i]}`)),
      ...(names.length ? [make("span", {}, "unmarked: the model's own")] : []));
  }
  function showStrip(trees) {
    const wide = Math.max(9, Math.min(22, Math.floor(($("strip").clientWidth - 4) / trees.length)));
    $("strip").replaceChildren(Draw.strip(trees.map((tree) => ({ all: tree.tokens.length - 1, hit: tree.accepted.length - 1 })), wide));
    $("slider").max = trees.length - 1;
    const bar = $("strip").querySelector(`[data-step="${at}"]`), x = wide * at, strip = $("strip");
    bar.classList.add("now");
    if (x < strip.scrollLeft || x + wide > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = x - strip.clientWidth / 2;
  }
  function showStep() {
    const { trees, owner } = runs[0], tree = trees[at], hits = tree.accepted.length - 1;
    $("which").textContent = `Step ${at + 1} of ${trees.length}`;
    $("slider").value = at;
    $("back").disabled = at === 0;
    $("forth").disabled = at === trees.length - 1;
    $("facts").textContent = `${tree.tokens.length - 1} draft tokens verified in one pass, ${hits} accepted, `
      + `${tree.emitted.length} emitted: ${tree.emitted.map(visible).join(" ")}`;
    const nodes = tree.tokens.map((token, i) => ({ text: visible(token), parent: tree.parents[i], source: source(tree.drafters[i]),
      chance: null, state: i === 0 ? "root" : tree.accepted.includes(i) ? "accepted" : "refused" }));
    if (tree.emitted.length > hits) {
      nodes.push({ text: visible(tree.emitted[hits]), parent: tree.accepted[hits], source: null, chance: null, state: "own" });
    }
    $("tree").replaceChildren(Draw.tree(nodes));
    document.querySelectorAll("#drafted .token").forEach((span) => {
      span.classList.toggle("now", !running && owner[Number(span.dataset.token)] === at);
    });
  }
  function showDepths(trees) {
    const deepest = Math.max(...trees.map((tree) => tree.accepted.length - 1));
    const rows = [];
    for (let depth = 1; depth <= deepest; depth++) {
      const share = trees.filter((tree) => tree.accepted.length > depth).length / trees.length;
      const bar = make("i"), percent = `${(100 * share).toFixed(0)} %`;
      bar.style.width = `${100 * share}%`;
      rows.push(make("span", {}, `depth ${depth}`), make("div", { class: "bar" }, bar), make("span", {}, percent));
    }
    $("depths").replaceChildren(...(rows.length ? rows : [make("span", {}, "none yet")]));
  }
  function buttons() {
    $("send").disabled = running !== null;
    $("halt").disabled = running === null;
    $("clear").disabled = running !== null;
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
      $("said").replaceChildren(make("textarea", { rows: 5, "aria-label": `The request as ${what}`, readonly: "" }, text));
      $("said").firstChild.select();
    }
  }

  // ---- moving

  function go(number) {
    const { trees } = runs[0];
    at = Math.max(0, Math.min(number, trees.length - 1));
    follow = at === trees.length - 1 && running !== null;
    showStrip(trees);
    showStep();
  }
  function halt() {
    if (running) running.abort();
  }
  function clear() {
    turns = [];
    runs = [];
    last = null;
    for (const id of ["drafted", "plain", "figures", "sources", "verdict", "said"]) $(id).replaceChildren();
    $("stepping").hidden = $("depths-part").hidden = true;
    show();
    $("prompt").focus();
  }
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("halt").addEventListener("click", halt);
  $("clear").addEventListener("click", clear);
  $("curl").addEventListener("click", () => copy(asCurl(), "curl"));
  $("python").addEventListener("click", () => copy(asPython(), "Python"));
  $("kind").addEventListener("change", () => {
    const chat = kind() === "chat";
    $("system-part").hidden = !chat;
    $("prompt-label").textContent = chat ? "Message" : "Text";
  });
  $("key").addEventListener("change", () => learn());
  $("slider").addEventListener("input", () => go(Number($("slider").value)));
  $("back").addEventListener("click", () => go(at - 1));
  $("forth").addEventListener("click", () => go(at + 1));
  document.addEventListener("click", (event) => {
    const token = event.target.closest("#drafted .token"), bar = event.target.closest("#strip g");
    if (token) go(runs[0].owner[Number(token.dataset.token)]);
    else if (bar) go(Number(bar.dataset.step));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") halt();
    if (event.key === "Enter" && event.ctrlKey && $("form").reportValidity()) send();
  });

  // Asks the server what it is.
  async function learn() {
    try {
      const response = await fetch("server_info", { headers: headers() });
      if (!response.ok) throw new Error(await sentence(response));
      about = await response.json();
      $("error").hidden = true;
      const known = await (await fetch("tokenizer_info", { headers: headers() })).json();
      if (!known.chat_template) { // the model goes on with texts alone
        const [chat, completion] = document.querySelectorAll("[name=kind]");
        chat.disabled = true;
        if (chat.checked) completion.click();
      }
      const drafter = about.drafter === null ? "no drafter" : `drafter ${about.drafter}`;
      $("about").textContent = `${about.model}; ${about.runner} runner; ${drafter}`;
    } catch (error) {
      $("key-part").open = true;
      complain(error.message);
    }
  }
  $("legend").replaceChildren(...Draw.key(["pruned"]));
  learn();
})();
