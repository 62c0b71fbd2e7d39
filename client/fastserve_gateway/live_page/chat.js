// A conversation with the model. Its answers become text, never HTML.

import { events, request } from "/live/api.js";

const MOST_ROUNDS = 4; // requests with tools for one message

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
    const turn = []; // calls of tools and their results
    let thoughts = null;
    let answer = "";
    let tokens = 0;
    const startedMs = performance.now();
    try {
      const pieces = this.find("chat-tools").checked
        ? this.answerWithTools(conversation, turn, this.running.signal)
        : this.answer({ messages: conversation }, this.running.signal);
      for await (const piece of pieces) {
        tokens += 1;
        if (piece.called) this.add("call", piece.called, bubble);
        if (piece.reasoning_content) {
          thoughts ??= this.add("reasoning", "", bubble);
          this.show(thoughts, thoughts.textContent + piece.reasoning_content);
        }
        if (piece.content) this.show(bubble, (answer += piece.content));
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
    conversation.push(...turn, { role: "assistant", content: answer });
    const meta = document.createElement("p");
    meta.className = "meta";
    meta.textContent = `${tokens} pieces in ${seconds.toFixed(1)} s`;
    bubble.after(meta);
  }

  // Yields pieces of the answer, which may take several requests: the gateway runs the tools that
  // the model calls, and the model goes on with their results, which are added to `turn`.
  async *answerWithTools(messages, turn, signal) {
    const model = new URLSearchParams({ model: await this.modelName() });
    const demo = await (await request(`/live/tools?${model}`, { signal })).json();
    const before = [...demo.examples, ...messages];
    const { tools, tool_choice, temperature } = demo;
    let body = { messages: before, tools, tool_choice, temperature };
    for (let round = 1; ; round += 1) {
      const calls = [];
      for await (const piece of this.answer(body, signal)) {
        for (const call of piece.tool_calls ?? []) addCall(calls, call);
        yield piece;
      }
      if (!calls.length) return;
      turn.push({ role: "assistant", content: "", tool_calls: calls });
      for (const { id, function: called } of calls) {
        const path = `/live/tools/${called.name}?${new URLSearchParams({ arguments: called.arguments })}`;
        const { result } = await (await request(path, { signal })).json();
        if (result) yield { called: `${called.name}: ${result}` };
        turn.push({ role: "tool", tool_call_id: id, content: result });
      }
      if (calls.some((call) => call.function.name === demo.no_tool)) {
        body = { messages: messages.filter((one) => one.role !== "tool" && !one.tool_calls) };
      } else {
        const mayCall = tool_choice === "auto" && round < MOST_ROUNDS;
        body = { ...body, messages: [...before, ...turn], tool_choice: mayCall ? "auto" : "none" };
      }
    }
  }

  // Yields pieces of the answer to one request. A model without a chat template continues the last
  // message.
  async *answer(body, signal) {
    const common = {
      model: await this.modelName(),
      stream: true,
      max_tokens: Number(this.find("chat-tokens").value) || 256,
    };
    let response;
    try {
      response = await request("/v1/chat/completions", { body: { ...common, ...body }, signal });
    } catch (error) {
      if (!error.message.includes("no chat template")) throw error;
      this.note("This model has no chat template: it continues your text as it is.");
      const prompt = body.messages.at(-1).content;
      response = await request("/v1/completions", { body: { ...common, prompt }, signal });
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const { error, choices } = JSON.parse(data);
      if (error) throw new Error(error.message);
      for (const choice of choices) {
        const piece = choice.delta ?? { content: choice.text };
        if (piece.content || piece.reasoning_content || piece.tool_calls) yield piece;
      }
    }
  }

  add(role, text, before = null) {
    const bubble = document.createElement("p");
    bubble.className = `message ${role}`;
    bubble.textContent = text;
    this.log.insertBefore(bubble, before);
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

// Joins the deltas of a call: the first has its name, the others more of its arguments.
function addCall(calls, delta) {
  const call = (calls[delta.index] ??= {
    id: delta.id,
    type: "function",
    function: { name: delta.function.name, arguments: "" },
  });
  call.function.arguments += delta.function.arguments ?? "";
}
