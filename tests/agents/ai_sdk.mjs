// A conversation by the AI SDK: argv is the API, the base URL, and what is played.
// Prints what came out as JSON. Node resolves the packages from its working directory.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would be printed, too
const [api, url, part] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const model = {
  responses: () => createOpenAI(settings).responses("fastserve"),
  chat: () => createOpenAI(settings).chat("fastserve"),
  messages: () => createAnthropic(settings)("fastserve"),
}[api]();
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string(), unit: z.enum(["C", "F"]).optional() }),
  execute: async ({ city }) => ({ city, sky: "clear" }),
});
const common = { model, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };

const parts = {
  async tools() {
    const asked = [{ role: "user", content: "How is the weather in Rome?" }];
    const first = streamText({ ...common, messages: asked });
    const text = await first.text;
    const said = (await first.response).messages;
    const again = [...asked, ...said, { role: "user", content: "And tomorrow?" }];
    const second = streamText({ ...common, messages: again });
    const steps = await first.steps;
    return {
      text,
      results: steps.flatMap((step) => step.toolResults.map((result) => result.output)),
      reason: await first.finishReason,
      later: await second.text,
    };
  },
  async object() {
    const schema = z.object({
      sky: z.enum(["clear", "cloudy"]),
      hours: z.array(z.literal(12)).length(2),
      wind: z.union([z.literal("calm"), z.null()]),
    });
    const { object, finishReason } = await generateObject({ model, schema, prompt: "The weather?", maxRetries: 0 });
    return { object, reason: finishReason };
  },
  async cancel() {
    const stop = new AbortController();
    const endless = streamText({ ...common, prompt: "Write.", abortSignal: stop.signal });
    let size = 0;
    for await (const piece of endless.textStream) {
      size += piece.length;
      if (size > 200) stop.abort();
    }
    return { size };
  },
};
console.log(JSON.stringify(await parts[part]()));
