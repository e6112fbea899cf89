// The conversation, the composer and what happens between them.

import { Attribution, Figures, TARGET, Writer, element, tintOf } from "./answer.js";
import { modelName, streamChat } from "./stream.js";

const byId = (id) => document.getElementById(id);
const chat = byId("chat");
const prompt = byId("prompt");

let model = null;
let key = "";
let messages = []; // the conversation so far, as the API takes it
let running = null; // AbortController of the answer that is being written

/** Whether the server is there and lets us in. */
async function connect() {
  try {
    model = await modelName(key);
  } catch (error) {
    byId("model").textContent = error.status ? error.message : "the server cannot be reached";
    if (error.status === 401) askForKey(error.message);
    if (error.status === 503) setTimeout(connect, 2000); // it is still loading
    return false;
  }
  byId("model").textContent = model;
  byId("access").hidden = true;
  return true;
}

function askForKey(problem) {
  if (key) byId("key-note").textContent = problem;
  byId("access").hidden = false;
  byId("key").focus();
}

function settings() {
  return {
    temperature: Number(byId("temperature").value),
    max_completion_tokens: Number(byId("max-tokens").value) || undefined, // the server's own limit
    speculation: { enabled: byId("speculate").checked, origins: true },
  };
}

async function send(text) {
  if (!text || running) return;
  if (!model && !(await connect())) return;
  byId("intro").hidden = true;
  prompt.value = "";
  chat.append(element("p", "question", text));
  const conversation = messages; // "New chat" puts another in its place
  conversation.push({ role: "user", content: text });
  const result = await ask([...conversation], settings());
  conversation.push({ role: "assistant", content: result.text });
}

/** Streams an answer to the end of the page. `other`: the same question answered the other way, to compare with. */
async function ask(question, options, other = null) {
  const view = new AnswerView(options);
  chat.append(view.root);
  scrollToEnd();
  running = new AbortController();
  showRunning(true);
  const result = { text: "", isWhole: false, figures: view.figures, options };
  try {
    for await (const chunk of streamChat({ model, messages: question, ...options }, key, running.signal)) {
      const choice = chunk.choices[0];
      if (!choice) continue; // the last one sums up
      result.text += choice.delta.content ?? "";
      result.isWhole ||= Boolean(choice.finish_reason);
      view.add(choice.delta, chunk.speculation, performance.now());
    }
  } catch (error) {
    if (error.name !== "AbortError") view.fail(error.message);
    if (error.status === 401) askForKey(error.message);
  }
  running = null;
  showRunning(false);
  view.finish(other && compare(other, result));
  if (!other && view.figures.numTokens) view.offer(otherWay(options), (way) => ask(question, way, result));
  announce(result);
  return result;
}

class AnswerView {
  figures = new Figures();
  #attribution = new Attribution();
  #thoughts = element("div", "thoughts");
  #text = element("div");
  #panel = element("div", "figures");
  #isDue = false;
  #thoughtsWriter = new Writer(this.#thoughts);
  #writer = new Writer(this.#text);

