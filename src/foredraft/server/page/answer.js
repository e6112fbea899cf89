// One answer on the page: its tokens, tinted by who proposed them, and its figures. Text becomes text nodes, never markup.

export const TARGET = "target";
const NUM_TINTS = 5;
const FENCE = "```";

const tints = new Map([[TARGET, 0]]);

/** The tint of an origin: 0 for the model itself, then in order of appearance. */
export function tintOf(origin) {
  if (!tints.has(origin)) tints.set(origin, 1 + ((tints.size - 1) % NUM_TINTS));
  return tints.get(origin);
}

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/**
 * Splits displayed text among the tokens that it came from. The server holds text back (half an emoji, the beginning of a
 * stop string) and leaves marks out (of thoughts, of tool calls), so tokens wait here until their text is shown.
 */
export class Attribution {
  #waiting = [];
  #last = TARGET;

  add(tokens, origins) {
    tokens.forEach((text, i) => this.#waiting.push({ text, origin: origins[i] }));
  }

  /** Pieces [text, origin] that concatenate to `text`. */
  split(text) {
    const pieces = [];
    while (text) {
      const token = this.#next(text);
      if (!token) {
        pieces.push([text, this.#last]);
        break;
      }
      const length = Math.min(text.length, token.text.length);
      pieces.push([text.slice(0, length), token.origin]);
      this.#last = token.origin;
      token.text = token.text.slice(length);
      text = text.slice(length);
    }
    return pieces;
  }

  /** The first token that the text begins with, or that begins with the text. Those before it were never shown. */
  #next(text) {
    const fits = (token) => token.text && (text.startsWith(token.text) || token.text.startsWith(text));
    const at = this.#waiting.findIndex(fits);
    this.#waiting.splice(0, at < 0 ? this.#waiting.length : at);
    return this.#waiting[0];
  }
}

/** Writes pieces of text into blocks of prose and code; a line that begins with ``` changes between them. */
export class Writer {
  #root;
  #block = null;
  #line = ""; // the current line, as far as it matters: its first characters
  #held = []; // pieces at the beginning of a line that may become a fence
  #isCode = false;
  #closes = false; // the current line is the fence that ends the code

  constructor(root) {
    this.#root = root;
  }

  write(text, origin) {
    for (const part of text.split(/(?<=\n)/)) this.#writePart(part, origin);
  }

  /** Shows what is held back. */
  flush() {
    this.#held.forEach(([text, origin]) => this.#append(text, origin));
    this.#held = [];
  }

  /** `part` is within one line; if the line ends, so does the part. */
  #writePart(part, origin) {
    const before = this.#line;
    if (before.length < FENCE.length) this.#line += part;
    this.#held.push([part, origin]);
    if (FENCE.startsWith(this.#line) && this.#line !== FENCE) return; // may yet be a fence
    if (before.length < FENCE.length && this.#line.startsWith(FENCE)) {
      if (this.#isCode) this.#closes = true;
      else this.#open(true);
    }
    this.flush();
    if (!part.endsWith("\n")) return;
    this.#line = "";
    if (this.#closes) this.#open(false);
    this.#closes = false;
  }

  #open(isCode) {
    this.#isCode = isCode;
    this.#block = null;
  }

  #append(text, origin) {
    if (!this.#block) {
      this.#block = element("div", this.#isCode ? "code" : "prose");
      this.#root.append(this.#block);
    }
    const token = element("span", `token by-${tintOf(origin)}`, text);
    token.dataset.origin = origin;
    this.#block.append(token);
  }
}

/** Counts one answer's tokens, passes and time. Times in milliseconds. */
export class Figures {
  counts = new Map();
  numTokens = 0;
  numDraftTokens = 0;
  #first = null;
  #last = null;

  add(origins, numDraftTokens, now) {
    for (const origin of origins) this.counts.set(origin, (this.counts.get(origin) ?? 0) + 1);
    this.numTokens += origins.length;
    this.numDraftTokens += numDraftTokens;
    if (!origins.length) return;
    this.#first ??= now;
    this.#last = now;
  }

  get numAccepted() {
    return this.numTokens - (this.counts.get(TARGET) ?? 0);
  }

  /** Accepted share of the draft tokens, or null without drafts. */
  get acceptance() {
    return this.numDraftTokens ? this.numAccepted / this.numDraftTokens : null;
  }

  /** From the first token on, as `foredraft generate` counts. Null before the second. */
  get tokensPerSecond() {
    return this.#last > this.#first ? ((this.numTokens - 1) * 1000) / (this.#last - this.#first) : null;
  }
}
