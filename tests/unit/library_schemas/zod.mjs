// JSON schemas that zod writes for twenty usual shapes.
//
//   npm install zod@4.6.7 && node zod.mjs > zod.json
import { createRequire } from "node:module";
import * as z from "zod";

const version = createRequire(import.meta.url)("zod/package.json").version;
const Tree = z.object({
  value: z.string(),
  get children() {
    return z.array(Tree);
  },
});
const shapes = {
  object: z.object({ path: z.string(), count: z.number() }),
  optional: z.object({ path: z.string(), limit: z.number().optional() }),
  nullable: z.object({ path: z.string().nullable(), note: z.string().nullish() }),
  default: z.object({ limit: z.number().int().default(10), deep: z.boolean().default(false) }),
  enum: z.object({ mode: z.enum(["read", "write"]) }),
  literal: z.object({ kind: z.literal("file"), version: z.literal(2) }),
  union: z.object({ value: z.union([z.string(), z.number(), z.boolean()]) }),
  discriminated: z.object({
    action: z.discriminatedUnion("type", [
      z.object({ type: z.literal("move"), to: z.string() }),
      z.object({ type: z.literal("wait"), ms: z.number() }),
    ]),
  }),
  array: z.object({ names: z.array(z.string()).min(1).max(5) }),
  tuple: z.object({ point: z.tuple([z.number(), z.number()]), rest: z.tuple([z.string()], z.number()) }),
  record: z.object({ env: z.record(z.string(), z.string()) }),
  keyed_record: z.object({ sizes: z.record(z.enum(["a", "b"]), z.number()) }),
  partial_record: z.object({ sizes: z.partialRecord(z.enum(["a", "b"]), z.number()) }),
  nested: z.object({ user: z.object({ name: z.string(), address: z.object({ city: z.string() }) }) }),
  recursive: Tree,
  integer: z.object({ n: z.int().min(0).max(100), even: z.number().multipleOf(2), positive: z.number().positive() }),
  formats: z.object({
    email: z.email(),
    url: z.url(),
    uuid: z.uuid(),
    at: z.iso.datetime(),
    day: z.iso.date(),
    ip: z.ipv4(),
    base64: z.base64(),
  }),
  patterns: z.object({ id: z.string().regex(/^[a-z]{2}-\d+$/), short: z.string().min(1).max(20) }),
  unknown: z.object({ payload: z.unknown(), any: z.any() }),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  strict: z.strictObject({ a: z.string() }),
  loose: z.looseObject({ a: z.string() }),
  described: z.object({ a: z.string().describe("What it is.").meta({ title: "A", examples: ["x"] }) }),
  empty: z.object({}),
  starts_with: z.object({ path: z.string().startsWith("/"), name: z.string().endsWith(".py") }),
};
const schemas = {};
for (const [name, shape] of Object.entries(shapes)) {
  for (const io of ["input", "output"]) {
    schemas[`${name}, ${io}`] = z.toJSONSchema(shape, { io });
  }
  schemas[`${name}, draft 7`] = z.toJSONSchema(shape, { target: "draft-7", io: "input" });
}
console.log(JSON.stringify({ generator: `zod ${version}`, schemas }, null, 1));