  constructor(options) {
    this.root = element("article", "answer");
    this.root.setAttribute("aria-busy", "true");
    const heading = element("h2", "", options.speculation.enabled ? "Speculative" : "Plain");
    this.root.append(heading, this.#thoughts, this.#text, this.#panel);
    this.#panel.hidden = true;
  }

  add(delta, speculation, now) {
    const origins = speculation?.origins ?? [];
    this.#attribution.add(speculation?.tokens ?? [], origins);
    followEnd(() => {
      for (const piece of this.#attribution.split(delta.reasoning_content ?? "")) this.#thoughtsWriter.write(...piece);
      for (const piece of this.#attribution.split(delta.content ?? "")) this.#writer.write(...piece);
    });
    this.figures.add(origins, speculation?.num_draft_tokens ?? 0, now);
    this.#showSoon();
  }

  fail(message) {
    const fault = element("p", "fault", message);
    fault.setAttribute("role", "alert");
    followEnd(() => this.#text.append(fault));
  }

  finish(verdict) {
    this.root.setAttribute("aria-busy", "false");
    followEnd(() => {
      this.#thoughtsWriter.flush();
      this.#writer.flush();
      this.#show();
      if (verdict) this.#panel.append(element("p", "verdict", verdict));
    });
  }

  /** A button that asks the same once more, the other way. */
  offer(options, start) {
    const button = element("button", "", options.speculation.enabled ? "Again, speculative" : "Again, plain");
    button.type = "button";
    button.addEventListener("click", () => {
      if (running) return;
      button.remove();
      start(options);
      byId("stop").focus();
    });
    followEnd(() => this.#panel.append(button));
  }

  #showSoon() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      if (this.root.getAttribute("aria-busy") === "true") followEnd(() => this.#show());
    });
  }

  #show() {
    const { counts, numTokens, acceptance, tokensPerSecond } = this.figures;
    if (!numTokens) return;
    this.#panel.hidden = false;
    const origins = [...counts.keys()].sort((a, b) => tintOf(a) - tintOf(b));
    const shares = element("div", "shares");
    shares.setAttribute("aria-hidden", "true");
    const legend = element("ul", "legend");
    for (const origin of origins) {
      const share = element("i", `by-${tintOf(origin)}`);
      share.style.flexGrow = counts.get(origin);
      shares.append(share);
      const item = element("li");
      item.append(element("span", `swatch by-${tintOf(origin)}`), `${origin === TARGET ? "the model itself" : origin} `);
      item.append(element("b", "", counts.get(origin)));
      legend.append(item);
    }
    const numbers = element("ul", "numbers");
    for (const [name, value, unit] of [
      ["speed", tokensPerSecond?.toFixed(1), "tokens/s"],
      ["acceptance", acceptance === null ? undefined : `${Math.round(100 * acceptance)} %`, "accepted"],
      ["tokens", numTokens, numTokens === 1 ? "token" : "tokens"],
    ]) {
      if (value === undefined) continue;
      const item = element("li", name);
      item.append(element("b", "", value), ` ${unit}`);
      numbers.append(item);
    }
    this.#panel.replaceChildren(shares, numbers, legend);
  }
}

function otherWay(options) {
  return { ...options, speculation: { ...options.speculation, enabled: !options.speculation.enabled } };
}

/** What two answers to one question, one of them plain, tell. */
function compare(first, second) {
  const [plain, drafted] = second.options.speculation.enabled ? [first, second] : [second, first];
  const [slow, fast] = [plain.figures.tokensPerSecond, drafted.figures.tokensPerSecond];
  const words = [];
  if (slow && fast) words.push(`Speculative ran at ${(fast / slow).toFixed(2)} × the plain speed`);
  if (plain.isWhole && drafted.isWhole && !plain.options.temperature) {
    words.push(plain.text === drafted.text ? "the texts are identical" : "the texts differ");
  }
  return words.length ? `${words.join("; ")}.` : null;
}

function announce({ figures }) {
  const speed = figures.tokensPerSecond;
  const words = [`Answer ended, ${figures.numTokens} tokens`];
  if (speed) words.push(`${speed.toFixed(1)} tokens per second`);
  if (figures.acceptance !== null) words.push(`${Math.round(100 * figures.acceptance)} percent of the draft accepted`);
  byId("status").textContent = `${words.join(", ")}.`;
}

function showRunning(isRunning) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  if (hadFocus) byId(isRunning ? "stop" : "send").focus();
}

/** Makes a change, and keeps the end in view if it was. */
function followEnd(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 40;
  change();
  if (isAtEnd) scrollToEnd();
}

function scrollToEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

byId("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send(prompt.value.trim());
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    prompt.focus();
    send(example.textContent);
  });
}
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  connect().then((isConnected) => isConnected && prompt.focus());
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(prompt.value.trim());
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  chat.replaceChildren();
  byId("intro").hidden = false;
  prompt.focus();
});

prompt.focus();
connect();
