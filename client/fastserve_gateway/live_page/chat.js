// A conversation with the model. Its answers become text, never HTML.

import { events, request } from "/live/api.js";

export class Chat {
  constructor(find, modelName) {
    this.find = find;
    this.modelName = modelName;
    this.log = find("chat-log");
    this.input = find("chat-input");
    this.hint = this.log.firstElementChild;
    this.messages = [];
    this.running = null;
    find("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        find("chat-form").requestSubmit();
      }
    });
    find("chat-stop").addEventListener("click", () => this.running?.abort());
    find("chat-clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.hint);
    this.note("");
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    const conversation = this.messages;
    conversation.push({ role: "user", content: text });
    this.hint.remove();
    const question = this.add("user", text);
    this.input.value = "";
    const bubble = this.add("assistant", "");
    this.start(bubble);
    let answer = "";
    let tokens = 0;
    const startedMs = performance.now();
    try {
      for await (const piece of this.answer(conversation, this.running.signal)) {
        answer += piece;
        tokens += 1;
        this.show(bubble, answer);
      }
      if (!answer) this.note("The answer is empty.");
    } catch (error) {
      // Not if a new chat has ended this one.
      if (conversation === this.messages) {
        if (error.name === "AbortError") this.note("stopped");
        else this.note(error.message, true);
      }
    }
    this.end(bubble);
    const seconds = (performance.now() - startedMs) / 1000;
    if (!answer) {
      bubble.remove();
      question.remove(); // it is no part of the conversation
      conversation.pop();
      if (conversation === this.messages && !this.input.value) this.input.value = text;
      return;
    }
    conversation.push({ role: "assistant", content: answer });
    const meta = document.createElement("p");
    meta.className = "meta";
    meta.textContent = `${tokens} pieces in ${seconds.toFixed(1)} s`;
    bubble.after(meta);
  }

  // Yields pieces of text. A model without a chat template continues the last message.
  async *answer(messages, signal) {
    const common = {
      model: await this.modelName(),
      stream: true,
      max_tokens: Number(this.find("chat-tokens").value) || 256,
    };
    let response;
    try {
      response = await request("/v1/chat/completions", { body: { ...common, messages }, signal });
    } catch (error) {
      if (!error.message.includes("no chat template")) throw error;
      this.note("This model has no chat template: it continues your text as it is.");
      const prompt = messages.at(-1).content;
      response = await request("/v1/completions", { body: { ...common, prompt }, signal });
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const { error, choices } = JSON.parse(data);
      if (error) throw new Error(error.message);
      for (const choice of choices) {
        const piece = choice.text ?? choice.delta.content;
        if (piece) yield piece;
      }
    }
  }

  add(role, text) {
    const bubble = document.createElement("p");
    bubble.className = `message ${role}`;
    bubble.textContent = text;
    this.log.append(bubble);
    this.log.scrollTop = this.log.scrollHeight;
    return bubble;
  }

  show(bubble, text) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    bubble.textContent = text;
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  start(bubble) {
    this.running = new AbortController();
    this.note("");
    bubble.dataset.writing = "";
    this.log.setAttribute("aria-busy", "true"); // screen readers read it when it is whole
    this.find("chat-send").disabled = true;
    this.find("chat-stop").disabled = false;
  }

  end(bubble) {
    this.running = null;
    delete bubble.dataset.writing;
    this.log.removeAttribute("aria-busy");
    this.find("chat-send").disabled = false;
    this.find("chat-stop").disabled = true;
  }

  note(text, bad = false) {
    const note = this.find("chat-note");
    note.textContent = text;
    note.toggleAttribute("data-bad", bad);
  }
}
