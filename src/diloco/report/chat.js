"use strict";
// What is typed and what the model writes reach the page as text, never as markup.
(() => {
  const base = location.pathname.replace(/\/$/, "");
  const at = (id) => document.getElementById(id);
  const [talk, ask, send, stop, clear, state] = ["talk", "ask", "send", "stop", "clear", "state"].map(at);
  let all = "", most = 8000, running = null;

  function make(kind, ...children) {
    const made = document.createElement(kind);
    made.append(...children);
    return made;
  }

  // The events of an answer: a line of JSON for each.
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield JSON.parse(line);
    }
  }

  async function write(made) {
    const question = { text: [...all].slice(-most).join(""), max_tokens: Number(at("tokens").value), temperature: Number(at("temperature").value) };
    const answer = await fetch(`${base}/chat`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal: running.signal,
    });
    if (!answer.ok) return (await answer.text()).trim();
    let step = "", ended = null;
    for await (const event of events(answer)) {
      if ("step" in event) step = `by the model of step ${event.step.toLocaleString("en")}`;
      if ("text" in event) {
        all += event.text;
        made.textContent += event.text;
        talk.scrollTop = talk.scrollHeight;
      }
      if ("end" in event) ended = event.end;
      state.textContent = step;
    }
    return ended === null ? "the answer was cut off" : [step, ended].filter(Boolean).join("; ");
  }

  async function go() {
    if (running) return;
    const text = (all && !all.endsWith("\n") && ask.value ? "\n" : "") + ask.value;
    running = new AbortController();
    all += text;
    const made = make("span");
    talk.append(make("b", text), made);
    talk.hidden = false;
    ask.value = "";
    state.textContent = "waiting …";
    send.disabled = clear.disabled = true;
    stop.hidden = false;
    try {
      state.textContent = await write(made);
    } catch (error) {
      state.textContent = error.name === "AbortError" ? "stopped" : `diloco chat has ended, or can't be reached (${error.message})`;
    }
    running = null;
    send.disabled = clear.disabled = false;
    stop.hidden = true;
    ask.focus();
  }

  function reach(far) {
    const row = (cells, kind) => make("tr", ...cells.map((cell) => make(kind, cell)));
    const rows = far.table.rows.map((cells) => row(cells, "td"));
    at("this").textContent = far.this;
    at("larger").replaceChildren(make("table", row(far.table.columns, "th"), ...rows));
    at("about").textContent = far.about;
    at("reach").hidden = false;
  }

  async function begin() {
    const facts = await (await fetch(`${base}/chat.json`)).json();
    most = ask.maxLength = facts.most_characters;
    at("tokens").max = facts.most_tokens;
    for (const [id, value] of [["tokens", facts.max_tokens], ["temperature", facts.temperature]])
      if (!at(id).value) at(id).value = value;
    if (facts.reach) reach(facts.reach);
  }

  send.addEventListener("click", go);
  stop.addEventListener("click", () => running?.abort());
  clear.addEventListener("click", () => {
    all = state.textContent = "";
    talk.replaceChildren();
    talk.hidden = true;
  });
  ask.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      go();
    }
  });
  begin().catch((error) => { state.textContent = error.message; });
})();
