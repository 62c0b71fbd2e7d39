// A demonstration load: short and long jobs at once, to show the queues at work.

import { request } from "/live/api.js";

// Browsers open six connections to a server. The live view takes one, and the chat may take one. So
// the jobs of a group share a request.
const MAX_TOKENS = [12, 40, 110, 260];
const PROMPT_WORDS = [4, 15, 40, 80, 140];
const WORDS = "the queue that short jobs overtake while long ones are set aside and go on later".split(" ");

export class Load {
  constructor(button, note, modelName) {
    this.button = button;
    this.note = note;
    this.modelName = modelName;
    this.label = button.textContent;
    this.running = null;
    button.addEventListener("click", () => (this.running ? this.running.abort() : this.send()));
  }

  async send() {
    this.running = new AbortController();
    const { signal } = this.running;
    this.button.textContent = "Stop them";
    this.say("");
    try {
      const model = await this.modelName();
      const prompt = PROMPT_WORDS.map(words);
      await Promise.all(
        MAX_TOKENS.map(async (max_tokens) => {
          const body = { model, prompt, max_tokens, ignore_eos: true };
          await (await request("/v1/completions", { body, signal })).arrayBuffer();
        }),
      );
    } catch (error) {
      if (error.name !== "AbortError") this.say(error.message);
      this.running.abort(); // the other groups
    }
    this.running = null;
    this.button.textContent = this.label;
  }

  say(text) {
    this.note.textContent = text;
    this.note.toggleAttribute("data-bad", Boolean(text));
  }
}

function words(number) {
  return Array.from({ length: number }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(" ");
}
